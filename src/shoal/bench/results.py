"""Keeping what a benchmark measured: JSON with the machine it ran on, and a plot where matplotlib is installed."""

import json
import platform
import time
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import UserError
from shoal.core.version import VERSION


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "shoal": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "platform": platform.platform(),
    }


def keep(
    folder: Path,
    name: str,
    result: dict[str, Any],
    bars: dict[str, float],
    unit: str,
    ideal: dict[str, float] | None = None,
) -> list[Path]:
    """Write NAME-DATE.json, and NAME-DATE.png with one bar an entry; returns what was written.

    `ideal`: how long bars of these names would be at best, as an outline.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder} cannot be written: {error.strerror}") from error
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    written = [folder / f"{stem}.json"]
    record = {"benchmark": name, "machine": machine(), **result}
    written[0].write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return written
    figure = Figure(figsize=(6, 0.6 + 0.5 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh(list(bars), list(bars.values()))
    if ideal:
        axes.barh(list(ideal), list(ideal.values()), fill=False, linestyle="--", label="ideal")
        axes.legend()
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    written.append(folder / f"{stem}.png")
    figure.savefig(written[-1], dpi=120)
    return written
