"""The measuring works; how fast the loaders are is not asserted here."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.data import measure
from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from tests.tiny import TINY, own_recipe

Capture = pytest.CaptureFixture[str]


def recipe(**overrides: Any) -> Recipe:
    return load_recipe([TINY], overrides).recipe


@pytest.mark.parametrize(
    ("overrides", "limit", "samples"), [({}, 60_000, 96), ({"data.workers": 1}, 60_000, 96), ({}, 50, 50)]
)
def test_both_loaders_are_measured(overrides: dict[str, Any], limit: int, samples: int) -> None:
    found = measure(recipe(**overrides), rounds=3, max_samples=limit)
    assert found["recipe"] == "tiny" and found["samples"] == samples and found["global_batch"] == 16
    assert found["shoal_samples_per_s"] > 0 and found["dataloader_samples_per_s"] > 0
    assert len(found["ratios"]) == 3 and found["ratio"] == sorted(found["ratios"])[1] > 0


def test_a_recipe_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="data: is required"):
        measure(load_recipe([own_recipe("never_imported")]).recipe, rounds=1)


def test_data_that_is_read_item_by_item_is_refused(here: Path) -> None:
    (here / "items_of_bench_data.py").write_text("def build(): return {'train': [(0, 0)] * 8}\n")
    with pytest.raises(UserError, match=r"data.name: items_of_bench_data:build is read item by item"):
        measure(recipe(data="items_of_bench_data:build"), rounds=1)


def test_the_command_prints_a_table_and_writes_json_and_a_plot(here: Path, capfd: Capture) -> None:
    (here / "tiny.yaml").write_text(json.dumps(TINY))
    assert run(["bench", "data", "tiny.yaml", "--rounds", "1", "--out", "out"]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["shoal", "DataLoader", "ratio"]
    assert "samples/s" in out and "written to out/data-tiny-" in err
    assert sorted(path.suffix for path in (here / "out").iterdir()) == [".json", ".png"]
    assert run(["bench", "data", "tiny.yaml", "--rounds", "1", "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["samples"] == 96
