"""What checkpoints cost: how long a save holds up training, what its background takes, how fast it writes and verifies.

Everything is measured in one process beside what one would do without Shoal, in turns, round after round; ratios are
taken within a round, and the median over the rounds is told.
"""

import contextlib
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.bench.checkpoint_background import dd_program, measure_bandwidth, measure_memory, measure_slowdown
from shoal.bench.checkpoint_stall import GB, measure_stall
from shoal.bench.commands import Tell
from shoal.core.errors import UserError

SIZES_GB = (0.1, 0.5, 2.0)
_SMALLEST_GB = 0.001
_ROOM = 4
"""How often the largest state is on the disk at most: two of ours and one of each peer's, or what `dd` copies."""
_SLACK_MB = 16.0
"""What a save may take besides a copy of the state, whatever its size: a few threads and chunks."""
_GROWTH_MB = 4.0
_REMOVE_WITHIN_S = 10.0


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    sizes_gb: tuple[float, ...] = SIZES_GB
    rounds: int = 5
    saves: int = 100
    """Of the smallest state, for what memory they take."""
    round_s: float = 3.0
    """How long a round of training lasts."""


@dataclass(frozen=True)
class Figure:
    """Something measured, and what it should be."""

    name: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None
    beside: str = ""
    """What it is compared with, in words."""

    @property
    def is_met(self) -> bool | None:
        """Whether it is as it should be; None where nothing is promised."""
        if self.most is not None:
            return self.value <= self.most
        return self.value >= self.least if self.least is not None else None

    def to_record(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self) | {"is_met": self.is_met}

    def to_row(self) -> list[str]:
        """For people."""
        goal = f"at most {self.most:.3g}" if self.most is not None else ""
        goal = f"at least {self.least:.3g}" if self.least is not None else goal
        verdict = {True: "met", False: "missed", None: ""}[self.is_met]
        return [self.name, f"{self.value:.3f}{self.unit}", self.beside, goal and f"{goal}{self.unit}", verdict]


def parse_sizes(text: str) -> tuple[float, ...]:
    """`0.1,0.5,2` in GB, smallest first."""
    sizes = set()
    for word in text.split(","):
        try:
            size = float(word)
        except ValueError:
            size = math.nan
        if not _SMALLEST_GB <= size < math.inf:
            raise UserError(f"--sizes: {word!r} is not a size in GB of at least {_SMALLEST_GB}; write 0.1,0.5,2")
        sizes.add(size)
    return tuple(sorted(sizes))


