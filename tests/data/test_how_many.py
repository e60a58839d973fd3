"""How many processes should read, from how long steps take."""

import pytest

from shoal.data.how_many import HowMany


def settle(policy: HowMany, read_s: float, compute_s: float, steps: int = 60) -> int:
    """Reading is shared by as many as there are; what training does not wait for costs nothing."""
    for _ in range(steps):
        count = policy.count
        waited = read_s if not count else max(0.0, read_s / count - compute_s)
        policy.note(waited, compute_s)
    return policy.count


@pytest.mark.parametrize(
    ("read_s", "compute_s", "most", "count"),
    [
        (0.0001, 0.1, 16, 0),  # hardly anything to gain
        (0.0003, 0.0001, 16, 0),  # a process would cost as much
        (0.02, 0.1, 16, 1),
        (0.1, 0.1, 16, 2),
        (0.75, 0.1, 16, 10),
        (0.75, 0.1, 4, 4),  # as many as there may be
        (5.0, 0.0, 8, 8),
    ],
)
def test_as_many_as_it_takes(read_s: float, compute_s: float, most: int, count: int) -> None:
    assert settle(HowMany(most), read_s, compute_s) == count


def test_it_begins_in_line_and_takes_its_time() -> None:
    policy = HowMany(8)
    assert policy.count == 0
    assert [policy.note(1.0, 0.1) for _ in range(6)] == [None] * 6, "the first steps tell nothing"
    assert policy.note(1.0, 0.1) == 8


def test_more_where_it_is_still_not_enough() -> None:
    policy = HowMany(16)
    while policy.note(0.02, 0.1) is None:
        pass
    assert policy.count == 1
    found = [policy.note(0.05, 0.1) for _ in range(20)]
    assert [count for count in found if count] == [2, 4]
