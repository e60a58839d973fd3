"""Whether kernels can be compiled for the GPUs of this machine."""

import functools
import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch

_COMPILERS = ("cc", "gcc", "clang")


@functools.cache
def can_compile_kernels() -> bool:
    """For torch.compile, and for kernels of our own: both go by Triton."""
    if not torch.cuda.is_available():
        return False
    from torch.utils._triton import has_triton

    return has_triton() and can_compile_c()


def can_compile_c(find: Callable[[str], str | None] = shutil.which, headers: str | None = None) -> bool:
    """Whether C can be compiled that includes Python: Triton has what calls its kernels made so."""
    folder = Path(headers or sysconfig.get_paths()["include"])
    return ("CC" in os.environ or any(find(name) for name in _COMPILERS)) and (folder / "Python.h").exists()
