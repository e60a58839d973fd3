import pytest

from shoal.launch.attempt import Attempt, in_words


class Place:
    node, host, address = "there", "there", "127.0.0.1"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "the worker's process is gone"),
        (0, "the worker's process ended with status 0 and without a word"),
        (3, "the worker's process ended with status 3 and without a word"),
        (-11, "the worker's process was killed by SIGSEGV"),
        (-9, "the worker's process was killed by SIGKILL; the machine may have run out of memory"),
    ],
)
def test_how_a_process_ended_is_told_in_words(status: int | None, words: str) -> None:
    assert in_words(status) == words


def test_the_first_failure_of_a_worker_is_what_counts() -> None:
    attempt = Attempt(0, [Place(), Place()])  # type: ignore[list-item]
    attempt.fail(1, "hung", "stands")
    assert attempt.take(1, {"what": "died", "status": -9, "because": None})
    assert [(failure.kind, failure.message, failure.node) for failure in attempt.failures.values()] == [
        ("hung", "stands", "there")
    ]
    assert not attempt.take(0, {"what": "tick", "step": 1})


def test_a_worker_that_has_ended_does_not_stand() -> None:
    attempt = Attempt(0, [Place(), Place()])  # type: ignore[list-item]
    attempt.still_s.update({0: 1.0, 1: 99.0})
    attempt.take(1, {"what": "ended", "summary": {}})
    assert attempt.standing() == {0: 1.0} and not attempt.is_over
    attempt.take(0, {"what": "ended", "summary": {}})
    assert attempt.is_over
