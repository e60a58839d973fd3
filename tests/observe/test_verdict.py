import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.verdict import goodput, verdict

PHASES = ("start", "data", "forward_backward", "optimizer", "evaluate", "checkpoint", "report", "something_else")


@pytest.mark.parametrize(
    ("seconds", "share"),
    [
        ({}, 0.0),
        ({"data": 0.0}, 0.0),
        ({"forward_backward": 2.0, "optimizer": 1.0}, 1.0),
        ({"forward_backward": 2.0, "optimizer": 1.0, "data": 1.0}, 0.75),
        ({"start": 3.0}, 0.0),
        ({"optimizer": 1.0, "something_else": 3.0}, 0.25),
    ],
)
def test_goodput_is_the_share_of_the_time_spent_in_steps(seconds: dict[str, float], share: float) -> None:
    assert goodput(seconds) == share


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({}, "nothing has run yet"),
        ({"forward_backward": 8, "optimizer": 1, "data": 1}, "compute-bound: 90% of the time was training steps"),
        ({"forward_backward": 80, "data": 19}, "compute-bound: 81%"),
        ({"forward_backward": 60, "data": 40}, "40% of the time went to waiting for data; raise data.workers"),
        ({"forward_backward": 50, "evaluate": 30, "data": 20}, "30% of the time went to evaluation"),
        ({"forward_backward": 50, "checkpoint": 50}, "50% of the time went to saving; raise checkpoint.every_steps"),
        ({"forward_backward": 50, "report": 50}, "50% of the time went to reporting; raise observe.every_steps"),
        ({"forward_backward": 1, "start": 9}, "90% of the time went to start-up"),
        # little in itself, but next to nothing was training
        ({"something_else": 85, "data": 12, "optimizer": 3}, "12% of the time went to waiting for data"),
    ],
)
def test_the_verdict_names_what_held_the_run_up_and_what_to_change(seconds: dict[str, float], says: str) -> None:
    assert verdict(seconds).startswith(says)


@given(st.dictionaries(st.sampled_from(PHASES), st.floats(0, 1e9)))
def test_any_seconds_have_a_verdict_of_one_line_and_a_share(seconds: dict[str, float]) -> None:
    assert 0.0 <= goodput(seconds) <= 1.0 + 1e-9
    assert len(verdict(seconds).splitlines()) == 1
