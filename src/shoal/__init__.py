"""Shoal trains PyTorch models on one machine or on a Ray cluster with one command."""

from importlib import import_module
from types import ModuleType
from typing import Any

from shoal import train, tune
from shoal.core.errors import RunError, UserError
from shoal.core.version import VERSION

__all__ = ["RunError", "UserError", "__version__", "train", "tune"]
__version__ = VERSION

_CALLED = {"shoal.train": "shoal.launch.api", "shoal.tune": "shoal.tune.api"}
"""package -> where the function of its name is"""


class _CallablePackage(ModuleType):
    """`shoal.train` and `shoal.tune` are packages and, as the interface promises, functions."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See `shoal.launch.api.train` and `shoal.tune.api.tune`, which this calls."""
        function = getattr(import_module(_CALLED[self.__name__]), self.__name__.rpartition(".")[2])
        summary: dict[str, Any] = function(*args, **kwargs)
        return summary


for _package in (train, tune):
    _package.__class__ = _CallablePackage
