"""Everything that can be wrong with a search is found before it starts, in a line that names what to change."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.recipe.load import load_recipe
from shoal.tune.by_optuna import ByOptuna
from shoal.tune.proposals import EveryPoint, Randomly
from shoal.tune.schedulers.asha import Asha
from shoal.tune.schedulers.hyperband import Hyperband
from shoal.tune.schedulers.median import Median
from shoal.tune.schedulers.none import ToTheEnd
from shoal.tune.schedulers.pb2 import Pb2
from shoal.tune.schedulers.pbt import Pbt
from shoal.tune.setup import Setup, make_setup, set_up
from shoal.tune.space import parse_space
from shoal.tune.trial import Objective

LR = {"optim.lr": "loguniform(1e-5, 1e-2)"}
BY_STEPS = ["train.steps=400"]
NO_METRIC = ["checkpoint.keep_best=0", "checkpoint.metric=null"]


def made_setup(space: Mapping[str, Any] = LR, overrides: list[str] | None = None, **settings: Any) -> Setup:
    return make_setup(load_recipe(["digits"], overrides or []), parse_space(space), settings)


def refused(space: Mapping[str, Any] = LR, overrides: list[str] | None = None, **settings: Any) -> str:
    with pytest.raises(UserError) as caught:
        made_setup(space, overrides, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({"optim.lrr": "uniform(0.1, 1)"}, "space: optim.lrr: unknown key; did you mean optim.lr?"),
        ({"optm.lr": "uniform(0.1, 1)"}, "space: optm: unknown key; did you mean optim?"),
        ({"optim.lr": "uniform(-1, 1)"}, "space: optim.lr: should be greater than 0.0 (given: -1.0)"),
        ({"model.dropout": "uniform(0, 2)"}, "space: model.dropout: should be less than 1.0 (given: 2.0)"),
        ({"model.hidden": "uniform(8, 16)"}, "space: model.hidden: should be a whole number (given: 8.0)"),
        ({"optim.name": "choice(adamw, sgdd)"}, "space: optim.name: 'sgdd' is not allowed;"),
        ({"optim.name": "choice(adamw, sgdd, sgd)"}, "space: optim.name: 'sgdd' is not allowed;"),
        ({"model.channels": "choice([8, 16], [a])"}, "space: model.channels.0: should be a whole number (given: 'a')"),
        ({"model.name": "choice(simple_cnn, gpt)"}, "space: model.name: 'gpt' does not go with task"),
        ({"optim.momentum": "uniform(0.5, 0.9)"}, "space: optim.momentum: is for sgd, but optim.name is adamw"),
        ({"cluster.workers": "choice(1, 2)"}, "space: cluster.workers: is the same for all trials; set it"),
        ({"cluster.gpus_per_worker": "choice(0, 1)"}, "space: cluster.gpus_per_worker: is the same for all trials"),
    ],
)  # fmt: skip
def test_what_the_recipe_would_refuse_is_told(space: dict[str, Any], words: str) -> None:
    told = refused(space)
    assert told.startswith(words) and "\n" not in told and "[space]" not in told


def test_all_fields_are_told_at_once() -> None:
    told = refused({"optim.lr": "uniform(-1, 1)", "model.dropout": "uniform(0, 2)", "cluster.workers": "choice(1, 2)"})
    assert [line.split(": ")[1] for line in told.splitlines()] == ["optim.lr", "model.dropout", "cluster.workers"]


def test_a_line_names_the_field_of_the_space_though_another_is_at_odds() -> None:
    told = refused({"optim.name": "choice(sgd, adamw)"}, ["optim.name=sgd", "optim.momentum=0.9"])
    assert told.startswith("space: optim.name: with adamw, optim.momentum: is for sgd, but optim.name is adamw")


def test_a_field_is_tried_where_its_condition_holds() -> None:
    space = {"optim.name": "choice(adamw, sgd)", "optim.momentum": "uniform(0.5, 0.9) if optim.name != adamw"}
    assert made_setup(space).free == {"optim.momentum"}
    deep = {
        "model.name": "choice(mlp, simple_cnn)",
        "model.channels": "choice([8, 8], [4, 4]) if model.name == simple_cnn",
        "model.dropout": "choice(0.0, 1.5) if model.channels == [4, 4]",
    }
    assert refused(deep) == "space: model.dropout: should be less than 1.0 (given: 1.5)"


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("val_acc", "tune.metric: 'val_acc' is not reported by task image_classification; allowed: goodput,"),
        ("val_perplexity", "tune.metric: 'val_perplexity' is not reported"),
        ("accuracy", "tune.metric: 'accuracy' is reported as val_accuracy; write that"),
        ("acc:max", "tune.metric: 'acc' is not reported by task image_classification; allowed: goodput,"),
        ("val_loss:less", "tune.metric: is not understood (given: "),
        ("", "tune.metric: is not understood (given: "),
    ],
)  # fmt: skip
def test_a_metric_that_is_none_is_told(metric: str, words: str) -> None:
    told = refused(metric=[metric])
    assert told.startswith(words) and "\n" not in told


def test_a_metric_is_not_given_twice() -> None:
    assert refused(metric=["val_loss", "val_loss:max"]) == "tune.metric: the same metric is given twice"


@pytest.mark.parametrize(
    ("overrides", "metric", "objectives"),
    [
        ([], [], [Objective("val_accuracy", False)]),  # what checkpoints are kept by
        ([], ["val_loss"], [Objective("val_loss", True)]),
        ([], ["val_loss:max"], [Objective("val_loss", False)]),
        ([], ["samples_per_s:max"], [Objective("samples_per_s", False)]),
        ([], ["val_loss", "val_accuracy"], [Objective("val_loss", True), Objective("val_accuracy", False)]),
        (NO_METRIC, [], [Objective("val_loss", True)]),
        (["checkpoint.mode=min"], [], [Objective("val_accuracy", True)]),
        (
            [*NO_METRIC, "early_stop.metric=val_accuracy", "early_stop.patience=2"],
            [],
            [Objective("val_accuracy", False)],
        ),
    ],
)  # fmt: skip
def test_what_a_search_goes_by(overrides: list[str], metric: list[str], objectives: list[Objective]) -> None:
    assert list(made_setup(LR, overrides, metric=metric).objectives) == objectives


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trialz": 3}, "tune.trialz: unknown key; allowed: .*; did you mean trials?"),
        ({"scheduler": "asa"}, "tune.scheduler: 'asa' is not allowed; allowed: .*; did you mean asha?"),
        ({"search": "bayes"}, "tune.search: 'bayes' is not allowed; allowed: grid, optuna, random"),
        ({"trials": 0}, r"tune.trials: should be greater than 0 \(given: 0\); Runs to make"),
        ({"trials": "3"}, r"tune.trials: should be a valid integer \(given: '3'\)"),
        ({"reduction": 1}, r"tune.reduction: should be greater than 1 \(given: 1\)"),
        ({"quantile": 0.6}, "tune.quantile: should be less than or equal to 0.5"),
        (
            {"scheduler": "asha", "grace": 15.0},
            r"tune.grace: 15 epochs is as long as a trial runs \(15\), so asha would",
        ),
        ({"scheduler": "pbt", "interval": 99.0}, "tune.interval: 99 epochs is as long as a trial runs"),
        ({"metric": 3}, r"tune.metric: should be a valid list \(given: 3\)"),
        ({1: 2}, "tune.1: unknown key"),
    ],
)
def test_a_setting_of_the_search_that_is_none_is_told(settings: dict[Any, Any], words: str) -> None:
    told = [refused(LR | {"tune": settings})]
    if all(isinstance(name, str) for name in settings):
        told.append(refused(**settings))
    assert all(re.match(words, line) and "\n" not in line for line in told)


def test_the_command_line_is_laid_over_the_file() -> None:
    setup = made_setup(LR | {"tune": {"trials": 3, "seed": 7}}, trials=5)
    assert (setup.num_trials, setup.section.seed) == (5, 7)


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "median", "pbt", "pb2"])
def test_who_stops_trials_goes_by_one_metric_and_one_length(scheduler: str) -> None:
    words = f"tune.scheduler: {scheduler} goes by one metric; with several, use --scheduler none"
    assert refused(scheduler=scheduler, metric=["val_loss", "val_accuracy"]) == words
    for field in ("train.epochs", "train.steps"):
        told = refused(LR | {field: "randint(5, 10)"}, scheduler=scheduler)
        assert told.startswith(f"space: {field}: {scheduler} compares trials of the same length; leave it out")
        assert made_setup(LR | {field: "randint(5, 10)"}).section.scheduler == "none"


@pytest.mark.parametrize("scheduler", ["pbt", "pb2"])
def test_a_population_needs_something_to_change_and_somebody_to_learn_from(scheduler: str) -> None:
    told = refused({"model.hidden": "randint(8, 16)", "train.seed": "grid(1, 2)"}, scheduler=scheduler)
    assert told.startswith(f"tune.scheduler: {scheduler} changes settings while runs go on, and none of model.hidden, ")
    assert refused(scheduler=scheduler, trials=1) == f"tune.trials: {scheduler} needs a population of at least 2"
    assert made_setup(scheduler=scheduler, trials=2).num_trials == 2


@pytest.mark.parametrize(
    ("space", "settings", "search", "trials"),
    [
        (LR, {}, "random", 16),
        (LR, {"trials": 3}, "random", 3),
        (LR, {"search": "optuna"}, "optuna", 16),
        (LR, {"scheduler": "pbt"}, "random", 8),
        (LR, {"scheduler": "pb2"}, "random", 8),
        (LR, {"scheduler": "asha"}, "random", 16),
        ({"optim.lr": "grid(0.1, 0.2)", "model.hidden": "grid(8, 16, 32)"}, {}, "grid", 6),
        ({"optim.lr": "grid(0.1, 0.2)", "model.hidden": "grid(8, 16, 32)"}, {"trials": 4}, "grid", 4),
        ({"optim.lr": "grid(0.1, 0.2)"}, {"search": "random"}, "random", 16),
        ({"optim.lr": "choice(0.1, 0.2)"}, {}, "random", 16),
        ({"optim.lr": "choice(0.1, 0.2)"}, {"search": "grid"}, "grid", 2),
        ({"optim.lr": "grid(0.1, 0.2)", "model.dropout": "uniform(0, 0.5)"}, {}, "random", 16),
        (LR | {"first": [{"optim.lr": 1e-4 * n} for n in range(1, 21)]}, {}, "random", 20),
        (LR | {"first": [{"optim.lr": 1e-3}, {"optim.lr": 1e-4}]}, {"trials": 2}, "random", 2),
        (
            {"optim.name": "grid(adamw, sgd)", "optim.momentum": "grid(0.1, 0.5, 0.9) if optim.name == sgd"},
            {},
            "grid",
            4,
        ),
    ],
)
def test_what_is_left_open_is_filled(space: dict[str, Any], settings: dict[str, Any], search: str, trials: int) -> None:
    setup = made_setup(space, **settings)
    assert (setup.section.search, setup.num_trials) == (search, trials)


def test_no_more_points_are_tried_first_than_there_are_trials() -> None:
    told = refused(LR | {"first": [{"optim.lr": 1e-3}, {"optim.lr": 1e-4}]}, trials=1)
    assert told == "tune.trials: 1 is fewer than the 2 points of first; raise it"
    told = refused(LR | {"first": [{"optim.lr": 1e-3}, {}, {"optim.lr": 0.001}]})
    assert told == "space: first[2]: is the same as first[0]; give each point once"


@pytest.mark.parametrize(("metric", "is_less"), [("goodput", False), ("time_to_first_step_s", True)])
def test_which_way_its_own_metrics_are_better_is_known(metric: str, is_less: bool) -> None:
    assert made_setup(metric=[metric]).objective == Objective(metric, is_less)


def test_a_grid_that_cannot_be_is_told() -> None:
    told = refused(search="grid")
    assert told.startswith("space: optim.lr: loguniform(1e-05, 0.01) has no end of values, which a grid search would")
    grid = {"optim.lr": "grid(0.1, 0.2)"}
    assert refused(grid, trials=3) == "tune.trials: 3 is more than the 2 points of the grid; leave it out"
    assert refused(grid | {"first": [{}]}).startswith("space: first: a grid search tries every point; leave this out")
    many = f"grid({', '.join(map(str, range(1, 401)))})"
    told = refused({"optim.lr": many, "optim.weight_decay": many})
    assert told.startswith("space: a grid of more than 100,000 points; leave some out, or use --search random")


@pytest.mark.parametrize(
    ("overrides", "settings", "length", "unit", "grace", "interval"),
    [
        ([], {}, 15, "epochs", 1, 2),
        (["train.epochs=5"], {}, 5, "epochs", 1, 1),
        (["train.epochs=1"], {}, 1, "epochs", 1, 1),
        (BY_STEPS, {}, 400, "steps", 20, 40),
        (["train.steps=4"], {}, 4, "steps", 1, 1),
        (BY_STEPS, {"grace": 7.0, "interval": 9.0}, 400, "steps", 7, 9),
    ],
)
def test_how_long_trials_run_and_when_they_are_compared(
    overrides: list[str], settings: dict[str, Any], length: float, unit: str, grace: float, interval: float
) -> None:
    setup = made_setup(LR, overrides, **settings)
    assert (setup.length, setup.unit, setup.grace, setup.interval) == (length, unit, grace, interval)


def test_fields_that_may_change_while_a_run_goes_on() -> None:
    space = {
        "optim.lr": "loguniform(1e-5, 1e-2)",
        "optim.weight_decay": "choice(0.0, 0.1, 0.2)",
        "optim.schedule": "choice(cosine, constant)",
        "optim.name": "choice(adamw, adam, sgd)",
        "model.hidden": "randint(8, 16)",
        "train.seed": "choice(1, 2)",
        "train.global_batch": "choice(32, 64)",
        "optim.eps": "choice(1e-8)",
    }
    assert made_setup(space).free == {"optim.lr", "optim.weight_decay", "optim.schedule"}


def test_what_decides_about_a_field_that_may_not_change_may_not_either() -> None:
    space = {
        "optim.schedule": "choice(cosine, constant)",
        "optim.warmup_steps": "choice(0, 10) if optim.schedule == cosine",
        "model.hidden": "choice(8, 16) if optim.warmup_steps == 10",
        "optim.lr": "loguniform(1e-5, 1e-2) if optim.schedule == cosine",
    }
    assert made_setup(space).free == {"optim.lr"}


@pytest.mark.parametrize(
    ("name", "kind"),
    [("none", ToTheEnd), ("asha", Asha), ("hyperband", Hyperband), ("median", Median), ("pbt", Pbt), ("pb2", Pb2)],
)
def test_the_scheduler_is_built_with_what_was_said(name: str, kind: type) -> None:
    setup = made_setup(scheduler=name, grace=3.0, reduction=4, interval=5.0, quantile=0.5, resample=0.1, seed=9)
    found = setup.scheduler()
    assert type(found) is kind
    said: dict[str, Any] = {
        "length": 15.0,
        "grace": 3.0,
        "reduction": 4,
        "interval": 5.0,
        "quantile": 0.5,
        "resample": 0.1,
        "seed": 9,
    }
    said |= {"free": {"optim.lr"}, "objective": Objective("val_accuracy", False)}
    assert {name: value for name, value in vars(found).items() if name in said and value != said[name]} == {}


def test_the_proposer_is_built_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(made_setup().proposer(), Randomly)
    assert isinstance(made_setup({"optim.lr": "grid(0.1, 0.2)"}).proposer(), EveryPoint)
    assert isinstance(made_setup(search="optuna").proposer(), ByOptuna)
    monkeypatch.delitem(sys.modules, "shoal.tune.by_optuna")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert refused(search="optuna").startswith("--search: optuna needs Optuna: pip install 'shoal[optuna]'")


def test_the_recipe_of_a_trial_is_the_base_with_its_settings() -> None:
    setup = made_setup(
        {"model.name": "choice(mlp, simple_cnn)", "model.hidden": "choice([8], [16]) if model.name == mlp"}
    )
    recipe = setup.recipe_of({"model.name": "mlp", "model.hidden": [16]}, {"train.seed": 3}).recipe
    assert recipe.model is not None and recipe.model.model_dump()["hidden"] == [16] and recipe.train.seed == 3
    assert recipe.optim == setup.base.recipe.optim and setup.base.recipe.train.seed != 3
    with pytest.raises(UserError, match=r"model\.hidden"):
        setup.recipe_of({"model.name": "simple_cnn", "model.hidden": [16]})


def test_recipe_space_and_settings_come_together(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("optim.lr: grid(0.1, 0.2)\ntune: {seed: 3}\n")
    setup = set_up(["digits"], ["train.epochs=4"], file, {"scheduler": "asha"})
    assert (setup.length, setup.num_trials, setup.section.seed, setup.section.scheduler) == (4, 2, 3, "asha")
    with pytest.raises(UserError, match=r"space 'nowhere.yaml': no such file"):
        set_up(["digits"], [], "nowhere.yaml", {})


@pytest.mark.parametrize(
    ("in_file", "said", "words"),
    [
        ({}, {"grace": 2}, "tune.grace: scheduler none does not go by it, only asha, hyperband, median"),
        ({"scheduler": "asha", "interval": 2}, {}, "tune.interval: scheduler asha does not go by it, only pbt, pb2"),
        ({}, {"scheduler": "pbt", "reduction": 4}, "tune.reduction: scheduler pbt does not go by it"),
        ({"scheduler": "asha"}, {"quantile": 0.5}, "tune.quantile: scheduler asha does not go by it"),
        ({"scheduler": "asha", "grace": 2}, {"scheduler": "none"}, None),
        ({"scheduler": "asha", "grace": 2}, {"reduction": 4}, None),
        ({"scheduler": "pb2", "resample": 0.5, "interval": 1}, {}, None),
    ],
)
def test_nothing_is_said_in_vain(in_file: dict[str, Any], said: dict[str, Any], words: str | None) -> None:
    space = LR | {"tune": in_file}
    if words is None:
        set_up(["digits"], [], space, said)
    else:
        with pytest.raises(UserError, match=words):
            set_up(["digits"], [], space, said)


def test_of_several_metrics_no_trial_is_the_best() -> None:
    told = refused(metric=["val_loss", "val_accuracy"], keep_checkpoints=2)
    assert told == "tune.keep_checkpoints: which are best is not known with several metrics; leave it out"
