"""Saved by N workers, read by M: the same tensors to the last bit, and the same losses after them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.data.order import Order
from shoal.parallel.build import build_unit
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.train.restore import restore_newest
from shoal.train.save import Checkpoints
from shoal.train.state import Identity, TrainState
from tests.many import Ranks

MakeRanks = Callable[[int], Ranks]
IDENTITY = Identity(train_samples=12, fixed={})
BATCH = 12
"""Divisible by 1, 2, 3 and 4."""


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@dataclass(frozen=True)
class Went:
    """How a worker went on."""

    state: TrainState
    tensors: str
    """A hash over all of them."""
    losses: list[float]
    """Of the whole step, over all workers."""


def unit_of(process: Process, seed: int) -> TrainUnit:
    torch.manual_seed(seed)
    settings = StepSettings(optim=OptimSection(name="adamw", lr=1e-2), clip_norm=1.0)
    layers = [nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 200), nn.ReLU(), nn.Linear(200, 4)]
    model = nn.Sequential(nn.Flatten(), *layers)
    return build_unit(ParallelSection(), model, Objective(loss, lambda *_: {}), settings, process)


def train(process: Process, unit: TrainUnit, state: TrainState, steps: int) -> list[float]:
    losses = []
    share = BATCH // process.world_size
    for _ in range(steps):
        generator = torch.Generator().manual_seed(state.step)
        images, labels = torch.randn(BATCH, 1, 8, 8, generator=generator), torch.arange(BATCH) % 4
        own = slice(process.rank * share, (process.rank + 1) * share)
        step_loss = unit.forward_backward(StepBatch([MicroBatch((images[own], labels[own]), share)], BATCH))
        unit.optimizer_step(1e-2)
        state.step += 1
        total = sum(float(value) * weight for value, weight in step_loss.terms)
        losses.append(process.group.sum(total)[0] / BATCH)
    return losses


def hash_of(unit: TrainUnit) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(unit.state().tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def begin(process: Process, folder: Path) -> Went:
    """Train four steps, save, and train on while it is written."""
    unit, state = unit_of(process, seed=1), TrainState()
    train(process, unit, state, 4)
    tensors = hash_of(unit)
    checkpoints = Checkpoints(
        Saver(folder, CheckpointSection(), process), unit, state, process, IDENTITY, Order(BATCH, BATCH, 0)
    )
    checkpoints.save()
    losses = train(process, unit, state, 4)
    checkpoints.finish("done")
    return Went(state, tensors, losses)


def go_on(process: Process, folder: Path) -> Went:
    """Go on from there."""
    unit = unit_of(process, seed=100 + process.rank)
    state = restore_newest(folder, unit, process, IDENTITY, seed=0).state
    tensors = hash_of(unit)
    return Went(state, tensors, train(process, unit, state, 4))


@pytest.mark.parametrize("writers", [1, *(pytest.param(more, marks=pytest.mark.slow) for more in (2, 3)), 4])
def test_n_to_m(ranks: MakeRanks, tmp_path: Path, writers: int) -> None:
    began = ranks(writers)(begin, tmp_path)
    assert len(list(tmp_path.glob("step-00000004/shard-*.safetensors"))) == writers
    assert len({went.tensors for went in began}) == 1
    for readers in (1, 2, 3, 4):
        for went in ranks(readers)(go_on, tmp_path):
            assert went.tensors == began[0].tensors, f"{writers} -> {readers}"
            assert went.state.step == 8
            if readers == writers:
                assert went.losses == began[0].losses, "to the last bit"
            else:
                assert went.losses == pytest.approx(began[0].losses, abs=2e-6), "but for the order of sums"
