"""A run that takes a moment, and what tests of the command line and of run folders do with it."""

import json
from pathlib import Path
from typing import Any

from shoal.launch.api import train

TINY: dict[str, Any] = {
    "name": "tiny",
    "task": "image_classification",
    "model": {"name": "mlp", "hidden": [8]},
    "data": {"name": "synthetic", "samples": 96, "val_samples": 24, "shape": [1, 4, 4], "classes": 3},
    "optim": {"lr": 0.01},
    "train": {"steps": 12, "global_batch": 16},
    "evaluate": {"every_steps": 6},
    "checkpoint": {"every_steps": 4, "keep_last": 2},
    "observe": {"every_steps": 2},
    "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
}


def write_tiny(folder: Path, name: str = "tiny.yaml", **sections: Any) -> Path:
    """The recipe as a file (JSON is YAML), with other sections laid over it."""
    file = folder / name
    file.write_text(json.dumps(TINY | sections))
    return file


def tiny_run(run_dir: Path, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train it, silently; returns the summary."""
    return train(TINY, overrides or {}, run_dir=run_dir, progress="silent")


def write_own_task(folder: Path, module: str, in_loss: str = "") -> None:
    """A task of one's own, `MODULE:Task`, that runs `in_loss` (with `step` counting from 1) before every loss."""
    (folder / f"{module}.py").write_text(
        "import os, signal\n"
        "import torch\n"
        "class Task:\n"
        "    step = 0\n"
        "    def __init__(self, **args): self.args = args\n"
        "    def model(self): return torch.nn.Linear(2, 1)\n"
        "    def datasets(self):\n"
        "        x = torch.arange(128.0).reshape(64, 2) / 128\n"
        "        pairs = list(zip(x, x.sum(1, keepdim=True)))\n"
        "        return {'train': pairs, 'val': pairs[:8]}\n"
        "    def loss(self, model, batch):\n"
        "        self.step += model.training\n"
        "        step, args = self.step, self.args\n"
        f"        {in_loss or 'pass'}\n"
        "        return (model(batch[0]) - batch[1]).square().mean()\n"
    )


def own_recipe(module: str, **args: Any) -> dict[str, Any]:
    """A recipe for it: 8 steps, reported and saved every 2."""
    return {
        "name": "own",
        "task": {"name": f"{module}:Task", "args": args},
        "train": {"steps": 8, "global_batch": 8},
        "checkpoint": {"every_steps": 2},
        "observe": {"every_steps": 2},
        "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
    }
