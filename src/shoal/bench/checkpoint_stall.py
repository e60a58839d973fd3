"""How long a save holds up a training step: Shoal's beside `torch.save` in line and torch's own `async_save`, in turns.

What is timed is the call, from a device that is idle until training could go on. Nobody's background writing goes on
meanwhile: each is waited for, outside of the timing, before the next one's turn.
"""

import math
import os
import shutil
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

from shoal.bench.commands import Tell, in_turns
from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.manifest import CheckpointInfo
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.write import Snapshot
from shoal.core.group import Meeting, joined
from shoal.core.process import Process

GB = 1e9
State = Mapping[str, torch.Tensor]
_PARTS = {"large": (4, 0.5), "medium": (48, 0.48), "small": (192, 0.02)}
"""How many tensors there are of each kind, and which part of the weights they make up."""
_KINDS = ("model", "optim.exp_avg", "optim.exp_avg_sq")
_BYTES_PER_WEIGHT = 4 * len(_KINDS)
_TIMEOUT_S = 600.0


def measure_stall(
    folder: Path, num_bytes: int, device: torch.device, rounds: int, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """Seconds that a save of a state of this size holds up training; the first of each, which allocates, by itself."""
    state = build_state(num_bytes, device)
    contenders: dict[str, Contender] = {
        "shoal": ShoalSaves(folder / "shoal", device),
        "torch.save": TorchSaves(folder / "torch_save"),
        "async_save": AsyncSaves(folder / "async_save"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    # What async_save demands: a group with a part for the CPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    with joined(Meeting(0, 1, "127.0.0.1", 0, _TIMEOUT_S), device, backend):
        try:
            first_s = {name: _held_up_s(contender, state, device) for name, contender in contenders.items()}
            for number in range(rounds):
                for name in in_turns(contenders, number):
                    seconds[name].append(_held_up_s(contenders[name], state, device))
                took = ", ".join(f"{name} {times[-1]:.3f} s" for name, times in seconds.items())
                tell(f"stall, {num_bytes / GB:g} GB, round {number + 1} of {rounds}: {took}")
        finally:
            for contender in contenders.values():
                contender.settle()
    return {"gb": num_bytes / GB, "bytes": size_of(state), "tensors": len(state)} | stall_row(first_s, seconds)


def stall_row(first_s: Mapping[str, float], seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within a round."""
    ratios = {
        name: [ours / theirs for ours, theirs in zip(seconds["shoal"], times, strict=True)]
        for name, times in seconds.items()
        if name != "shoal"
    }
    return {
        "first_s": dict(first_s),
        "stall_s": {name: statistics.median(times) for name, times in seconds.items()},
        "ratio": {name: statistics.median(each) for name, each in ratios.items()},
        "seconds": dict(seconds),
        "ratios": ratios,
    }


def _held_up_s(contender: "Contender", state: State, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    contender.save(state)
    took_s = time.perf_counter() - began
    contender.settle()
    return took_s


def build_state(num_bytes: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What a model of this size has to save: weights and Adam's two moments in fp32, in tensors of all sizes.

    Random, so that no file system can make it smaller.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = _shapes(num_bytes // _BYTES_PER_WEIGHT)
    return {
        f"{kind}.{name}": torch.rand(shape, generator=generator, device=device)
        for kind in _KINDS
        for name, shape in shapes.items()
    }


def _shapes(num_weights: int) -> dict[str, tuple[int, ...]]:
    """Matrices that are about square, and vectors; a little less than asked for, since no side is a fraction."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part, (count, share) in _PARTS.items():
        each = int(num_weights * share / count)
        side = math.isqrt(each)
        shapes |= {f"{part}.{index}": (each,) if part == "small" else (each // side, side) for index in range(count)}
    return shapes


def size_of(state: State) -> int:
    """Its bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def synchronize(device: torch.device) -> None:
    """Wait until the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Contender(Protocol):
    """One way to save a state, again and again."""

    def save(self, state: State) -> None:
        """What a training loop would call; when it returns, training goes on."""
        ...

    def settle(self) -> None:
        """Wait until all is on the disk, and keep only the newest."""
        ...


class ShoalSaves:
    """As a run of Shoal saves, with every check that it makes."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.told: list[dict[str, Any]] = []
        """What became of the saves, oldest first."""
        # Whatever fails here, nobody mends it while we wait.
        settings = CheckpointSection(keep_last=1, give_up_after_s=0)
        self.saver = Saver(folder, settings, Process(0, 1, device), tell=self._on_event)
        self._step = 0

    def _on_event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "save":
            self.told.append(fields)

    @property
    def is_busy(self) -> bool:
        """Whether a save has not been committed yet."""
        return len(self.told) < self._step

    @property
    def newest(self) -> CheckpointInfo:
        """The last checkpoint."""
        return list_checkpoints(self.folder)[-1]

    def save(self, state: State) -> None:
        """Copy the state; the rest goes on in the background."""
        self._step += 1
        self.saver.save(Snapshot(self._step, 0, {}, state, {}, {}, finite=frozenset(state)))

    def settle(self) -> None:
        """Wait for the background."""
        self.saver.finish()


class TorchSaves:
    """`torch.save` in the thread that trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: Path | None = None
        folder.mkdir(parents=True)

    def save(self, state: State) -> None:
        """Write the state; as everybody does it, without waiting for the disk."""
        self.newest = self.folder / f"{time.time_ns()}.pt"
        torch.save(dict(state), self.newest)

    def settle(self) -> None:
        """Wait for the disk: what is still to be written would be in the others' way."""
        for path in self.folder.iterdir():
            if path != self.newest:
                path.unlink()
        if self.newest is not None and self.newest.exists():
            with self.newest.open("rb") as file:
                os.fsync(file.fileno())


class AsyncSaves:
    """`torch.distributed.checkpoint.async_save` as it is by default: copied in line, written by a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest: Path | None = None
        self._written: Future[Any] | None = None
        folder.mkdir(parents=True)

    def save(self, state: State) -> None:
        """Copy the state; the rest goes on in the background."""
        self.newest = self.folder / str(time.time_ns())
        written = async_save(dict(state), checkpoint_id=self.newest)
        assert isinstance(written, Future)
        self._written = written

    def settle(self) -> None:
        """Wait for the thread."""
        written, self._written = self._written, None
        if written is not None:
            written.result()
        for path in self.folder.iterdir():
            if path != self.newest:
                shutil.rmtree(path)
