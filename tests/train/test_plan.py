"""What is due when."""

import pytest

from shoal.core.errors import UserError
from shoal.recipe.load import load_recipe
from shoal.train.plan import check_whole, make_plan


def plan(steps_per_epoch, **overrides):
    recipe = load_recipe(["digits"], {key.replace("__", "."): value for key, value in overrides.items()}).recipe
    return make_plan(recipe, steps_per_epoch)


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
