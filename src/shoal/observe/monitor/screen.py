"""The terminal while a run is watched: drawn in place, on a screen of its own, and left as it was."""

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType

from rich.console import Console
from rich.control import Control
from rich.text import Text

from shoal.observe.monitor.facts import Facts, facts_of
from shoal.observe.monitor.frame import frame
from shoal.observe.monitor.look import Look, look_of
from shoal.observe.monitor.standing import is_over
from shoal.observe.monitor.watch import RunWatch
from shoal.observe.monitor.wording import ending

REFRESH_S = 1.0
_LOOK_EVERY_S = 0.1
"""How soon a key or another size is noticed."""
_READ_S = 0.4
"""Of each refresh, for reading: a long run is caught up with in several."""
_WIDE = (100, 40)
"""Where there is no terminal to ask."""


def make_console() -> Console:
    """For frames: nothing in them is markup."""
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=False)


def show_once(watch: RunWatch, console: Console) -> None:
    """One frame, as large as the terminal, and how the run ended if it has."""
    watch.poll()
    facts = facts_of(watch)
    width, height = console.size if console.is_terminal else _size_asked_for()
    console.width = width  # rich would cut at 80 where there is no terminal
    _print_last(console, facts, width, height, look_of(console), is_over(watch, facts.status))


def follow(watch: RunWatch, console: Console) -> None:
    """Until the run is over, or the user has seen enough."""
    screen = _Screen(console)
    look, over = look_of(console), 0
    facts: Facts | None = None
    with screen.taken(), contextlib.suppress(KeyboardInterrupt):
        while over < 2:  # seen twice: what is written after the end, a summary, is there by then
            watch.poll(_READ_S)
            facts = facts_of(watch)
            over = over + 1 if is_over(watch, facts.status) and not watch.is_behind else 0
            if not screen.show(facts, look, time.monotonic() + (0.0 if watch.is_behind else REFRESH_S)):
                return
    if over >= 2 and facts is not None:
        width, height = console.size
        _print_last(console, facts, width, height - 1, look, is_ended=True)


def _print_last(console: Console, facts: Facts, width: int, height: int, look: Look, is_ended: bool) -> None:
    """A frame that stays, and in a line how the run ended."""
    words = look.text(ending(facts)) if is_ended else ""
    for line in frame(facts, width, height - -(-len(words) // width), look, is_live=False):
        console.print(line, no_wrap=True, crop=True, overflow="ignore", width=width)
    if words:
        console.print(Text(words, "bold"), soft_wrap=True)


def _size_asked_for() -> tuple[int, int]:
    asked = [os.environ.get(name, "") for name in ("COLUMNS", "LINES")]
    width, height = (int(value) if value.isascii() and value.isdigit() else 0 for value in asked)
    return width or _WIDE[0], height or _WIDE[1]


class _Screen:
    """A terminal's second screen, with keys that are read as they are pressed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._modes = termios.tcgetattr(self._keys) if self._keys is not None else None
        self._was_suspended = False

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Ours meanwhile; whatever happens, the terminal is as before afterwards."""
        handlers = {
            number: signal.signal(number, handler)
            for number, handler in (
                (signal.SIGTERM, _interrupt),
                (signal.SIGHUP, _interrupt),
                (signal.SIGTSTP, self._suspend),
            )
        }
        try:
            self._enter()
            yield
        finally:
            self._leave()
            for number, before in handlers.items():
                signal.signal(number, before)

    def _enter(self) -> None:
        if self._keys is not None:
            tty.setcbreak(self._keys)
        self.console.set_alt_screen(True)
        self.console.show_cursor(False)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has been closed
            self.console.show_cursor(True)
            self.console.set_alt_screen(False)
        if self._keys is not None and self._modes is not None:
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)

    def _suspend(self, number: int, where: FrameType | None) -> None:
        """Ctrl-Z: the shell gets its terminal back, and we ours when we go on."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()
        self._was_suspended = True

    def show(self, facts: Facts, look: Look, until: float) -> bool:
        """Draw, and again if the size changes, until that time; False if the user wants to leave, or has left."""
        try:
            return self._show(facts, look, until)
        except OSError:  # the terminal is gone
            return False

    def _show(self, facts: Facts, look: Look, until: float) -> bool:
        size = None
        while True:
            if self.console.size != size or self._was_suspended:
                size, self._was_suspended = self.console.size, False
                self._draw(frame(facts, size.width, size.height, look), size.width, size.height)
            left_s = until - time.monotonic()
            if self._wants_to_leave(min(max(left_s, 0.0), _LOOK_EVERY_S)):
                return False
            if left_s <= 0:
                return True

    def _draw(self, lines: list[Text], width: int, height: int) -> None:
        lines = lines + [Text("")] * (height - len(lines))
        with self.console:  # one write
            self.console.control(Control.home())
            for number, line in enumerate(lines):
                line.pad_right(max(width - line.cell_len, 0))
                end = "\n" if number < height - 1 else ""
                self.console.print(line, end=end, no_wrap=True, crop=True, overflow="ignore")

    def _wants_to_leave(self, wait_s: float) -> bool:
        if self._keys is None:
            time.sleep(wait_s)
            return False
        ready, _, _ = select.select([self._keys], [], [], wait_s)
        if not ready:
            return False
        pressed = os.read(self._keys, 64)
        return not pressed or any(key in b"qQ\x03" for key in pressed)


def _interrupt(number: int, where: FrameType | None) -> None:
    raise KeyboardInterrupt
