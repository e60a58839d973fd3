"""What travels to a cluster with a job: the recipe and, where asked for, the user's code."""

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

from shoal.core.errors import UserError

RECIPE_FILE = ".shoal-recipe.yaml"
_LEFT_OUT = frozenset(
    ".git .hg .venv venv node_modules __pycache__ .mypy_cache .pytest_cache .ruff_cache .ipynb_checkpoints .env".split()
)
"""Wherever they lie. Of a .env file, what the recipe refers to is sent, and nothing else."""
_LARGEST_FILE = 25 << 20
_LARGEST = 100 << 20
"""Ray keeps the whole in the head's memory and copies it to every machine."""


def pack(target: Path, recipe: str | None, folder: Path | None) -> list[str]:
    """Write a zip file of the recipe and the folder; what of the folder was left out, in words."""
    left_out: list[str] = []
    size = 0
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as archive:
        if recipe is not None:
            archive.writestr(RECIPE_FILE, recipe)
        for file in _files(folder, left_out) if folder is not None else ():
            assert folder is not None
            size += file.stat().st_size
            if size > _LARGEST:
                raise UserError(
                    f"--working-dir: {folder} holds more than {_mib(_LARGEST)} to send; give a folder with the code "
                    "alone, and keep data on storage that all machines share"
                )
            archive.write(file, file.relative_to(folder))
    return left_out


def _files(folder: Path, left_out: list[str]) -> Iterator[Path]:
    """What is sent of a folder, in a fixed order."""
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        not_sent = _LEFT_OUT | ({"runs"} if here == folder else set())
        links = [name for name in folders if (here / name).is_symlink()]
        left_out += [f"{(here / name).relative_to(folder)} (a link to a folder)" for name in links]
        folders[:] = sorted(name for name in folders if name not in not_sent and name not in links)
        for name in sorted(names):
            file = here / name
            if name in not_sent or name == RECIPE_FILE or not file.is_file():  # broken links, sockets
                continue
            if (size := file.stat().st_size) > _LARGEST_FILE:
                left_out.append(
                    f"{file.relative_to(folder)} ({_mib(size)}, and files above {_mib(_LARGEST_FILE)} stay)"
                )
                continue
            yield file


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
