"""What goes on behind a save: how much it slows training, how fast it writes and verifies, and what memory it takes."""

import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.bench.checkpoint_stall import GB, ShoalSaves, State, build_state, size_of, synchronize
from shoal.bench.commands import Tell, in_turns
from shoal.checkpoint.folder import shard_name
from shoal.checkpoint.manifest import CheckpointInfo
from shoal.checkpoint.read import verify
from shoal.core.errors import RunError, UserError

MB = 1e6
_STEP_S = 0.015
_LAYERS = 3
_CALIBRATION_STEPS = 10
_BLOCK = "bs=8M"
_PROC = Path("/proc/self")


def measure_memory(folder: Path, num_bytes: int, device: torch.device, saves: int) -> dict[str, Any]:
    """What the process takes before, during and after many saves of one state."""
    state = build_state(num_bytes, device)
    synchronize(device)
    shoal = ShoalSaves(folder, device)
    has_peak = _reset_peak()
    before_mb = _memory_mb("VmRSS")
    after_mb = []
    try:
        for _ in range(saves):
            shoal.save(state)
            shoal.settle()
            after_mb.append(_memory_mb("VmRSS"))
    finally:
        shoal.settle()
    return {
        "saves": saves,
        "state_mb": size_of(state) / MB,
        "before_mb": before_mb,
        "first_mb": after_mb[0],
        "second_mb": after_mb[1],
        "last_mb": after_mb[-1],
        "growth_mb": after_mb[-1] - after_mb[1],
        "peak_extra_mb": _memory_mb("VmHWM") - before_mb if has_peak else None,
    }


def _memory_mb(field: str) -> float:
    lines = (_PROC / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / MB for line in lines if line.startswith(f"{field}:"))


def _reset_peak() -> bool:
    """Have the kernel count the peak from now on; False where it does not let us."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5")
        return True
    return False


def measure_slowdown(
    folder: Path, num_bytes: int, device: torch.device, rounds: int, round_s: float, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """Steps a second while nothing is saved, and while one save follows the other, in turns."""
    state = build_state(num_bytes, device)
    shoal, training = ShoalSaves(folder, device), _Training(device)
    rates: dict[str, list[float]] = {"idle": [], "saving": []}
    try:
        shoal.save(state)  # the first one, which allocates
        shoal.settle()
        for number in range(rounds):
            for name in in_turns(rates, number):
                rates[name].append(_steps_per_s(training, round_s, shoal if name == "saving" else None, state))
            tell(f"background, round {number + 1} of {rounds}, steps/s: {_last(rates)}")
    finally:
        shoal.settle()
    slowdowns = [100 * (1 - saving / idle) for saving, idle in zip(rates["saving"], rates["idle"], strict=True)]
    return {
        "gb": num_bytes / GB,
        "step_ms": 1e3 * training.step_s,
        "saves": len(shoal.told) - 1,
        "steps_per_s": {name: statistics.median(each) for name, each in rates.items()},
        "slowdown_percent": statistics.median(slowdowns),
        "slowdowns_percent": slowdowns,
        "rates": rates,
    }


def _steps_per_s(training: "_Training", round_s: float, shoal: ShoalSaves | None, state: State) -> float:
    """With saves one after the other if there is a saver. What counts is the time that is not spent in `save`."""
    took_s, steps = 0.0, 0
    while took_s < round_s:
        if shoal is not None and not shoal.is_busy:
            shoal.save(state)
        began = time.perf_counter()
        training.step()
        took_s, steps = took_s + time.perf_counter() - began, steps + 1
    if shoal is not None:
        shoal.settle()
    return steps / took_s


def measure_bandwidth(
    folder: Path, num_bytes: int, device: torch.device, rounds: int, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """GB a second of writing a checkpoint and of verifying it, beside `dd` with the same bytes in the same folder."""
    state = build_state(num_bytes, device)
    shoal = ShoalSaves(folder / "shoal", device)
    source, target = folder / "source", folder / "target"
    rates: dict[str, list[float]] = {"shoal": [], "dd": []}
    try:
        shoal.save(state)
        shoal.settle()
        source.hardlink_to(_shard(shoal.newest))  # the checkpoint itself will be deleted, its bytes stay
        for number in range(rounds):
            for name in in_turns(rates, number):
                os.sync()  # what others have left to write
                if name == "shoal":
                    shoal.save(state)
                    shoal.settle()
                    told = shoal.told[-1]
                    rates[name].append(told["bytes"] / GB / max(told["seconds"], 1e-3))  # told in milliseconds
                else:
                    dd(source)  # into the page cache, in case it is no longer there
                    rates[name].append(source.stat().st_size / GB / dd(source, target))
                    target.unlink()
            tell(f"writing, round {number + 1} of {rounds}, GB/s: {_last(rates)}")
        return {
            "gb": num_bytes / GB,
            "write": _beside_dd(rates),
            "verify_cold": _beside_dd(_read_rates(shoal.newest, rounds, is_cold=True, tell=tell)),
            "verify_cached": _beside_dd(_read_rates(shoal.newest, rounds, is_cold=False, tell=tell)),
        }
    finally:
        shoal.settle()


def _read_rates(info: CheckpointInfo, rounds: int, is_cold: bool, tell: Tell) -> dict[str, list[float]]:
    readers: dict[str, Callable[[], object]] = {"shoal": lambda: verify(info), "dd": lambda: dd(_shard(info))}
    rates: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(rounds):
        for name in in_turns(readers, number):
            if is_cold:
                for file_name in info.manifest.files:
                    _drop(info.path / file_name)
            else:
                dd(_shard(info))
            began = time.perf_counter()
            readers[name]()
            rates[name].append(info.num_bytes / GB / (time.perf_counter() - began))
        how = "from the disk" if is_cold else "from memory"
        tell(f"verifying {how}, round {number + 1} of {rounds}, GB/s: {_last(rates)}")
    return rates


def _beside_dd(rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within a round."""
    ratios = [ours / theirs for ours, theirs in zip(rates["shoal"], rates["dd"], strict=True)]
    return {
        "gb_per_s": {name: statistics.median(each) for name, each in rates.items()},
        "ratio": statistics.median(ratios),
        "rates": dict(rates),
        "ratios": ratios,
    }


