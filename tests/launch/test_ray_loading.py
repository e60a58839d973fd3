"""Runs on Ray whose data is read by the cluster's CPUs: the samples of every step are those of one process alone."""

from pathlib import Path
from typing import Any

import pytest

from shoal.launch.api import train

TASK = """
import torch
from torch import nn


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(60))
    def forward(self, ids):
        return self.seen[ids]


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        return index


class Recording:
    def __init__(self, kind):
        self.kind = kind
    def model(self):
        return Weights()
    def datasets(self):
        if self.kind == "items":
            return {"train": Items(), "val": Items()}
        import ray
        rows = ray.data.range(60, override_num_blocks=7).map_batches(lambda batch: {"id": batch["id"]})
        return {"train": rows, "val": rows}
    def loss(self, model, batch):
        return -model(batch["id"] if isinstance(batch, dict) else batch).mean()
"""
RECIPE: dict[str, Any] = {
    "data": {"loader": "ray"},
    "optim": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 1.0, "warmup_steps": 1024},
    "train": {"epochs": 2, "global_batch": 12},
    "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
}


def recipe(kind: str, **changes: Any) -> dict[str, Any]:
    return RECIPE | {"task": {"name": "ray_recording:Recording", "args": {"kind": kind}}} | changes


@pytest.fixture
def task(here: Path) -> None:
    (here / "ray_recording.py").write_text(TASK)


@pytest.mark.slow
@pytest.mark.usefixtures("task")
def test_items_read_by_the_cluster(here: Path) -> None:
    alone = train(recipe("items", data={"loader": "map"}), progress="silent")
    on_ray = train(recipe("items"), {"cluster.workers": 2}, progress="silent", launcher="ray")
    assert on_ray["status"] == "done" and on_ray["weights_sha256"] == alone["weights_sha256"]
    assert on_ray["metrics"]["val_loss"] == pytest.approx(alone["metrics"]["val_loss"])


@pytest.mark.slow
@pytest.mark.usefixtures("task")
def test_a_ray_dataset_of_the_users_own(here: Path) -> None:
    """In its own order; by two workers, then, resumed in the middle of an epoch, by three."""
    whole = train(recipe("rows", train={"epochs": 3, "global_batch": 12}), {"cluster.workers": 2}, launcher="ray",
                  progress="silent")  # fmt: skip
    steps = {"epochs": None, "steps": 8, "global_batch": 12}
    first = train(recipe("rows", train=steps), {"cluster.workers": 2}, launcher="ray", progress="silent",
                  run_dir=here / "run")  # fmt: skip
    assert first["step"] == 8
    rest = train(resume=here / "run", overrides={"train.steps": 15, "cluster.workers": 3}, launcher="ray",
                 progress="silent")  # fmt: skip
    assert rest["resumed_from_step"] == 8 and rest["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.usefixtures("task")
def test_without_a_cluster_it_is_said_what_is_missing() -> None:
    from shoal.core.errors import UserError

    with pytest.raises(UserError, match=r"^data.loader: ray needs a Ray cluster: --launcher ray or --address"):
        train(recipe("items"), progress="silent")
