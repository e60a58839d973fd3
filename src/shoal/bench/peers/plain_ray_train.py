"""Data parallel by hand on Ray Train: what one would write without Shoal.

    python plain_ray_train.py --out lines.jsonl --steps 100 [--address HOST:PORT]

A file tells when the first step was done, a checkpoint saved and a failure noticed, and which processes work.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn


def small_model() -> nn.Module:
    """The model of Shoal's `digits` recipe."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


def note(out: str, **fields: Any) -> None:
    """A line in a file for whoever measures."""
    with Path(out).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"time": time.time(), **fields}) + "\n")


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs; started again after a failure, it goes on from the last checkpoint for a few steps."""
    context = ray.train.get_context()
    rank, world_size, batch = context.get_world_rank(), context.get_world_size(), config["batch"]
    torch.manual_seed(0)
    images, labels = torch.randn(1438, 1, 8, 8), torch.randint(0, 10, (1438,))
    bare = small_model()
    step, last = 0, config["steps"]
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        bare.load_state_dict(saved["model"])
        step, last = saved["step"], saved["step"] + 5
    model = prepare_model(bare)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if checkpoint is not None:
        optimizer.load_state_dict(saved["optimizer"])
    per_epoch = len(images) // (batch * world_size)
    began = step
    while step < last:
        first = (step % per_epoch * world_size + rank) * batch
        loss = nn.functional.cross_entropy(model(images[first : first + batch]), labels[first : first + batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == began + 1:
            note(config["out"], what="first_step", rank=rank, pid=os.getpid())
        if step == config["save_at"]:
            with tempfile.TemporaryDirectory() as folder:
                if rank == 0:
                    state = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / "state.pt")
                ray.train.report({}, checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None)
            note(config["out"], what="saved", rank=rank, pid=os.getpid())


class NoteFailures(UserCallback):
    """Writes down when Ray Train has noticed that a worker failed."""

    def __init__(self, out: str) -> None:
        self.out = out

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """In Ray Train's controller."""
        note(self.out, what="noticed")


def main() -> None:
    """Start or reach a Ray cluster, and fit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--address", default="local", help="of a cluster that runs; otherwise one is started")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples of each worker in a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--save-at", type=int, default=0, help="the step after which a checkpoint is reported")
    args = parser.parse_args()
    ray.init(address=args.address)
    with tempfile.TemporaryDirectory() as storage:
        TorchTrainer(
            train_loop,
            train_loop_config={"out": args.out, "batch": args.batch, "steps": args.steps, "save_at": args.save_at},
            scaling_config=ScalingConfig(num_workers=args.workers),
            run_config=RunConfig(
                storage_path=storage,
                failure_config=FailureConfig(max_failures=3),
                callbacks=[NoteFailures(args.out)],  # type: ignore[list-item]
            ),
        ).fit()


if __name__ == "__main__":
    main()
