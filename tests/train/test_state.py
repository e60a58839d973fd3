"""Early stopping, and a state that survives JSON."""

import json

import pytest

from shoal.recipe.schema import EarlyStopSection
from shoal.train.state import TrainState, note_evaluation, should_stop_early


def stops_at(values, **fields):
    early_stop = EarlyStopSection(**fields)
    state = TrainState()
    for number, value in enumerate(values):
        state.metrics[early_stop.metric] = value
        note_evaluation(state, early_stop)
        if should_stop_early(state, early_stop):
            return number
    return None


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        ([3, 2, 1, 0.5], {"patience": 1}, None),
        ([3, 2, 2.5, 2.1, 1], {"patience": 2}, 3),
        ([3, 2, 2.5, 1, 1.5, 1.2], {"patience": 2}, 5),
        ([0.1, 0.2, 0.15, 0.3], {"patience": 1, "metric": "val_accuracy"}, 2),
        ([0.1, 0.2, 0.3], {"patience": 1, "metric": "val_accuracy", "mode": "min"}, 1),
        ([3, 2.95, 2.9], {"patience": 2, "min_delta": 0.2}, 2),
        ([float("nan"), 1.0], {"patience": 1}, None),
        ([1.0, float("nan"), 0.5], {"patience": 1}, 1),
    ],
)
def test_stops_once_patience_is_spent(values, fields, expected):
    assert stops_at(values, **fields) == expected


def test_without_a_section_nothing_stops():
    state = TrainState()
    note_evaluation(state, None)
    assert not should_stop_early(state, None)


def test_the_state_survives_json_exactly():
    state = TrainState(step=3, metrics={"val_loss": 0.1 + 0.2}, best=1e-17, window_loss=1 / 3, samples=99)
    assert TrainState.from_values(json.loads(json.dumps(state.to_values()))) == state
