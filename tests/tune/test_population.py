"""Population based training on a real Ray: weights and settings go from the best to the worst, and it pays."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from shoal.recipe.load import load_recipe
from shoal.tune.api import tune
from tests.tune.searching import search

TASK = '''
import torch

class Task:
    """A mean to be found from noisy samples, far away. At first only large steps come near it; then only small ones do
    not jump about it. So the best learning rate is one that changes."""

    def model(self):
        model = torch.nn.Linear(32, 1, bias=False)
        torch.nn.init.constant_(model.weight, 100.0)
        return model

    def datasets(self):
        noise = torch.randn(1024, 32, generator=torch.Generator().manual_seed(0))
        noise -= noise.mean(0)
        return {"train": list(noise), "val": [torch.zeros(32)] * 4}

    def loss(self, model, batch):
        return 0.5 * (model.weight - batch).square().sum(1).mean()
'''
RECIPE: dict[str, Any] = {
    "name": "noisy",
    "task": "noisy:Task",
    "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
    "train": {"steps": 200, "global_batch": 4},
    "checkpoint": {"every_steps": 20},
    "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
}
LRS = "0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0"


@pytest.fixture
def noisy(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (here / "noisy.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setenv("PYTHONPATH", str(here))
    return here


@pytest.mark.parametrize("scheduler", ["pbt", pytest.param("pb2", marks=pytest.mark.slow)])
def test_a_population_beats_the_best_fixed_value_of_the_same_budget(noisy: Path, scheduler: str):
    fixed = search(noisy / "fixed", {"optim.lr": f"grid({LRS})"}, RECIPE, metric="val_loss")
    found = search(
        noisy / "found", {"optim.lr": "loguniform(0.002, 1.0)"}, RECIPE,
        metric="val_loss", scheduler=scheduler, trials=8, interval=20,
    )  # fmt: skip
    assert found["trained"] == fixed["trained"] == 8 * 200  # steps
    assert found["exploits"] >= 5
    last_fixed = min(record["last"] for record in fixed["trials"])
    assert min(record["last"] for record in found["trials"]) < 0.5 * last_fixed
    if scheduler == "pb2":  # which also tries what it knows least of
        return
    # It got there by what the problem asks for: large steps first, small ones later.
    taken = [(step["progress"], step["config"]["optim.lr"]) for t in found["trials"] for step in t.get("lineage", [])]
    early = [rate for at, rate in taken if at <= 60]
    late = [rate for at, rate in taken if at >= 140]
    assert statistics.median(late) < statistics.median(early)


def test_weights_and_settings_are_taken_over(noisy: Path):
    summary = search(
        noisy / "s", {"optim.lr": "loguniform(0.01, 0.5)", "train.global_batch": "choice(4, 8)"}, RECIPE,
        metric="val_loss", scheduler="pbt", trials=4, interval=100, overrides={"checkpoint.keep_last": 20},
    )  # fmt: skip
    heirs = [record for record in summary["trials"] if record.get("lineage")]
    assert heirs
    for heir in heirs:
        taken = heir["lineage"][-1]
        run_dir, donor = Path(heir["run_dir"]), noisy / "s" / "trials" / f"{taken['from']:04d}"
        assert run_dir.name == f"{heir['trial']:04d}-1"
        ours, theirs = (folder / "checkpoints" / "step-00000100" for folder in (run_dir, donor))
        for one, other in zip(sorted(ours.glob("*.safetensors")), sorted(theirs.glob("*.safetensors")), strict=True):
            mine, given = load_file(one), load_file(other)
            assert mine.keys() == given.keys()
            assert all(torch.equal(mine[name], given[name]) for name in mine)
        before, after = (yaml.safe_load((folder / "recipe.yaml").read_text()) for folder in (donor, run_dir))
        assert after["optim"]["lr"] == heir["config"]["optim.lr"] != before["optim"]["lr"]
        assert after["train"]["global_batch"] == before["train"]["global_batch"], "what may not change is the donor's"
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
        assert [event["step"] for event in events if event["event"] in ("adopted", "resume")] == [100, 100]
        last = max(run_dir.glob("checkpoints/step-*"))
        assert last.name == "step-00000200"
        assert load_recipe([run_dir / "recipe.yaml"]).recipe.optim.lr == heir["config"]["optim.lr"]


def test_a_member_that_diverges_is_replaced(noisy: Path):
    summary = search(
        noisy / "s", {"optim.lr": "choice(0.1, 0.05, 1e30)"}, RECIPE | {"observe": {"every_steps": 5}},
        metric="val_loss", scheduler="pbt", trials=4, interval=50, seed=1, max_failed=1.0,
    )  # fmt: skip
    first = {trial["trial"]: trial for trial in summary["trials"]}
    assert any(record["lineage"] for record in first.values() if record.get("lineage"))
    assert summary["trials_by_status"].get("failed", 0) < 4


def test_settings_that_do_not_go_together_are_not_taken(noisy: Path):
    """Momentum of 0 and Nesterov's: the heir goes on with the donor's own settings."""
    space = {
        "optim.momentum": "choice(0.0, 0.9)",
        "optim.nesterov": "choice(false, true)",
        "optim.lr": "uniform(0.01, 0.2)",
    }
    recipe = RECIPE | {"optim": RECIPE["optim"] | {"momentum": 0.9}, "train": {"steps": 60, "global_batch": 4}}
    summary = search(
        noisy / "s", space, recipe, metric="val_loss", scheduler="pbt", trials=4, interval=20, resample=1.0,
        max_failed=1.0, seed=2,
    )  # fmt: skip
    assert summary["status"] == "done"
    assert all(
        r["config"]["optim.momentum"] or not r["config"]["optim.nesterov"]
        for r in summary["trials"]
        if r["status"] == "done"
    )


@pytest.mark.parametrize("is_all_gone", [True, False])
def test_an_heir_whose_folder_is_lost_does_not_begin_anew_in_silence(noisy: Path, is_all_gone: bool):
    settings = {"metric": "val_loss", "scheduler": "pbt", "trials": 4, "interval": 100}
    done = search(noisy / "s", {"optim.lr": "loguniform(0.01, 0.5)"}, RECIPE, **settings)
    heir = next(record for record in done["trials"] if record.get("lineage"))
    journal = noisy / "s" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    moves = next(place for place, line in enumerate(lines) if json.loads(line)["event"] == "moves")
    journal.write_text("".join(lines[: moves + 1]))
    events = Path(heir["run_dir"]) / "events.jsonl"
    adopted = events.read_text().splitlines(keepends=True)[0]
    assert json.loads(adopted)["event"] == "adopted"
    shutil.rmtree(heir["run_dir"])
    if is_all_gone:
        says = "is gone, and with it the weights"
    else:
        says = "the checkpoints that this run had are gone"
        Path(heir["run_dir"]).mkdir()
        events.write_text(adopted)
        (Path(heir["run_dir"]) / "recipe.yaml").write_text((noisy / "s" / "best.yaml").read_text())
    again = tune(resume=noisy / "s", progress="silent")
    lost = again["trials"][heir["trial"]]
    assert lost["status"] == "failed" and says in lost["reason"]
    assert again["trials_by_status"]["done"] == 3
