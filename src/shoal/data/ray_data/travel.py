"""What goes between a worker and processes of Ray's: code, errors and tensors."""

import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.core.errors import UserError


class Where(NamedTuple):
    """What makes a process elsewhere find the user's modules and files as this one does."""

    paths: list[str]
    directory: str

    @classmethod
    def here(cls) -> "Where":
        """This process."""
        return cls(list(sys.path), str(Path.cwd()))

    def take_over(self) -> None:
        """Look where the other would look."""
        sys.path += [path for path in self.paths if path not in sys.path]
        if Path(self.directory).is_dir():
            os.chdir(self.directory)


@dataclass
class Failed:
    """An exception, as a value: on its way through Ray it would become another, and be buried in a trace."""

    error: BaseException

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """With the trace as a note, unless it is an error whose message says all."""
        trace = "".join(traceback.format_exception(error))
        error.__traceback__ = error.__cause__ = error.__context__ = None
        try:
            error = pickle.loads(pickle.dumps(error))  # noqa: S301 - made here
        except Exception:  # noqa: BLE001 - whatever the user's class does
            error = RuntimeError(f"{type(error).__name__}: {error}")
        if not isinstance(error, UserError):
            error.add_note(f"It was raised on {socket.gethostname()}, in a process of Ray's:\n{trace}")
        return cls(error)


class _Tensor(NamedTuple):
    """A tensor as bytes, which Ray passes on without copying; torch's own way copies them twice."""

    raw: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def packed(value: Any) -> Any:
    """As it goes through Ray's store."""
    if type(value) is torch.Tensor and value.layout is torch.strided:
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _Tensor(raw, value.dtype, tuple(value.shape))
    return _mapped(packed, value)


def unpacked(value: Any) -> Any:
    """In memory of its own, so that the store has its room back and whoever trains may write to it."""
    if isinstance(value, _Tensor):
        return torch.from_numpy(value.raw.copy()).view(value.dtype).reshape(value.shape)
    if isinstance(value, np.ndarray):
        return value.copy()
    return _mapped(unpacked, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(function, value))
    if type(value) in (list, tuple):
        return type(value)(map(function, value))
    if type(value) is dict:
        return {key: function(part) for key, part in value.items()}
    return value


def last_line(error: BaseException) -> str:
    """Where Ray says what happened."""
    return next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()