def measure(
    settings: Settings, device: torch.device, folder: Path | None = None, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """All of it. What is written goes into a folder in `folder`, or where temporary files go, that is removed."""
    parent = folder or Path(tempfile.gettempdir())
    check_room(parent, settings.sizes_gb[-1])
    dd_program()
    sizes = [round(size * GB) for size in settings.sizes_gb]
    smallest, middle, largest = sizes[0], sizes[len(sizes) // 2], sizes[-1]
    with _temporary_folder(parent) as place:
        # First, while the process has not yet kept memory that a save could make use of.
        memory = measure_memory(place / "memory", smallest, device, settings.saves)
        tell(f"memory: {memory['growth_mb']:+.1f} MB over {settings.saves} saves")
        shutil.rmtree(place / "memory")
        stalls = []
        for size in sizes:
            stalls.append(measure_stall(place / "stall", size, device, settings.rounds, tell))
            shutil.rmtree(place / "stall")
        slowdown = measure_slowdown(place / "slowdown", middle, device, settings.rounds, settings.round_s, tell)
        shutil.rmtree(place / "slowdown")
        bandwidth = measure_bandwidth(place / "bandwidth", largest, device, settings.rounds, tell)
    result = {
        "device": device.type,
        "sizes_gb": list(settings.sizes_gb),
        "rounds": settings.rounds,
        "stall": stalls,
        "background": slowdown,
        "bandwidth": bandwidth,
        "memory": memory,
    }
    return result | {"figures": [figure.to_record() for figure in figures(result)]}


@contextlib.contextmanager
def _temporary_folder(parent: Path) -> Iterator[Path]:
    """Removed at the end, whatever a thread that was cut off may still be writing there."""
    place = Path(tempfile.mkdtemp(prefix="shoal-bench-", dir=parent))
    try:
        yield place
    finally:
        deadline = time.monotonic() + _REMOVE_WITHIN_S
        while place.exists() and time.monotonic() < deadline:
            shutil.rmtree(place, ignore_errors=True)
            time.sleep(0.05)


def check_room(folder: Path, largest_gb: float) -> None:
    """Refuse before anything is written."""
    needed = _ROOM * largest_gb
    try:
        free = shutil.disk_usage(folder).free / GB
    except OSError as error:
        raise UserError(f"--dir: {folder} cannot be used: {error.strerror}; name a folder that exists") from error
    if not folder.is_dir():
        raise UserError(f"--dir: {folder} is not a folder; name one on the disk that is to be measured")
    if free < needed:
        raise UserError(
            f"--dir: {folder} has {free:.1f} GB free, and {largest_gb:g} GB of state need {needed:.1f} GB; "
            "give smaller --sizes or a --dir with more room"
        )


def figures(result: Mapping[str, Any]) -> list[Figure]:
    """What is promised beside what was measured."""
    is_gpu = result["device"] == "cuda"
    found = []
    for row in result["stall"]:
        for peer, most in {"torch.save": 0.05 if is_gpu else 0.25, "async_save": 1.0}.items():
            found.append(Figure(f"stall, {row['gb']:g} GB: shoal / {peer}", row["ratio"][peer], most=most))
    background, bandwidth, memory = result["background"], result["bandwidth"], result["memory"]
    name = f"steps while {background['gb']:g} GB are saved: slower by"
    # On the CPU, who writes takes a core from those who train.
    found.append(Figure(name, background["slowdown_percent"], "%", most=3.0 if is_gpu else None))
    write = bandwidth["write"]
    beside = f"{write['gb_per_s']['shoal']:.2f} / {write['gb_per_s']['dd']:.2f} GB/s"
    found.append(Figure(f"writing {bandwidth['gb']:g} GB: shoal / dd", write["ratio"], least=0.8, beside=beside))
    for how, row in {"from the disk": bandwidth["verify_cold"], "from memory": bandwidth["verify_cached"]}.items():
        rates = row["gb_per_s"]
        # What the disk does not give to dd, nobody reads.
        least = min(1.0, 0.8 * rates["dd"])
        found.append(Figure(f"verifying {how}", rates["shoal"], " GB/s", least=least, beside=f"dd {rates['dd']:.2f}"))
    name = f"memory: growth from save 2 to {memory['saves']}"
    found.append(Figure(name, memory["growth_mb"], " MB", most=_GROWTH_MB))
    if (peak := memory["peak_extra_mb"]) is not None:
        state_mb = memory["state_mb"]
        name, beside = "memory: most besides the state", f"state {state_mb:.0f} MB"
        found.append(Figure(name, peak, " MB", most=state_mb + _SLACK_MB, beside=beside))
    return found


def stall_table(result: Mapping[str, Any]) -> list[list[str]]:
    """Seconds that saves hold up training as rows of text, headed."""
    names = list(result["stall"][0]["stall_s"])
    lines = [["held up by a save, in seconds", *names]]
    for row in result["stall"]:
        lines.append([f"{row['gb']:g} GB", *(f"{row['stall_s'][name]:.4f}" for name in names)])
        lines.append([f"{row['gb']:g} GB, the first time", *(f"{row['first_s'][name]:.4f}" for name in names)])
    return lines


def figure_table(result: Mapping[str, Any]) -> list[list[str]]:
    """What is promised as rows of text, headed."""
    return [["", "measured", "", "goal", ""], *(figure.to_row() for figure in figures(result))]
