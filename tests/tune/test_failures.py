"""When a search is given up, as a table."""

import pytest

from shoal.tune.failures import too_many_failures
from shoal.tune.trial import Result, Status, Trial

STATUS: dict[str, Status] = {"d": "done", "s": "stopped", "x": "failed", "n": "failed", "r": "running", "w": "waiting"}


def trials_of(letters: str) -> list[Trial]:
    """d: done, s: stopped, x: failed, n: diverged, r: running, w: waiting."""
    kinds = {"x": "exception", "n": "diverged"}
    return [
        Trial(number, {}, STATUS[letter], kind=kinds.get(letter, ""), reason=kinds.get(letter, ""))
        for number, letter in enumerate(letters)
    ]


@pytest.mark.parametrize(
    ("letters", "num_trials", "most", "gives_up"),
    [
        ("", 10, 0.5, False),
        ("d", 10, 0.5, False),
        # Errors: of those that have ended, but not before enough have.
        ("x", 10, 0.5, False),
        ("xx", 10, 0.5, False),
        ("xxx", 10, 0.5, False),
        ("xxxxrrr", 10, 0.5, False),
        ("xxxxx", 10, 0.5, True),
        ("xxxdd", 10, 0.5, True),
        ("xxxddd", 10, 0.5, False),
        ("xxxsss", 10, 0.5, False),
        ("xxxxddd", 10, 0.5, True),
        ("xxxxxdddddd", 100, 0.5, False),
        # A search of few trials.
        ("x", 1, 0.5, True),
        ("x", 2, 0.5, False),
        ("xx", 2, 0.5, True),
        ("xxd", 3, 0.5, True),
        # Settings that diverge: of all that there will be.
        ("nnn", 10, 0.5, False),
        ("nnnnn", 10, 0.5, False),
        ("nnnnnn", 10, 0.5, True),
        ("nnnnnnnn", 100, 0.5, False),
        ("nnnnxx", 10, 0.5, True),  # together they are too many, though neither is
        ("nnnnxxdddd", 11, 0.5, True),
        ("nnnnxdddd", 11, 0.5, False),
        # How many are borne.
        ("x", 10, 0.0, True),
        ("n", 10, 0.0, True),
        ("d", 10, 0.0, False),
        ("xxxxxxxxxx", 10, 1.0, False),
        ("rwrw", 4, 0.0, False),
    ],
)
def test_a_search_is_given_up_when_too_many_fail(letters: str, num_trials: int, most: float, gives_up: bool) -> None:
    assert (too_many_failures(trials_of(letters), num_trials, most) is not None) is gives_up
    assert (too_many_failures(trials_of(letters[::-1]), num_trials, most) is not None) is gives_up


def test_those_that_do_well_take_longer_and_count_all_the_same() -> None:
    failed, running, paused = trials_of("xxxxx"), trials_of("rrrrr"), trials_of("rrrrr")
    for trial in running:
        trial.first_step_s = [1.0]
    for trial in paused:
        trial.status = "paused"
        trial.results = [Result(1, 1.0, {"val_loss": 1.0})]
    assert too_many_failures(failed, 40, 0.5) is not None
    for well in (running, paused):
        assert too_many_failures([*failed, *well], 40, 0.5) is None
        assert too_many_failures([*failed, *well[:4]], 40, 0.5) is not None
    # Those that have not come to a first step have shown nothing yet.
    assert too_many_failures([*failed, *trials_of("rrrrr")], 40, 0.5) is not None


def test_the_most_frequent_reason_is_told() -> None:
    trials = trials_of("xxxxd")
    for trial, reason in zip(trials, ["a", "b", "b", "c"], strict=False):
        trial.reason = reason
    assert too_many_failures(trials, 8, 0.5) == (
        "4 of 5 trials so far failed, which is more than tune.max_failed 0.5; the most frequent reason, 2 times: b"
    )
    assert too_many_failures(trials_of("nnnn"), 6, 0.5) == (
        "4 of 6 trials failed, which is more than tune.max_failed 0.5; the most frequent reason, 4 times: diverged"
    )
    assert str(too_many_failures(trials_of("x"), 1, 0.5)).endswith("the most frequent reason: exception")
