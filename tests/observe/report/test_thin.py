"""Long series become short ones in which nothing that stands out is lost."""

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.report.thin import rounded, spread, stretches, thin

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=400)


@given(VALUES, st.integers(4, 100))
def test_the_extremes_the_ends_and_every_gap_stay(values: list[float | None], most: int) -> None:
    kept = thin(values, most)
    assert kept == sorted(set(kept)) and kept[0] == 0 and kept[-1] == len(values) - 1
    numbers = [value for value in values if value is not None]
    left = [values[place] for place in kept if values[place] is not None]
    if numbers:
        assert min(left) == min(numbers) and max(left) == max(numbers)  # type: ignore[type-var]
    assert (None in values) == any(values[place] is None for place in kept)


def test_a_million_values_become_few_and_a_lone_spike_stays() -> None:
    values: list[float | None] = [random.random() for _ in range(1_000_000)]
    values[123_456] = 50.0
    kept = thin(values, 1000)
    assert len(kept) <= 1002 and 123_456 in kept


def test_a_short_series_stays_whole() -> None:
    assert thin([3.0, None, 1.0], 3) == [0, 1, 2]
    assert thin([], 3) == []


@given(st.integers(0, 5000), st.integers(1, 300))
def test_parts_cover_all_without_overlap(count: int, most: int) -> None:
    parts = stretches(count, most)
    assert len(parts) == min(count, most)
    assert [place for begin, end in parts for place in range(begin, end)] == list(range(count))
    assert all(end > begin for begin, end in parts)


@given(st.integers(0, 5000), st.integers(1, 300))
def test_what_is_spread_keeps_the_newest(count: int, most: int) -> None:
    places = spread(count, most)
    assert places == sorted(set(places)) and len(places) <= max(most, 1)
    assert not count or places[-1] == count - 1


def test_digits_that_nobody_sees_are_dropped() -> None:
    assert rounded(0.123456789) == 0.123457 and rounded(None) is None and rounded(1234567.8, 3) == 1.23e6
