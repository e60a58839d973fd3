"""Shoal trains PyTorch models on one machine or on a Ray cluster with one command."""

from types import ModuleType
from typing import Any

from shoal import train
from shoal.core.errors import RunError, UserError
from shoal.core.version import VERSION

__all__ = ["RunError", "UserError", "__version__", "train"]
__version__ = VERSION


class _TrainPackage(ModuleType):
    """`shoal.train` is a package and, as the interface promises, a function: calling it trains a recipe."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See `shoal.launch.api.train`, which this calls."""
        from shoal.launch.api import train as train_recipe

        return train_recipe(*args, **kwargs)


train.__class__ = _TrainPackage
