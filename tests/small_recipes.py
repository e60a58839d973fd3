"""Every shipped recipe in a form that trains in a second on one CPU thread, on files made for the test."""

from pathlib import Path
from typing import Any

from shoal.recipe.load import shipped_recipes
from tests import fake_data

_GPT = {"model.layers": 2, "model.heads": 2, "model.dim": 32}

_SMALL: dict[str, dict[str, Any]] = {
    "digits": {"train.steps": 24},
    "mnist": {"model.channels": [4, 8], "model.hidden": 16, "train.global_batch": 16, "optim.warmup_steps": 5},
    "fashion_mnist": {"model.channels": [4, 8], "model.hidden": 16, "train.global_batch": 16, "optim.warmup_steps": 5},
    "cifar10": {"model.width": 8, "train.global_batch": 16, "train.precision": "fp32", "optim.lr": 0.05},
    "cifar10_vit": {
        "model.dim": 24,
        "model.layers": 2,
        "model.heads": 2,
        "model.patch": 8,
        "train.global_batch": 16,
        "train.precision": "fp32",
        "optim.lr": 5e-3,
        "optim.warmup_steps": 5,
    },
    "imagenet": {
        "model.width": 4,
        "data.size": 32,
        "data.workers": 0,
        "train.global_batch": 8,
        "train.precision": "fp32",
        "optim.warmup_steps": 10,
    },
    "agnews": {
        "model.embed": 16,
        "model.hidden": 16,
        "train.global_batch": 16,
        "optim.lr": 2e-2,
        "optim.warmup_steps": 5,
    },
    "shakespeare": {**_GPT, "data.context": 16, "train.global_batch": 8, "optim.warmup_steps": 5},
    "gpt2": {
        **_GPT,
        "data.context": 16,
        "data.vocab_size": 64,
        "train.global_batch": 8,
        "train.micro_batch": 4,
        "train.precision": "fp32",
        "train.compile": False,
        "optim.warmup_steps": 5,
    },
    "synthetic_mlp": {
        "model.hidden": [16, 16],
        "data.samples": 300,
        "data.val_samples": 50,
        "train.global_batch": 16,
        "optim.lr": 1e-2,
    },
}

NAMES = sorted(_SMALL)


def small(name: str, folder: Path, steps: int = 24) -> dict[str, Any]:
    """Overrides that make recipe `name` small, with its data written under `folder`."""
    own = _write_data(name, folder)
    every = {"train.steps": steps, "evaluate.every_steps": 7, "checkpoint.every_steps": 9, "observe.every_steps": 1}
    return {**_SMALL[name], **own, **every}


def _write_data(name: str, folder: Path) -> dict[str, Any]:
    writers = {
        "mnist": lambda: fake_data.write_idx(folder, 150, 30),
        "fashion_mnist": lambda: fake_data.write_idx(folder, 150, 30),
        "cifar10": lambda: fake_data.write_cifar_bin(folder, 20),
        "cifar10_vit": lambda: fake_data.write_cifar_bin(folder, 20),
        "imagenet": lambda: fake_data.write_image_folder(folder, ("cat", "dog", "eel"), 12, 40),
        "agnews": lambda: fake_data.write_csv_text(folder, 150, 40),
        "shakespeare": lambda: fake_data.write_text(folder, 4000),
        "gpt2": lambda: fake_data.write_tokens(folder, 4000, 64),
    }
    if name not in writers:
        return {}
    writers[name]()
    return {"data.dir": str(folder)}


def test_every_shipped_recipe_has_a_small_form() -> None:
    assert sorted(shipped_recipes()) == NAMES
