"""Somebody who watches a search."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from shoal.tune.search import Search


class View(Protocol):
    """A terminal, a log."""

    def show(self, search: "Search") -> None:
        """It has changed."""
        ...

    def event(self, event: dict[str, Any]) -> None:
        """What was written to the journal."""
        ...

    def note(self, words: str) -> None:
        """Something that is not in the journal."""
        ...
