"""What is due when."""

import pytest

from shoal.core.errors import UserError
from shoal.recipe.load import load_recipe
from shoal.train.plan import check_whole, make_plan


def plan(steps_per_epoch, pause_at=None, whole_every=1, **overrides):
    recipe = load_recipe(["digits"], {key.replace("__", "."): value for key, value in overrides.items()}).recipe
    return make_plan(recipe, steps_per_epoch, pause_at, whole_every)


def due(check, steps):
    return [step for step in range(steps + 1) if check(step)]


def test_by_default_epochs_decide():
    found = plan(5, train__epochs=3)
    assert found.num_steps == 15
    assert due(found.evaluation_due, 15) == due(found.save_due, 15) == [5, 10, 15]


def test_steps_win_over_epochs_and_the_last_step_is_always_evaluated_saved_and_reported():
    found = plan(5, train__steps=13, evaluate__every_steps=4, checkpoint__every_steps=6, observe__every_steps=5)
    assert found.num_steps == 13
    assert due(found.evaluation_due, 13) == [4, 8, 12, 13]
    assert due(found.save_due, 13) == [6, 12, 13]
    assert due(found.report_due, 13) == [0, 1, 5, 10, 13]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, None),
        (
            {"train__steps": 10},
            r"^train\.steps: 10 is not a multiple of parallel\.sync_every 4, .*; set train\.steps=12$",
        ),
        ({"evaluate__every_steps": 3}, r"^evaluate\.every_steps: 3 .*set evaluate\.every_steps=4$"),
        ({"checkpoint__every_steps": 5}, r"^checkpoint\.every_steps: 5 .*set checkpoint\.every_steps=8$"),
        ({"evaluate__every_steps": None}, r"^evaluate\.every_steps: 6 .*set evaluate\.every_steps=8$"),
    ],
)
def test_what_needs_workers_together_is_due_only_when_they_are(fields, says):
    found = plan(6, **{"train__steps": 16, "evaluate__every_steps": 8, "checkpoint__every_steps": 4} | fields)
    check_whole(found, 1)
    if says is None:
        check_whole(found, 4)
    else:
        with pytest.raises(UserError, match=says):
            check_whole(found, 4)


@pytest.mark.parametrize(
    ("fields", "pause_at", "whole_every", "expected"),
    [
        ({"train__epochs": 4}, None, 1, None),
        ({"train__epochs": 4}, 2, 1, 20),
        ({"train__epochs": 4}, 0.25, 1, 3),  # 2.5 steps
        ({"train__epochs": 4}, 3 * 0.1, 1, 3),  # which in binary is a little more than 3 steps
        ({"train__epochs": 4}, 1.1, 1, 11),
        ({"train__steps": 40}, 7, 1, 7),
        ({"train__steps": 40}, 7.2, 1, 8),
        ({"train__steps": 40}, 7, 4, 8),
        ({"train__steps": 40}, 8, 4, 8),
        ({"train__epochs": 4}, 0.9, 4, 12),
        ({"train__steps": 40}, 40, 1, None),
        ({"train__epochs": 4}, 4, 1, None),
        ({"train__epochs": 4}, 9, 1, None),
        ({"train__steps": 40}, 37, 8, None),  # whole again only at the end
    ],
)
def test_a_pause_comes_with_the_first_whole_step_from_there_on_and_never_at_the_end(
    fields, pause_at, whole_every, expected
):
    found = plan(10, pause_at, whole_every, **fields)
    assert found.pause_step == expected
    assert due(found.is_pause, 40) == ([] if expected is None else list(range(expected, 41)))
    assert found.num_steps == 40


def test_a_pause_is_evaluated_and_moves_nothing_else():
    fields = {"train__steps": 20, "evaluate__every_steps": 8, "checkpoint__every_steps": 6, "observe__every_steps": 5}
    without, found = plan(10, **fields), plan(10, 7, **fields)
    assert due(found.evaluation_due, 20) == [7, 8, 16, 20]
    assert due(found.save_due, 20) == due(without.save_due, 20)
    assert due(found.report_due, 20) == due(without.report_due, 20)
    assert found.evaluation_pending(7, 0) and not found.evaluation_pending(7, 7)
