"""Long series as short ones that look the same."""

from collections.abc import Sequence
from itertools import pairwise


def thin(values: Sequence[float | None], most: int) -> list[int]:
    """Places of at most about `most` values, in order: of every stretch the lowest and the highest, and the ends.

    None is a value that is not a number: of every stretch the first one stays too, so that the gap is seen.
    """
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for begin, end in _stretches(len(values), max(most // 2 - 1, 1)):
        stretch = values[begin:end]
        if None in stretch:
            kept.add(begin + stretch.index(None))
        numbers = [value for value in stretch if value is not None]
        if numbers:
            kept |= {begin + stretch.index(min(numbers)), begin + stretch.index(max(numbers))}
    return sorted(kept)


def spread(count: int, most: int) -> list[int]:
    """Places of at most `most` of `count` things, evenly spread, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)}) if most > 1 else [count - 1]


def stretches(count: int, most: int) -> list[tuple[int, int]]:
    """`count` things in at most `most` parts of nearly the same size: where each begins and ends."""
    return _stretches(count, min(count, most)) if count else []


def _stretches(count: int, parts: int) -> list[tuple[int, int]]:
    return list(pairwise(count * i // parts for i in range(parts + 1)))


def rounded(value: float | None, digits: int = 6) -> float | None:
    """With so many digits that count: more are not seen, and make a page long."""
    return None if value is None else float(f"{value:.{digits}g}")
