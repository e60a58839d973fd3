"""The measuring works and both loops train the same; how fast they are is not asserted here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.bench.step import TRIVIAL, _HandWrittenLoop, _ShoalLoop, build_bench, measure
from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from tests.small_recipes import small
from tests.tiny import own_recipe

Capture = pytest.CaptureFixture[str]


def recipe(**overrides: Any) -> Recipe:
    return load_recipe([TRIVIAL], {"data.samples": 40, "cluster.gpus_per_worker": 0, **overrides}).recipe


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"train.precision": "bf16", "train.clip_norm": 0.5},
        {"train.precision": "fp16", "optim.name": "adamw"},
    ],
    ids=str,
)
def test_both_loops_are_measured(overrides: dict[str, Any], here: Path) -> None:
    found = measure(recipe(**overrides), steps=7, rounds=3, warmup=2)
    assert found["recipe"] == "trivial" and found["steps"] == 7 and found["rounds"] == 3 and found["global_batch"] == 8
    assert 0 < found["shoal_step_ms"] < 1000 and 0 < found["by_hand_step_ms"] < 1000
    assert len(found["ratios"]) == 3 and found["ratio"] == sorted(found["ratios"])[1] > 0
    assert abs(found["overhead_us"]) < 1e6
    assert list(here.iterdir()) == []


def test_a_language_model_can_be_measured_too(here: Path) -> None:
    loaded = load_recipe(["shakespeare"], small("shakespeare", here) | {"cluster.gpus_per_worker": 0})
    assert measure(loaded.recipe, steps=2, rounds=1, warmup=1)["shoal_step_ms"] > 0


def test_both_loops_take_real_optimizer_steps_from_the_same_weights() -> None:
    bench = build_bench(recipe(**{"optim.lr": 0.5}))
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    ours, by_hand = _ShoalLoop(bench), _HandWrittenLoop(bench)
    for loop, model in ((ours, ours.unit.model), (by_hand, by_hand.model)):
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert loop.run(10) > 0
        assert not all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in bench.model.state_dict().items())


def test_torch_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    measure(recipe(**{"cluster.threads_per_worker": 1 if before > 1 else 2}), steps=1, rounds=1, warmup=1)
    assert torch.get_num_threads() == before


def test_a_recipe_that_brings_no_data_or_model_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="bench step: needs the recipe's own data: and model:"):
        measure(load_recipe([own_recipe("never_imported")]).recipe, steps=1, rounds=1, warmup=1)


def test_data_that_is_read_item_by_item_is_refused(here: Path) -> None:
    (here / "items_of_bench_step.py").write_text("def build(): return {'train': [(0, 0)] * 8}\n")
    with pytest.raises(UserError, match=r"data.name: items_of_bench_step:build is read item by item"):
        measure(load_recipe([TRIVIAL], {"data": "items_of_bench_step:build"}).recipe, steps=1, rounds=1, warmup=1)


ARGUMENTS = ["bench", "step", "cluster.gpus_per_worker=0", "--steps", "3", "--rounds", "2"]


def test_the_command_prints_a_table_and_writes_json_and_a_plot(here: Path, capfd: Capture) -> None:
    assert run(ARGUMENTS) == 0
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["shoal", "by", "ratio", "overhead"]
    assert "written to bench/step-trivial-" in err
    written = sorted((here / "bench").iterdir())
    assert [path.suffix for path in written] == [".json", ".png"]
    kept = json.loads(written[0].read_text())
    assert kept["benchmark"] == "step-trivial" and kept["steps"] == 3 and kept["machine"]["torch"] == torch.__version__


def test_with_json_the_result_is_the_one_line_on_stdout(here: Path, capfd: Capture) -> None:
    assert run([*ARGUMENTS, "train.global_batch=4", "--json", "--out", "elsewhere"]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["global_batch"] == 4 and "ratio" in err
    (kept,) = (here / "elsewhere").glob("*.json")
    assert json.loads(kept.read_text()).items() >= found.items()
