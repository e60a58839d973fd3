"""Every decision of a launcher, as a table."""

import pytest

from shoal.launch.policy import (
    Failure,
    Kind,
    Size,
    hung_ranks,
    is_retried,
    may_restart,
    missing_resources,
    restarts_in_a_row,
    root_cause,
    size_to_grow_to,
    size_to_start,
)


@pytest.mark.parametrize(
    ("kinds", "rank"),
    [
        (["died"], 0),
        (["network", "died"], 1),
        (["died", "network"], 0),
        (["network", "network", "network"], 0),
        # What the user's code did explains why others lost it; and if one died of it, that one's words are missing.
        (["network", "exception"], 1),
        (["died", "exception"], 1),
        (["exception", "exception"], 0),
        (["network", "run"], 1),
        (["exception", "run"], 1),
        (["run", "user"], 1),
        (["network", "user", "exception"], 1),
        # A machine that went takes its workers along, and what the others say then is of no interest.
        (["died", "lost"], 1),
        (["exception", "network", "lost"], 2),
        (["user", "lost"], 1),
        (["hung", "lost"], 1),
        # A worker that stood is why the others gave up.
        (["network", "hung"], 1),
        (["died", "hung", "hung"], 1),
        (["exception", "hung"], 1),
    ],
)
def test_the_cause_is_the_failure_that_explains_the_others(kinds: list[Kind], rank: int) -> None:
    failures = [Failure(number, kind, "") for number, kind in enumerate(kinds)]
    assert root_cause(failures).rank == rank
    assert root_cause(failures[::-1]).rank == rank, "the order in which they are heard of does not matter"


@pytest.mark.parametrize(
    ("kind", "retried"),
    [
        ("user", False),
        ("run", False),
        ("exception", False),
        ("network", True),
        ("died", True),
        ("lost", True),
        ("hung", True),
    ],
)
def test_only_what_may_not_happen_again_is_retried(kind: Kind, retried: bool) -> None:
    assert is_retried(Failure(0, kind, "")) is retried


@pytest.mark.parametrize(
    ("in_a_row", "max_restarts", "may"),
    [(0, 3, True), (2, 3, True), (3, 3, False), (4, 3, False), (0, 0, False), (0, 1, True), (1, 1, False)],
)
def test_so_many_restarts_are_borne_and_no_more(in_a_row: int, max_restarts: int, may: bool) -> None:
    assert may_restart(in_a_row, max_restarts) is may


@pytest.mark.parametrize(
    ("before", "saved", "then", "counted"),
    [
        (2, None, None, 2),  # nothing was ever saved
        (2, 10, None, 0),  # the first checkpoint
        (2, 20, 10, 0),
        (2, 10, 10, 2),  # nothing since the last restart
        (2, 8, 10, 2),  # the newest was corrupt, and the run has not caught up
        (0, 10, 10, 0),
        (0, None, None, 0),
        (1, 1, 0, 0),
    ],
)
def test_a_new_checkpoint_starts_the_budget_anew(
    before: int, saved: int | None, then: int | None, counted: int
) -> None:
    assert restarts_in_a_row(before, saved, then) == counted


@pytest.mark.parametrize(
    ("ready", "least", "most", "expected_soon", "count"),
    [
        (2, 2, 2, False, 2),
        (2, 2, 2, True, 2),
        (5, 2, 2, False, 2),
        (1, 2, 2, False, None),
        (1, 2, 2, True, None),
        (0, 1, 4, False, None),
        (1, 1, 4, False, 1),
        (3, 1, 4, False, 3),
        (3, 1, 4, True, None),  # the others are on their way
        (4, 1, 4, True, 4),
        (9, 1, 4, True, 4),
        (1, 2, 4, False, None),
        (0, 1, 1, True, None),
    ],
)
def test_a_run_starts_with_all_that_there_are_and_at_least_with_the_least(
    ready: int, least: int, most: int, expected_soon: bool, count: int | None
) -> None:
    assert size_to_start(ready, Size(least, most), expected_soon) == count


