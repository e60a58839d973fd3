"""Values of files that anybody may have written."""

from typing import Any, TypeGuard

_FAR = 1e300


def number(value: Any) -> float | None:
    """A number that can be counted with, or None."""
    if type(value) is float:  # first, because most are, and a run may have millions
        return value if -_FAR < value < _FAR else None
    return float(value) if type(value) is int and -_FAR < value < _FAR else None


def numbers(values: Any) -> dict[str, float]:
    """Those of a mapping's values that are numbers."""
    if not isinstance(values, dict):
        return {}
    return {name: found for name, value in values.items() if (found := number(value)) is not None}


def is_count(value: Any) -> TypeGuard[int]:
    """Whether it is a number of things."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1e15
