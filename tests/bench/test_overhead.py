"""The measuring works: both sides train the same steps, one tells and the other does not, and what costs time is seen.
How much Shoal's own observing costs is not asserted here."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.bench.made_data import with_made_data
from shoal.bench.overhead import MNIST_SIZED, _build, _take_turns, interval, measure, verdict
from shoal.bench.overhead_sides import NEVER, Side, Took
from shoal.bench.step import TRIVIAL
from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.core.group import Group
from shoal.data.build import build_datasets
from shoal.observe.clock import Clock
from shoal.observe.console import SilentConsole
from shoal.observe.records import Report
from shoal.recipe.load import LoadedRecipe, load_recipe
from shoal.train.vitals import Vitals
from tests.tiny import own_recipe

Capture = pytest.CaptureFixture[str]
CPU = torch.device("cpu")


def trivial(**overrides: Any) -> LoadedRecipe:
    own = {"data.samples": 64, "cluster.gpus_per_worker": 0, "cluster.threads_per_worker": 1}
    return load_recipe([TRIVIAL], own | overrides)


class Slow(SilentConsole):
    """Keeps what it is told, and takes its time."""

    def __init__(self, report_s: float = 0.0) -> None:
        self.reports: list[Report] = []
        self.steps: list[int] = []
        self.report_s = report_s

    def report(self, report: Report) -> None:
        self.reports.append(report)
        time.sleep(self.report_s)

    def tick(self, step: int) -> None:
        self.steps.append(step)


def sides(loaded: LoadedRecipe, seen_on: Slow, seen_off: Slow) -> tuple[Side, Side]:
    unit, feeding, objective = _build(loaded.recipe, CPU)
    on = Side(loaded.recipe, unit, feeding, objective, Vitals(Group(), Clock()), seen_on)
    off = Side(loaded.recipe, unit, feeding, objective, Vitals(Group(), Clock(is_split=False)), seen_off, every=NEVER)
    return on, off


def test_both_sides_train_the_same_steps_and_one_tells_of_them() -> None:
    seen_on, seen_off = Slow(), Slow()
    on, off = sides(trivial(), seen_on, seen_off)
    for _ in range(3):
        assert on.run(20).step_s > 0 and off.run(20).cpu_s > 0
    assert seen_on.steps == seen_off.steps == list(range(1, 64))
    assert [report.step for report in seen_on.reports] == [1, 10, 20, 30, 40, 50, 60]
    assert {"forward", "backward"} <= set(seen_on.reports[-1].seconds)
    assert [report.step for report in seen_off.reports] == [1]  # before what is timed begins


@pytest.mark.alone
def test_what_costs_time_is_seen() -> None:
    on, off = sides(trivial(), Slow(report_s=0.2), Slow())
    on_took, off_took = _take_turns(on, off, 10, 4, lambda line: None)
    extra_s = np.median([a.step_s - b.step_s for a, b in zip(on_took, off_took, strict=True)])
    assert 0.015 < extra_s < 0.035  # 200 ms in ten steps, once


def test_turns_are_taken_in_both_orders() -> None:
    order: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, steps: int) -> Took:
            order.append(self.name)
            return Took(1.0, 1.0)

    _take_turns(Named("on"), Named("off"), 1, 3, lambda line: None)  # type: ignore[arg-type]
    assert order == ["on", "off", "on", "off", "off", "on", "on", "off"]


@pytest.mark.parametrize("overrides", [{}, {"observe.metrics_port": 0}, {"observe.every_steps": 3}], ids=str)
def test_a_recipe_is_measured(overrides: dict[str, Any], here: Path) -> None:
    found = measure(trivial(**overrides), steps=7, rounds=3)
    assert found["recipe"] == "trivial" and found["rounds"] == 3 and found["device"] == "cpu"
    assert found["steps"] == (9 if "observe.every_steps" in overrides else 10)  # whole reports
    assert found["prometheus"] is ("observe.metrics_port" in overrides)
    assert 0 < found["on_step_ms"] < 1000 and 0 < found["off_step_ms"] < 1000 and 0 < found["line_ms"] < 1000
    low, high = found["ratio_interval"]
    assert low <= found["ratio"] == sorted(found["ratios"])[1] <= high
    assert found["overhead"] == pytest.approx(found["ratio"] - 1 + found["line_ms"] / 10_000)
    assert list(here.iterdir()) == []


def test_the_default_is_of_the_size_of_mnist(here: Path) -> None:
    loaded = load_recipe([MNIST_SIZED], {"cluster.gpus_per_worker": 0, "cluster.threads_per_worker": 1})
    shipped = load_recipe(["mnist"]).recipe
    assert loaded.recipe.model == shipped.model and loaded.recipe.train.global_batch == shipped.train.global_batch
    recipe, is_made = with_made_data(loaded.recipe, here)
    assert is_made and recipe.data is not None
    assert build_datasets(recipe.data, 0).spec.image_shape == (1, 28, 28)
    assert recipe.observe.every_steps == 10


def test_a_language_model_trains_on_made_up_tokens(here: Path) -> None:
    small = {"model.layers": 1, "model.heads": 2, "model.dim": 16, "data.context": 8, "data.vocab_size": 32}
    own = {"train.compile": False, "train.precision": "fp32", "train.global_batch": 4, "train.micro_batch": 2}
    loaded = load_recipe(["gpt2"], small | own | {"cluster.gpus_per_worker": 0, "observe.every_steps": 2})
    found = measure(loaded, steps=2, rounds=2)
    assert found["data"] == "made up" and found["on_step_ms"] > 0
    assert list(here.iterdir()) == []


def test_a_recipe_that_brings_no_data_or_model_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="bench overhead: needs the recipe's own data: and model:"):
        measure(load_recipe([own_recipe("never_imported")]), steps=1, rounds=2)


def test_the_interval_holds_the_middle() -> None:
    inside = 0
    for seed in range(100):
        ratios = np.random.default_rng(seed).normal(1.01, 0.02, 40).tolist()
        low, high = interval(ratios)
        inside += low <= 1.01 <= high
        assert low <= float(np.median(ratios)) <= high and high - low < 0.03
    assert inside >= 88


@pytest.mark.parametrize(
    ("low", "high", "says"),
    [(-0.002, 0.009, "at most 1% of a step"), (0.012, 0.02, "more than 1% of a step"), (0.0, 0.03, "not seen whether")],
)
def test_the_verdict_says_no_more_than_was_seen(low: float, high: float, says: str) -> None:
    assert verdict({"overhead_interval": [low, high]}).startswith(says)


def test_the_command_prints_and_writes(here: Path, capfd: Capture) -> None:
    own = ["cluster.gpus_per_worker=0", "cluster.threads_per_worker=1", "train.global_batch=2", "observe.every_steps=2"]
    assert run(["bench", "overhead", *own, "--steps", "2", "--rounds", "2", "--json"]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["steps"] == 2 and found["rounds"] == 2 and found["recipe"] == "mnist"
    assert [row.split()[0] for row in err.splitlines()[:6]] == ["on", "off", "a", "overhead", "CPU", "verdict"]
    (kept,) = (here / "bench").glob("overhead-mnist-*.json")
    assert json.loads(kept.read_text())["ratio"] == found["ratio"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_its_marks_are_part_of_it() -> None:
    found = measure(trivial(**{"cluster.gpus_per_worker": 1}), steps=20, rounds=3)
    assert found["device"] == torch.cuda.get_device_name() and found["on_step_ms"] > 0
