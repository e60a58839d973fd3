"""What a check has found."""

import pytest

from shoal.deploy.doctor.finding import Finding, Level, in_bytes, in_list, passed, skipped, worst


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        (["pass", "fail", "warn"], "fail"),
        (["pass", "warn", "skip"], "warn"),
        (["pass", "skip"], "pass"),
        (["skip"], "pass"),
        ([], "pass"),
    ],
)
def test_the_worst_decides(levels: list[Level], expected: Level) -> None:
    assert worst(Finding("a", level, "b") for level in levels) == expected


def test_a_finding_survives_its_way_as_a_record() -> None:
    finding = Finding("shm", "fail", "64 MiB", "give it more", group="nodes", node="10.0.0.1")
    assert Finding(**finding.to_record()) == finding
    assert passed("a", "b").level == "pass" and skipped("a", "b").level == "skip"


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 MiB"), (64 << 20, "64 MiB"), (3 << 29, "1.5 GiB"), (5 << 40, "5.0 TiB")]
)
def test_sizes_in_words(size: int, words: str) -> None:
    assert in_bytes(size) == words


def test_long_lists_are_cut() -> None:
    assert in_list([1, 2]) == "1, 2"
    assert in_list(range(7)) == "0, 1, 2, 3 and 3 more"
