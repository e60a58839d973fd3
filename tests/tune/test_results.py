"""What a search has found, of trials made by hand."""

import csv
import io
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.recipe.load import load_recipe
from shoal.tune.proposals import Randomly
from shoal.tune.results import (
    best_trial,
    counts,
    importance,
    pareto_front,
    saved_share,
    searched_s,
    summarise,
    trial_record,
    trials_csv,
)
from shoal.tune.setup import Setup, make_setup
from shoal.tune.space import parse_space
from shoal.tune.trial import Result, Status, Trial
from tests.tune.made_trials import ACCURACY, BOTH, LOSS, by_number, made

SPACE = {
    "optim.lr": "loguniform(1e-5, 1e-1)",
    "optim.weight_decay": "uniform(0, 0.5)",
    "optim.schedule": "choice(cosine, constant)",
    "optim.warmup_steps": "randint(0, 50) if optim.schedule == cosine",
}


def made_setup(**settings: Any) -> Setup:
    return make_setup(load_recipe(["digits"]), parse_space(SPACE), {"metric": ["val_loss"], **settings})


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([[3.0], [2.0], [4.0]], 1),
        ([[3.0, 1.0, 5.0], [2.0]], 0),  # its best, not its last
        ([[None], [math.nan], [9.0]], 2),
        ([[2.0], [2.0]], 0),
        ([[], [None]], None),
        ([], None),
        ([[-math.inf], [1.0]], 1),
    ],
)
def test_the_best_trial_has_the_best_value(values: list[list[float | None]], best: int | None) -> None:
    trials = by_number(*(made(number, row, "done") for number, row in enumerate(values)))
    found = best_trial(trials, LOSS)
    assert (None if found is None else found.number) == best


def test_the_best_trial_is_the_other_way_round_where_more_is_better() -> None:
    trials = by_number(*(made(n, [value], "failed", objective=ACCURACY) for n, value in enumerate([0.5, 0.9, 0.1])))
    found = best_trial(trials, ACCURACY)
    assert found is not None and found.number == 1


points = st.lists(
    st.tuples(*[st.none() | st.integers(-3, 3).map(float) | st.just(math.nan)] * 2), max_size=12
)  # few values, so that there are equal ones


@given(pairs=points)
def test_on_the_front_is_who_is_beaten_by_nobody(pairs: list[tuple[float | None, float | None]]) -> None:
    trials = {
        number: Trial(number, {}, "done", [Result(1, 1.0, {"val_loss": a, "val_accuracy": b})])  # type: ignore[dict-item]
        for number, (a, b) in enumerate(pairs)
    }
    front = [trial.number for trial in pareto_front(trials, BOTH)]
    rated = {n: (a, -b) for n, (a, b) in enumerate(pairs) if a is not None and b is not None and math.isfinite(a + b)}

    def is_beaten(number: int) -> bool:
        own = rated[number]
        return any(
            all(x <= y for x, y in zip(other, own, strict=True)) and other != own for other in rated.values()
        )  # fmt: skip

    assert set(front) == {number for number in rated if not is_beaten(number)}
    assert [rated[n] for n in front] == sorted(rated[n] for n in front), "the best of the first objective first"


def test_the_front_goes_by_one_state_of_the_weights() -> None:
    one = Trial(0, {}, "done", [Result(1, 1.0, {"val_loss": 4.0, "val_accuracy": 0.1})])
    one.results.append(Result(2, 2.0, {"val_loss": 5.0, "val_accuracy": 0.9}))
    other = Trial(1, {}, "done", [Result(2, 2.0, {"val_loss": 4.0, "val_accuracy": 0.2})])
    assert [trial.number for trial in pareto_front(by_number(one, other), BOTH)] == [1]


def test_trials_are_counted_by_status() -> None:
    kinds = ["done", "failed", "running", "done", "paused", "stopped", "waiting"]
    found = counts(by_number(*(made(number, [], kind) for number, kind in enumerate(kinds))))  # type: ignore[arg-type]
    assert found == {"running": 1, "waiting": 1, "paused": 1, "done": 2, "stopped": 1, "failed": 1}
    assert list(found) == ["running", "waiting", "paused", "done", "stopped", "failed"]


