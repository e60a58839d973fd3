"""What the end of a segment means for its trial."""

from typing import Any

import pytest

from shoal.tune.endings import MOST_BROKEN, end_event, kept

SUMMARY = {"step": 3, "metrics": {"val_loss": 1.0}, "verdict": "compute", "weights_sha256": "ab"}
KEPT = {"step": 3, "metrics": {"val_loss": 1.0}, "weights_sha256": "ab"}


@pytest.mark.parametrize(
    ("ending", "stop", "event"),
    [
        ({"status": "done", "summary": SUMMARY}, None, ("ended", {"status": "done", "summary": KEPT})),
        (
            {"status": "failed", "kind": "memory", "reason": "too large", "traceback": ""},
            "place 2 of 2",
            ("ended", {"status": "failed", "kind": "memory", "reason": "too large"}),
        ),
        (
            {"status": "failed", "kind": "exception", "reason": "ValueError", "traceback": "Traceback"},
            None,
            ("ended", {"status": "failed", "kind": "exception", "reason": "ValueError", "traceback": "Traceback"}),
        ),
        (
            {"status": "failed", "kind": "exception", "reason": "the disk\n with the data\tis gone"},  # a line a trial
            None,
            ("ended", {"status": "failed", "kind": "exception", "reason": "the disk with the data is gone"}),
        ),
        ({"status": "interrupted", "ended_by": "pause", "summary": SUMMARY}, None, ("paused", {})),
        (
            {"status": "interrupted", "ended_by": "stopped", "summary": SUMMARY},
            "place 2 of 2",
            ("ended", {"status": "stopped", "reason": "place 2 of 2", "summary": KEPT}),
        ),
        (
            {"status": "interrupted", "ended_by": "stopped", "summary": {}},  # before its first step
            "place 2 of 2",
            ("ended", {"status": "stopped", "reason": "place 2 of 2", "summary": {}}),
        ),
        ({"status": "interrupted", "ended_by": "SIGINT", "summary": SUMMARY}, None, ("left", {"reason": ""})),
        ({"status": "left", "reason": "waited 60 s"}, None, ("left", {"reason": "waited 60 s"})),
        ({"status": "left", "reason": "RayError", "is_broken": True}, None, ("left", {"reason": "RayError"})),
    ],
)
def test_each_way_to_end(ending: dict[str, Any], stop: str | None, event: tuple[str, dict[str, Any]]) -> None:
    assert end_event(ending, stop, times_broken=1) == event


def test_a_launcher_that_breaks_again_and_again_fails_the_trial() -> None:
    ending = {"status": "left", "reason": "RayError: gone", "is_broken": True}
    assert end_event(ending, None, MOST_BROKEN - 1)[0] == "left"
    assert end_event(ending, None, MOST_BROKEN) == (
        *("ended", {"status": "failed", "kind": "launcher", "reason": "RayError: gone"}),
    )


def test_only_some_of_a_summary_is_kept() -> None:
    assert kept(SUMMARY) == KEPT
