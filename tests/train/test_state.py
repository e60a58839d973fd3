"""Early stopping, and what survives, with any number of workers."""

import json
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.checkpoint.store import save_checkpoint
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.core.rng import seed_all
from shoal.parallel.build import build_unit
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.recipe.schema import EarlyStopSection
from shoal.train.state import Identity, TrainState, note_evaluation, restore_newest, should_stop_early, take_snapshot
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]
ALONE = Process(0, 1, CPU)
IDENTITY = Identity(train_samples=9, fixed={"task": "x"})
OBJECTIVE = Objective(lambda model, batch: model(batch).mean(), lambda model, batch, num_samples: {})


def stops_at(values, **fields):
    early_stop = EarlyStopSection(**fields)
    state = TrainState()
    for number, value in enumerate(values):
        state.metrics[early_stop.metric] = value
        note_evaluation(state, early_stop)
        if should_stop_early(state, early_stop):
            return number
    return None


@pytest.mark.parametrize(
    ("values", "fields", "expected"),
    [
        ([3, 2, 1, 0.5], {"patience": 1}, None),
        ([3, 2, 2.5, 2.1, 1], {"patience": 2}, 3),
        ([3, 2, 2.5, 1, 1.5, 1.2], {"patience": 2}, 5),
        ([0.1, 0.2, 0.15, 0.3], {"patience": 1, "metric": "val_accuracy"}, 2),
        ([0.1, 0.2, 0.3], {"patience": 1, "metric": "val_accuracy", "mode": "min"}, 1),
        ([3, 2.95, 2.9], {"patience": 2, "min_delta": 0.2}, 2),
        ([float("nan"), 1.0], {"patience": 1}, None),
        ([1.0, float("nan"), 0.5], {"patience": 1}, 1),
    ],
)
def test_stops_once_patience_is_spent(values, fields, expected):
    assert stops_at(values, **fields) == expected


def test_without_a_section_nothing_stops():
    state = TrainState()
    note_evaluation(state, None)
    assert not should_stop_early(state, None)


def test_the_state_survives_json_exactly():
    state = TrainState(step=3, metrics={"val_loss": 0.1 + 0.2}, best=1e-17, window_loss=1 / 3, samples=99)
    assert TrainState.from_values(json.loads(json.dumps(state.to_values()))) == state


@dataclass(frozen=True)
class Restored:
    """What a worker goes on with."""

    state: TrainState
    draws: list[float]
    weights: list[float]
    told: list[dict[str, Any]]


def unit_of(process: Process, seed: int) -> TrainUnit:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return build_unit(ParallelSection(), model, OBJECTIVE, StepSettings(optim=OptimSection()), process)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def save(process: Process, folder: Path, step: int) -> list[float]:
    """Save as a run would; what each worker would draw next."""
    unit = unit_of(process, seed=step)
    seed_all(100 * step + process.rank)
    state = TrainState(step=step, window_loss=0.25 + process.rank, window_count=4 + process.rank, samples=9)
    snapshot = take_snapshot(unit, state, process, IDENTITY)
    if process.is_first:
        save_checkpoint(folder, snapshot, step=step, epoch=0, metrics={})
    process.group.sum(1)  # nobody reads before it is written
    return draw()


def restore(process: Process, folders: list[Path], seed: int = 7) -> Restored:
    unit = unit_of(process, seed=1000)
    folder = folders[process.rank % len(folders)]
    state, _, told = restore_newest(folder, unit, process, IDENTITY, seed)
    draws = draw()
    return Restored(state, draws, [float(t.double().sum()) for t in unit.state().tensors.values()], told)


def refusal(process: Process, folders: list[Path]) -> str | None:
    try:
        restore(process, folders)
    except UserError as error:
        return str(error)
    return None


def test_as_many_workers_go_on_with_their_own_generators_and_losses(ranks: MakeRanks, tmp_path: Path) -> None:
    would_draw = ranks(2)(save, tmp_path, 3)
    found = ranks(2)(restore, [tmp_path])
    assert [worker.draws for worker in found] == would_draw and would_draw[0] != would_draw[1]
    assert [(worker.state.window_loss, worker.state.window_count) for worker in found] == [(0.25, 4), (1.25, 5)]
    assert found[0].weights == found[1].weights


def test_another_number_of_workers_begins_new_generators_the_same_ones_every_time(
    ranks: MakeRanks, tmp_path: Path
) -> None:
    would_draw = ranks(2)(save, tmp_path, 3)
    by_two = ranks(2)(restore, [tmp_path])
    by_one = [restore(ALONE, [tmp_path])]
    by_three = ranks(3)(restore, [tmp_path])
    for found in (by_one, by_three):
        assert sum(worker.state.window_loss for worker in found) == 1.5
        assert sum(worker.state.window_count for worker in found) == 9
        assert all(worker.state.step == 3 and worker.state.samples == 9 for worker in found)
        assert all(worker.weights == by_two[0].weights for worker in found)
    assert restore(ALONE, [tmp_path]) == by_one[0] and ranks(3)(restore, [tmp_path]) == by_three
    draws = [worker.draws for worker in by_one + by_three] + would_draw
    draws.append(restore(ALONE, [tmp_path], seed=8).draws)
    assert len({value for numbers in draws for value in numbers}) == 3 * len(draws), "all of them different"


def test_two_then_one_then_three_keep_the_loss_since_the_last_report(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path / "two", 3)
    alone = restore(ALONE, [tmp_path / "two"])
    unit = unit_of(ALONE, seed=3)
    save_checkpoint(tmp_path / "one", take_snapshot(unit, alone.state, ALONE, IDENTITY), step=3, epoch=0, metrics={})
    found = ranks(3)(restore, [tmp_path / "one"])
    assert [(worker.state.window_loss, worker.state.window_count) for worker in found] == [(1.5, 9), (0, 0), (0, 0)]


def test_a_checkpoint_that_another_worker_does_not_see_names_the_machine(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path / "shared", 3)
    seen, unseen = ranks(2)(refusal, [tmp_path / "shared", tmp_path / "own"])
    assert seen is None, "the launcher ends it"
    assert unseen.startswith(f"--run-dir: {tmp_path / 'own'} on {socket.gethostname()} has no checkpoint of step 3")
    assert "storage that every machine shares" in unseen


def test_a_checkpoint_that_is_broken_for_another_worker_alone_is_told(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path / "good", 3)
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    (tmp_path / "bad" / "step-00000003" / "tensors.safetensors").write_bytes(b"")
    seen, broken = ranks(2)(refusal, [tmp_path / "good", tmp_path / "bad"])
    assert seen is None and broken.startswith("--resume: ") and f"cannot be read on {socket.gethostname()}" in broken


def test_all_workers_go_on_from_the_one_that_the_first_can_read(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path, 3)
    ranks(2)(save, tmp_path, 6)
    (tmp_path / "step-00000006" / "state.json").write_text("{}")
    first, second = ranks(2)(restore, [tmp_path])
    assert first.state.step == second.state.step == 3 and first.weights == second.weights
    assert [told["step"] for told in first.told] == [6] and second.told == []
    assert not (tmp_path / "step-00000006").exists()


def test_what_keeps_the_first_from_resuming_is_told_by_all(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path, 3)
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    messages = ranks(2)(refusal, [tmp_path])
    assert messages[0] == messages[1] and messages[0].startswith("--resume: none of the 1 checkpoints")