@pytest.mark.parametrize(
    ("trained", "share"),
    [
        ([], 0.0),
        ([("done", 15), ("done", 15)], 0.0),
        ([("done", 15), ("stopped", 0)], 0.5),
        ([("stopped", 1.5), ("stopped", 1.5)], 0.9),
        ([("stopped", 20), ("stopped", 20)], 0.0),  # more than once over, after crashes
        ([("stopped", 20), ("stopped", 0)], 0.5),
        ([("failed", 3), ("running", 3), ("paused", 3), ("waiting", 0), ("done", 9)], 0.0),  # nobody stopped those
    ],
)
def test_stopping_saves_what_the_stopped_did_not_train(trained: list[tuple[Status, float]], share: float) -> None:
    trials = {number: Trial(number, {}, status, made=epochs) for number, (status, epochs) in enumerate(trained)}
    assert saved_share(trials, made_setup()) == pytest.approx(share)


def rated_by(field: str, count: int = 40) -> dict[int, Trial]:
    setup = made_setup()
    chance, noise = Randomly(setup.space, 0), random.Random(0)
    trials = {}
    for number in range(count):
        config = chance.propose(number, {})
        value = setup.space.domain(field).place(config[field]) if field in config else 0.0
        trials[number] = made(number, [value + 0.02 * noise.random()], "done", config)
    return trials


@pytest.mark.parametrize("field", ["optim.lr", "optim.weight_decay", "optim.schedule"])
def test_the_field_that_matters_is_found(field: str) -> None:
    found = importance(rated_by(field), made_setup())
    # Of a choice, what is there only with one of its values tells a part.
    assert next(iter(found)) == field and found[field] > (0.4 if field == "optim.schedule" else 0.7)
    assert sum(found.values()) == pytest.approx(1.0, abs=0.01) and set(found) == set(SPACE)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_one_value_out_of_all_proportion_explains_nothing() -> None:
    trials = rated_by("optim.lr")
    trials[3].results = made(3, [1e30]).results
    assert next(iter(importance(trials, made_setup()))) == "optim.lr"


def test_nothing_matters_where_all_are_equal_or_few() -> None:
    assert importance(rated_by("optim.lr", 7), made_setup()) == {}
    trials = rated_by("optim.lr")
    for trial in trials.values():
        trial.results = made(0, [1.0]).results
    assert importance(trials, made_setup()) == {}
    for trial in trials.values():
        trial.results = []
    assert importance(trials, made_setup()) == {}


def test_the_table_of_trials_is_read_back(tmp_path: Path) -> None:
    setup = made_setup()
    config = {"a": 'x, "y"\nz', "b": [64, "ü"], "c": None, "d": True, "e": 1e-5, "f": 3}
    odd = made(1, [None], "failed", {"a": "x"})
    odd.reason = 'loss became nan,\nafter "step" 3'
    trials = [made(0, [2.0, 1.0], "done", config), odd]
    text = trials_csv([trial_record(trial, setup, tmp_path / trial.name) for trial in trials], [*"abcdef"])
    one, other = csv.DictReader(io.StringIO(text))
    assert (one["trial"], one["status"], float(one["value"]), one["step"]) == ("0", "done", 1.0, "20")
    assert one["a"] == config["a"] and [json.loads(one[key]) for key in "bcdef"] == [config[key] for key in "bcdef"]
    assert other["reason"] == odd.reason and other["value"] == "" and other["run_dir"] == str(tmp_path / "0001")
    assert [other[key] for key in "bcdef"] == [""] * 5, "what a trial does not have is left empty"


