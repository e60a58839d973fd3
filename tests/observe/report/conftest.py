"""A browser for the tests of pages."""

from tests.browser import browser, chromium

__all__ = ["browser", "chromium"]
