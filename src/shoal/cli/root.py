"""The folder that commands look for runs in."""

from pathlib import Path

import click

from shoal.core.errors import UserError
from shoal.core.storage import expand_home

ROOT = click.option("--root", metavar="DIR", help="Where runs are (default: runs).")


def runs_folder(root: str | None) -> Path:
    """As given; `runs` of the working directory need not be there, because nothing may have run yet."""
    if root is None:
        return Path("runs")
    folder = expand_home(root)
    if not folder.is_dir():
        raise UserError(
            f"--root: {folder} is {'not a folder' if folder.exists() else 'not there'}; give a folder of runs"
        )
    return folder
