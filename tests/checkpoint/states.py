"""Small states to save, and saving them whole."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.folder import read_info, step_name
from shoal.checkpoint.manifest import CheckpointInfo
from shoal.checkpoint.read import Content, read_content, verify
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.write import Snapshot
from shoal.core.parts import FlatPart
from shoal.core.process import Process

CPU = torch.device("cpu")
ALONE = Process(0, 1, CPU)


def tensors_of(value: float) -> dict[str, torch.Tensor]:
    """A tensor of every kind that makes a difference."""
    return {
        "model.weight": torch.arange(30_000.0).reshape(300, 100) + value,
        "model.turned": torch.arange(6.0).reshape(2, 3).t() * value,  # not contiguous
        "model.empty": torch.zeros(0, 3),
        "model.ids": torch.tensor([1, 2, int(value)], dtype=torch.int64),
        "model.half": torch.full((3,), value, dtype=torch.bfloat16),
        "model.mask": torch.tensor([True, False]),
        "optim.weight.exp_avg": torch.full((300, 100), value / 3),
        "optim.weight.step": torch.tensor(value),
    }


def snapshot(step: int, value: float | None = None, rank: int = 0, **fields: Any) -> Snapshot:
    """What a worker has at a step; by default everything follows from the step."""
    value = float(step) if value is None else value
    known: dict[str, Any] = {
        "epoch": step // 10,
        "metrics": {"val_loss": value},
        "tensors": tensors_of(value),
        "values": {"train": {"step": step}, "floats": [0.1, 1e-300, 3.0000000000000004]},
        "own": {"rank": rank, "value": value},
    }
    return Snapshot(step, **known | fields)


def save(folder: Path, *steps: int, process: Process = ALONE, **settings: Any) -> CheckpointInfo:
    """Save these steps one after the other; the last of them."""
    saver = Saver(folder, CheckpointSection(**{"keep_last": 100} | settings), process, recipe="name: x\n")
    for step in steps:
        saver.save(snapshot(step, rank=process.rank))
    saver.finish()
    return read_info(folder / step_name(steps[-1]))


def save_tensors(
    folder: Path, tensors: Mapping[str, torch.Tensor], step: int = 1, process: Process = ALONE
) -> CheckpointInfo:
    """One more checkpoint, of these tensors; every worker of a group must call this."""
    saver = Saver(folder, CheckpointSection(keep_last=100), process, recipe="name: saved\n")
    saver.save(Snapshot(step, 0, {"val_loss": 1.0 / step}, tensors, {"unit": {}}, {"rank": process.rank}))
    saver.finish()
    return read_info(folder / step_name(step))


def read(info: CheckpointInfo) -> Content:
    """All of a checkpoint, every byte of it verified."""
    verify(info)
    return read_content(info)


def check(content: Content, step: int, world_size: int = 1) -> None:
    """That it is exactly the state of its step."""
    assert content.values == dict(snapshot(step).values)
    assert content.workers == [{"rank": rank, "value": float(step)} for rank in range(world_size)]
    expected = tensors_of(float(step))
    assert content.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        found = content.tensors[name]
        assert torch.equal(found, tensor) and (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name


def cut_flat(whole: torch.Tensor, cuts: Sequence[int]) -> list[FlatPart]:
    """A tensor laid out flat and cut there: one stretch more than there are cuts, some of them perhaps empty."""
    edges = [0, *sorted(min(cut, whole.numel()) for cut in cuts), whole.numel()]
    flat, shape = whole.reshape(-1), tuple(whole.shape)
    return [FlatPart(flat[start:end], start, shape) for start, end in itertools.pairwise(edges)]
