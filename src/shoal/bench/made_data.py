"""Data of the shape that a recipe's own has, made up: what a step costs does not depend on what is in it."""

from pathlib import Path

import numpy as np

from shoal.data.section import ImageFolder, Synthetic, Tokens
from shoal.data.tokens import VOCAB_SIZE
from shoal.recipe.schema import Recipe

_IMAGES = {"mnist": [1, 28, 28], "fashion_mnist": [1, 28, 28], "cifar10": [3, 32, 32]}
_SAMPLES = 8192
_LARGE_IMAGES, _LARGE_CLASSES = 1024, 1000
"""As many as ImageNet has classes, and images that fit in memory."""
_WINDOWS = 2048


def with_made_data(recipe: Recipe, folder: Path) -> tuple[Recipe, bool]:
    """The recipe on made-up data, where it is known what that looks like; and whether it is."""
    data = recipe.data
    if data is not None and (shape := _IMAGES.get(data.name)) is not None:
        made = Synthetic(name="synthetic", samples=_SAMPLES, val_samples=1, shape=shape, classes=10)
        return recipe.model_copy(update={"data": made}), True
    if isinstance(data, ImageFolder):
        shape, classes = [3, data.size, data.size], data.classes or _LARGE_CLASSES
        made = Synthetic(name="synthetic", samples=_LARGE_IMAGES, val_samples=1, shape=shape, classes=classes)
        return recipe.model_copy(update={"data": made}), True
    if isinstance(data, Tokens):
        count = _WINDOWS * data.context + 1
        ids = np.random.default_rng(0).integers(0, data.vocab_size or VOCAB_SIZE, count)
        for file in (data.train_file, data.val_file):
            ids.astype(np.dtype(data.dtype).newbyteorder("<")).tofile(folder / file)
        own = data.model_copy(update={"dir": str(folder), "workers": 0})
        return recipe.model_copy(update={"data": own}), True
    return recipe, False
