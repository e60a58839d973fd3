"""What importing costs and what names there are."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

HEAVY = ("torch", "numpy", "ray", "sklearn", "pandas", "matplotlib", "transformers")
SHOAL = Path(sys.executable).with_name("shoal")

LIGHT = """
import json, sys
before = set(sys.modules)
import shoal
import shoal.cli.main
import shoal.core.section, shoal.models.section, shoal.tasks.section, shoal.data.section
import shoal.parallel.section, shoal.checkpoint.section, shoal.observe.section
import shoal.recipe.schema, shoal.recipe.json_schema, shoal.recipe.field_tables
from shoal.recipe.load import load_recipe, shipped_recipes
for name in shipped_recipes():
    load_recipe([name], ["train.seed=1"]).to_yaml()
shoal.recipe.json_schema.to_text()
shoal.recipe.field_tables.to_text()
try:
    load_recipe(["digits"], ["optim.lrr=1"])
except shoal.UserError:
    pass
commands = "train tune runs checkpoints plan drill bench data submit completion monitor report track metrics"
commands += " deploy doctor"
for command in commands.split():
    assert shoal.cli.main.run([command, "--help"]) == 0
assert shoal.cli.main.run(["train", "--list"]) == 0
assert shoal.cli.main.run(["train", "gpt2", "--dry-run"]) == 0
assert shoal.cli.main.run(["runs", "list"]) == 0
assert shoal.cli.main.run(["train", "digts"]) == 2
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
"""

NAMES = """
import os, sys
before = dict(os.environ)
import shoal
assert callable(shoal.train) and callable(shoal.tune) and shoal.__version__
assert issubclass(shoal.UserError, ValueError) and issubclass(shoal.RunError, RuntimeError)
assert sorted(shoal.__all__) == ["RunError", "UserError", "__version__", "train", "tune"]
assert "torch" not in sys.modules
import shoal.train.loop as loop
from shoal.train import loop as same
import shoal.train
assert loop is same and callable(shoal.train) and shoal.train.loop is loop
assert callable(loop.run_loop)
import shoal.tune.space as space
assert shoal.tune.space is space and callable(shoal.tune)
from shoal import train
recipe = {
    "task": "image_classification",
    "model": {"name": "mlp", "hidden": [4]},
    "data": {"name": "synthetic", "samples": 32, "val_samples": 8, "shape": [1, 2, 2], "classes": 2},
    "train": {"steps": 2, "global_batch": 8},
    "cluster": {"gpus_per_worker": 0},
}
assert shoal.train(recipe, progress="silent")["status"] == "done"
assert train(recipe, {"train.steps": 3}, progress="silent")["step"] == 3
changed = {name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)}
assert changed <= {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}, changed
"""


def test_the_command_and_all_that_recipes_need_load_without_torch(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", LIGHT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    loaded = json.loads(ended.stdout.splitlines()[-1])
    assert "shoal" in loaded and "pydantic" in loaded
    assert not set(HEAVY) & set(loaded)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.alone
def test_help_answers_at_once(tmp_path: Path) -> None:
    took = []
    for _ in range(3):
        started = time.perf_counter()
        ended = subprocess.run([SHOAL, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        took.append(time.perf_counter() - started)
        assert ended.returncode == 0 and "Usage: shoal" in ended.stdout
    assert min(took) < 0.5, took


def test_shoal_train_and_shoal_tune_are_packages_and_functions(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", NAMES], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""
    assert len(list((tmp_path / "runs").iterdir())) == 2
