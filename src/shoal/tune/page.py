"""The page of a search: its results as one file that needs nothing else."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from shoal.core.storage import write_atomically
from shoal.observe.report.write import PIECES, make_page
from shoal.tune.page_data import page_data
from shoal.tune.setup import Setup
from shoal.tune.trial import Trial

__all__ = ["page_data", "write_search_page"]

NAME = "report.html"
_SCRIPTS = ("search_page.pictures.js", "search_page.js")


def write_search_page(
    trials: Mapping[int, Trial], setup: Setup, folder: Path, summary: dict[str, Any], target: Path | None = None
) -> Path:
    """Write FOLDER/report.html, or `target`; where it is."""
    target = target or folder / NAME
    has_page = {
        number
        for number, trial in trials.items()
        if target.resolve().parent == folder.resolve()
        and (folder / "trials" / trial.name / NAME).is_file()  # or links lead nowhere
    }
    data = page_data(trials, setup, folder, summary, has_page)
    write_atomically(target, make_page(data, PIECES, [_read(name) for name in _SCRIPTS], _read("search_page.css")))
    return target


def _read(name: str) -> str:
    return (files("shoal.tune") / name).read_text(encoding="utf-8")
