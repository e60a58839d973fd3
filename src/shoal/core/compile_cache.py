"""Where torch.compile keeps what it has compiled, so that the next start and the next run need not do it again.

PyTorch's own place is a folder for temporary files, which a reboot or a new container empties. Ours is in the user's
cache, one folder for every version of PyTorch and kind of processor: compiled code is made for both, and a home
directory may be shared by machines that differ. Within it, PyTorch's own locks keep processes apart.
"""

import contextlib
import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.core.machine import cpu_features
from shoal.core.storage import expand_home

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""What PyTorch reads; where the user has set it, that is the place."""


@dataclass(frozen=True)
class Place:
    """A folder for compiled code, and why it is not to be used, if so."""

    folder: Path
    problem: str = ""


def own_place(variables: Mapping[str, str] | None = None) -> Place:
    """Where Shoal would have it; nothing is made here."""
    variables = os.environ if variables is None else variables
    cache = Path(variables.get("XDG_CACHE_HOME") or expand_home("~/.cache"))
    folder = cache / "shoal" / "compile" / _kind()
    if not folder.is_absolute():  # no home, or a relative XDG_CACHE_HOME, which its standard says to ignore
        return Place(folder, f"{cache} is not an absolute path")
    return Place(folder, _problem(folder))


def fallback_problem(variables: Mapping[str, str] | None = None) -> str:
    """Why compiled code is in a folder for temporary files, in words; empty where it is not."""
    variables = os.environ if variables is None else variables
    return "" if _is_said(variables) else own_place(variables).problem


@contextlib.contextmanager
def kept_compiled() -> Iterator[None]:
    """Have PyTorch keep compiled code in our place, unless the user has said another or ours cannot be used."""
    place = own_place()
    if _is_said(os.environ) or place.problem:
        yield
        return
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(place.folder)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def _is_said(variables: Mapping[str, str]) -> bool:
    """Whether somebody has chosen the place: PyTorch itself sets the variable when its compiler is loaded."""
    said = Path(variables.get(VARIABLE, ""))
    is_of_pytorch = said.parent == Path(tempfile.gettempdir()) and said.name.startswith("torchinductor_")
    return VARIABLE in variables and not is_of_pytorch


def _kind() -> str:
    """`torch-2.13.0-py3.11-x86_64-0123abcd`."""
    features = hashlib.sha256(cpu_features().encode()).hexdigest()[:8]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return f"torch-{torch.__version__}-py{python}-{platform.machine()}-{features}"


def _problem(folder: Path) -> str:
    there = folder
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    try:
        owner = there.stat().st_uid
    except OSError as error:
        return f"{there}: {error.strerror or error}"
    if not there.is_dir():
        return f"{there} is not a folder"
    if not os.access(there, os.W_OK | os.X_OK):
        return f"{there} cannot be written"
    if there == folder and owner != os.getuid():
        return f"{there} belongs to another user, whose code would be run"
    return ""
