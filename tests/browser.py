"""A real browser for pages that Shoal writes: Chromium, which may open files and nothing else."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass
class Opened:
    """A page, and what it complained about or asked for since."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    """Errors, words on the console, dialogs."""
    requests: list[str] = field(default_factory=list)
    """Addresses it asked for, other than itself."""

    @property
    def is_quiet(self) -> bool:
        """Whether there was nothing of the kind."""
        return not self.complaints and not self.requests


@dataclass
class Browser:
    """Opens pages, each in a context of its own."""

    chromium: Any
    contexts: list[Any] = field(default_factory=list)

    def open(self, path: Path, width: int = 1200, height: int = 900, **settings: Any) -> Opened:
        """Open a file; `settings` as in playwright's `new_context`."""
        context = self.chromium.new_context(viewport={"width": width, "height": height}, **settings)
        self.contexts.append(context)
        opened = Opened(context.new_page())
        own = path.absolute().as_uri()

        def route(route: Any) -> None:
            if route.request.url.split("#")[0] == own:
                route.continue_()
            else:
                opened.requests.append(route.request.url)
                route.abort()

        def dismiss(dialog: Any) -> None:
            opened.complaints.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        context.route("**/*", route)
        opened.page.on("console", lambda message: opened.complaints.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.complaints.append(f"error: {error}"))
        opened.page.on("dialog", dismiss)
        opened.page.goto(own)
        return opened

    def close_pages(self) -> None:
        """Close what was opened."""
        while self.contexts:
            self.contexts.pop().close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for a module's tests."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as play:
        # Without its sandbox, which cannot be made inside most containers: the pages are our own.
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Browser]:
    """Pages are closed after the test."""
    one = Browser(chromium)
    yield one
    one.close_pages()
