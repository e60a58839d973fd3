"""The small models of `shoal bench step --peers --sweep`, each on made-up data of its size."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shoal.bench.commands import Tell
from shoal.bench.step_peers import Settings, measure
from shoal.core.process import choose_device
from shoal.core.spec import DataSpec
from shoal.data.dataset import MemoryDataset
from shoal.recipe.load import LoadedRecipe, load_recipe
from shoal.recipe.merge import merge

BATCH = 128
_SAMPLES = 64 * BATCH
_CLASSES, _WORDS, _TOKENS = 10, 10_000, 32


def _images(*shape: int) -> dict[str, Any]:
    return {"name": "synthetic", "samples": _SAMPLES, "val_samples": 1, "shape": list(shape), "classes": _CLASSES}


MODELS: dict[str, dict[str, Any]] = {
    "mlp": {"model": {"name": "mlp", "hidden": [512, 512]}, "data": _images(1, 28, 28)},
    "simple_cnn": {"model": {"name": "simple_cnn"}, "data": _images(1, 28, 28)},
    "resnet18": {"model": {"name": "resnet18"}, "data": _images(3, 32, 32)},
    "vit_tiny": {
        "model": {"name": "vit", "patch": 4, "dim": 192, "layers": 4, "heads": 3},
        "data": _images(3, 32, 32),
    },
    "lstm": {
        "task": "text_classification",
        "model": {"name": "lstm", "dropout": 0.0},
        "data": {"name": f"{__name__}:short_texts"},
    },
}
_ALIKE: dict[str, Any] = {
    "task": "image_classification",
    "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
    "train": {"steps": 1, "global_batch": BATCH},
}


def short_texts(samples: int = _SAMPLES) -> dict[str, Any]:
    """Texts of made-up words, all of one length, whose class is that of most of them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, _WORDS, (samples, _TOKENS), generator=generator)
    labels = (tokens % _CLASSES).mode(dim=1).values
    return {"train": MemoryDataset(tokens, labels), "spec": DataSpec(num_classes=_CLASSES, vocab_size=_WORDS)}


def recipes(overrides: Iterable[str] = ()) -> list[LoadedRecipe]:
    """One for each model; on a GPU in bf16, unless the overrides say otherwise."""
    given = list(overrides)
    found = []
    for name, own in MODELS.items():
        tree = merge(merge({"name": name}, _ALIKE), own)
        loaded = load_recipe([tree], given)
        if choose_device(loaded.recipe.cluster.gpus_per_worker).type == "cuda":
            loaded = load_recipe([merge(tree, {"train": {"precision": "bf16"}})], given)
        found.append(loaded)
    return found


def measure_all(
    loaded: Sequence[LoadedRecipe], fast: Sequence[LoadedRecipe | None], settings: Settings, tell: Tell
) -> dict[str, Any]:
    """Every model by itself, one after the other."""
    models = {}
    for each, with_fast in zip(loaded, fast, strict=True):
        tell(f"{each.recipe.name}:")
        models[each.recipe.name] = measure(each, with_fast, settings, tell)
    return {"models": models}