def dd(source: Path, target: Path | None = None) -> float:
    """Seconds that `dd` takes to copy a file until it is safe on the disk, or only to read it."""
    program = dd_program()
    written = [f"of={target}", "conv=fsync"] if target else ["of=/dev/null"]
    began = time.perf_counter()
    result = subprocess.run([program, f"if={source}", *written, _BLOCK], capture_output=True, text=True)  # noqa: S603, PLW1510 - looked at below
    took_s = time.perf_counter() - began
    if result.returncode:
        raise RunError(f"dd ended with status {result.returncode}: {result.stderr.strip()}")
    return took_s


def dd_program() -> str:
    """Where it is."""
    if found := shutil.which("dd"):
        return found
    raise UserError("bench checkpoint: compares with the program dd, which is not installed here; install coreutils")


def _drop(path: Path) -> None:
    """Have the kernel forget a file's content, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _shard(info: CheckpointInfo) -> Path:
    return info.path / shard_name(0)


def _last(rates: Mapping[str, list[float]]) -> str:
    return ", ".join(f"{name} {each[-1]:.2f}" for name, each in rates.items())


class _Training:
    """A few large matrix products forward and backward and an optimizer's step, about 15 ms on whatever machine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.width = 4096 if device.type == "cuda" else 512
        self.model = nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(_LAYERS))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.batch = torch.rand(self.width // 2, self.width, device=device)
        rows = self.batch.shape[0] * _STEP_S / self._time_step()
        self.batch = torch.rand(max(1, round(rows)), self.width, device=device)
        self.step_s = self._time_step()

    def _time_step(self) -> float:
        self.step()
        began = time.perf_counter()
        for _ in range(_CALIBRATION_STEPS):
            self.step()
        return (time.perf_counter() - began) / _CALIBRATION_STEPS

    def step(self) -> None:
        """Ends when the device has ended: a queue of steps would hide what holds up the one who fills it."""
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize(self.device)