def test_a_summary_tells_of_all_trials_and_of_the_best(tmp_path: Path) -> None:
    trials = rated_by("optim.lr")
    trials[0].first_step_s, trials[1].first_step_s, trials[1].lineage = [3.0, 1.0], [2.0], [{"from": 0, "progress": 1}]
    trials[1].generation = 1
    best = min(trials.values(), key=lambda trial: trial.results[0].metrics["val_loss"])
    summary = json.loads(json.dumps(summarise(trials, made_setup(trials=50), tmp_path, "done", 12.34)))
    assert summary["best"]["trial"] == best.number and summary["best"]["value"] == best.value(LOSS)
    assert summary["best"]["best_step"] == 10 and summary["best_recipe"] == str(tmp_path / "best.yaml")
    assert [record["trial"] for record in summary["trials"]] == list(range(40)) and summary["num_trials"] == 50
    assert summary["trials_by_status"] == {"done": 40} and summary["exploits"] == 1 and "pareto" not in summary
    assert summary["first_step_s"] == {"median": 2.0, "longest": 3.0} and summary["wall_s"] == 12.3
    assert (summary["mode"], summary["unit"], summary["trained_if_all_to_the_end"]) == ("min", "epochs", 600)
    assert summary["trials"][1]["run_dir"].endswith("/trials/0001-1") and "lineage" in summary["trials"][1]


def test_a_summary_of_nothing_is_one(tmp_path: Path) -> None:
    summary = summarise({}, made_setup(), tmp_path, "interrupted", 0.0)
    assert summary["best"] is None and summary["best_recipe"] is None and summary["first_step_s"] is None
    assert summary["trials"] == [] and summary["importance"] == {} and summary["saved"] == 0.0


def test_a_summary_of_several_objectives_has_the_front(tmp_path: Path) -> None:
    rows = [(1.0, 0.5), (2.0, 0.9), (3.0, 0.8)]
    trials = {
        number: Trial(number, {}, "done", [Result(1, 1.0, {"val_loss": a, "val_accuracy": b})])
        for number, (a, b) in enumerate(rows)
    }
    summary = summarise(trials, made_setup(metric=["val_loss", "val_accuracy"]), tmp_path, "done", 1.0)
    assert summary["pareto"] == [0, 1] and summary["objectives"] == ["val_loss:min", "val_accuracy:max"]
    assert summary["trials"][2]["values"] == {"val_loss": 3.0, "val_accuracy": 0.8}


def test_what_was_taken_over_does_not_count_for_the_heir() -> None:
    """The donor was good with its own settings; the heir's have made it worse."""
    donor = Trial(1, {"a": 1}, "done", [Result(1, 1.0, {"val_loss": 0.5}), Result(2, 2.0, {"val_loss": 0.9})])
    heir = Trial(0, {"a": 2}, "done", [*donor.results[:1], Result(2, 2.0, {"val_loss": 5.0})], generation=1)
    heir.past = [({"a": 3}, 0.0, [Result(1, 1.0, {"val_loss": 7.0})])]
    heir.lineage = [{"from": 1, "progress": 1.0, "config": {"a": 2}}]
    best = best_trial(by_number(heir, donor), LOSS)
    assert best is donor and heir.value(LOSS) == 5.0
    heir.past = [({"a": 3}, 0.0, [Result(1, 1.0, {"val_loss": 0.1})])]
    before = best_trial(by_number(heir, donor), LOSS)
    assert before is not None and (before.config, before.name) == ({"a": 3}, "0000"), "as it was when it had that"


def test_a_trial_that_failed_is_the_best_only_of_those_that_failed() -> None:
    failed = Trial(0, {}, "failed", [Result(1, 1.0, {"val_loss": 0.1})])
    done = Trial(1, {}, "done", [Result(1, 1.0, {"val_loss": 0.2})])
    assert best_trial(by_number(failed, done), LOSS) is done
    assert best_trial(by_number(failed), LOSS) is failed


def test_a_search_takes_as_long_as_somebody_searches() -> None:
    events = [
        {"event": "start", "time": 102.0, "began": 100.0},
        {"event": "ended", "time": 110.0},
        {"event": "start", "time": 1003.0, "began": 1000.0},  # after it was killed, and left alone for a while
        {"event": "ended", "time": 1005.5},
    ]
    assert searched_s(events) == 15.5 and searched_s(events[:2]) == 10.0 and searched_s([]) == 0.0
    assert searched_s([*events, {"event": "start", "time": 2001.0}]) == 15.5
