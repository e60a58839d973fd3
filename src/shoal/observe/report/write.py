"""Pages on disk: data, style and script in one file that asks nobody for anything."""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from shoal.core.secrets import scrubbed
from shoal.core.storage import to_json_line, write_atomically
from shoal.observe.report.compare_data import compare_data
from shoal.observe.report.folder import read_folder
from shoal.observe.report.run_data import run_data

PIECES = ("dom.js", "words.js", "chart.js", "pieces.js")
"""What any page is drawn with."""
_OF_A_RUN = (*PIECES, "run_page.js", "run_workers.js")
_OF_SEVERAL = (*PIECES, "compare_page.js")


def write_report(run_dir: Path, target: Path | None = None) -> Path:
    """Write the page of a run, by default RUN_DIR/report.html; where it is."""
    target = run_dir / "report.html" if target is None else target
    write_atomically(target, make_page(run_data(read_folder(run_dir), target), _OF_A_RUN))
    return target


def write_comparison(run_dirs: Sequence[Path], target: Path) -> Path:
    """Write a page with several runs side by side; where it is."""
    write_atomically(target, make_page(compare_data([read_folder(run_dir) for run_dir in run_dirs]), _OF_SEVERAL))
    return target


def make_page(data: dict[str, Any], scripts: Sequence[str], more: Sequence[str] = (), more_style: str = "") -> str:
    """The page as text. Only this very style and script may act in it; whatever else gets in is dead text.

    `scripts`: files from here. `more`, `more_style`: texts of scripts and of a style that come after.
    """
    style = _read("page.css") + more_style
    script = '(() => {\n"use strict";\n' + "\n".join([*map(_read, scripts), *more]) + "})();\n"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    return Template(_read("page.html")).substitute(
        policy=policy, style=style, script=script, data=inert(scrubbed(data))
    )


def inert(data: dict[str, Any]) -> str:
    """As JSON that can stand in HTML: without a character that HTML, or a script, would take for its own."""
    # to_json_line writes ASCII alone, so the line separators that end a script's string are escaped there.
    text = to_json_line(data)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _read(name: str) -> str:
    return (files("shoal.observe.report") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