@pytest.mark.parametrize(
    ("running", "ready", "most", "since_s", "to"),
    [
        (1, 2, 4, 60.0, 2),
        (1, 9, 4, 60.0, 4),
        (2, 2, 4, 60.0, None),
        (2, 1, 4, 60.0, None),  # fewer is not a reason to stop: those that left will be noticed
        (4, 9, 4, 60.0, None),
        (1, 2, 4, 9.9, None),
        (1, 2, 4, 10.0, 2),
        (2, 2, 2, 60.0, None),
    ],
)
def test_a_run_grows_when_it_has_settled(running: int, ready: int, most: int, since_s: float, to: int | None) -> None:
    assert size_to_grow_to(running, ready, Size(1, most), since_s, settle_s=10.0) == to


def test_a_size_is_elastic_if_it_leaves_a_choice() -> None:
    assert Size(1, 2).is_elastic and not Size(2, 2).is_elastic


@pytest.mark.parametrize(
    ("still_s", "hung"),
    [
        ({}, []),
        ({0: 0.0, 1: 0.0}, []),
        ({0: 5.0, 1: 4.9}, []),  # not longer than is borne
        ({1: 5.1, 0: 5.2}, [0, 1]),
        ({0: 1.0, 3: 99.0, 1: 0.0}, [3]),
    ],
)
def test_workers_that_stand_for_longer_than_is_borne_hang(still_s: dict[int, float], hung: list[int]) -> None:
    assert hung_ranks(still_s, 5.0) == hung


@pytest.mark.parametrize(
    ("per_worker", "workers", "nodes", "words"),
    [
        ({"CPU": 1.0}, 2, [{"CPU": 2.0}], None),
        ({"CPU": 1.0}, 2, [{"CPU": 1.0}, {"CPU": 1.0}], None),
        ({"CPU": 2.0}, 2, [{"CPU": 2.0}], "2 workers need 4 CPU and the cluster has 2"),
        ({"CPU": 1.0, "GPU": 1.0}, 2, [{"CPU": 64.0}], "2 workers need 2 GPU and the cluster has 0"),
        ({"CPU": 1.0, "GPU": 1.0}, 3, [{"CPU": 9.0, "GPU": 2.0}], "3 workers need 3 GPU and the cluster has 2"),
        ({"CPU": 1.0, "GPU": 0.0}, 1, [{"CPU": 1.0}], None),
        ({"CPU": 0.5}, 2, [{"CPU": 1.0}], None),
        ({"GPU": 0.1}, 10, [{"GPU": 1.0}], None),  # 1.0 // 0.1 is 9
        ({"GPU": 0.1}, 11, [{"GPU": 1.0}], "11 workers need 1.1 GPU and the cluster has 1"),
        # Enough in all, but not in one place.
        ({"CPU": 3.0}, 2, [{"CPU": 4.0}, {"CPU": 2.0}], "2 workers of 3 CPU each do not fit on 2 machines; 1 would"),
        (
            {"CPU": 1.0, "GPU": 1.0},
            2,
            [{"CPU": 4.0, "GPU": 1.0}, {"GPU": 1.0}],
            "2 workers of 1 CPU, 1 GPU each do not fit on 2 machines; 1 would",
        ),
        ({"CPU": 1.0, "GPU": 1.0}, 2, [{"CPU": 2.0, "GPU": 2.0}], None),
        ({"CPU": 1.0}, 1, [], "1 worker needs 1 CPU and the cluster has 0"),
        ({}, 5, [{"CPU": 1.0}], None),
    ],
)
def test_what_the_machines_lack_is_named(
    per_worker: dict[str, float], workers: int, nodes: list[dict[str, float]], words: str | None
) -> None:
    assert missing_resources(per_worker, workers, nodes) == words
