"""Why something was not taken, in a few words: packages wrap an error into others, and tell of all at once. Pure."""

import re
from collections.abc import Iterator

_MOST_WORDS = 200
_POOL = re.compile(r"^HTTPS?ConnectionPool\([^)]*\):\s*")


def short_reason(error: BaseException) -> str:
    """One line: what the system says of a connection or a disk where that is at the bottom of it, or else the error's
    own first line."""
    found = list(_inside(error))
    for inner in reversed(found):
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        if isinstance(inner, ConnectionError) and str(inner):
            return _first_line(str(inner))
    if any(isinstance(inner, TimeoutError) for inner in found):
        return "no answer in time"
    for inner in found:  # urllib3's, for a server that answers with an error again and again
        if isinstance(reason := getattr(inner, "reason", None), Exception):
            return _first_line(str(reason))
    return _first_line(f"{type(error).__name__}: {error}")


def _inside(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it came of, the outermost first."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, BaseException) and id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += [one.__cause__, one.__context__, getattr(one, "reason", None), *one.args]


def _first_line(text: str) -> str:
    lines = text.strip().splitlines() or [""]
    line = _POOL.sub("", lines[0].strip())
    return line if len(line) <= _MOST_WORDS else line[: _MOST_WORDS - 3] + "..."
