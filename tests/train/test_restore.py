"""Going on from the newest checkpoint that is whole, with any number of workers, whatever was done to the others."""

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

from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.core.remote import Access, Remote
from shoal.core.rng import seed_all
from shoal.data.order import Order
from shoal.parallel.build import build_unit
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.train.restore import restore_newest
from shoal.train.save import Checkpoints, take_snapshot
from shoal.train.state import Identity, TrainState
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]
ALONE = Process(0, 1, CPU)
IDENTITY = Identity(train_samples=9, fixed={"task": "x"})
OBJECTIVE = Objective(lambda model, batch: model(batch).mean(), lambda model, batch, num_samples: {})


@dataclass(frozen=True)
class Found:
    """What a worker goes on with."""

    state: TrainState
    draws: list[float]
    weights: list[float]
    told: list[tuple[str, dict[str, Any]]]


def unit_of(process: Process, seed: int) -> TrainUnit:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    unit = build_unit(ParallelSection(), model, OBJECTIVE, StepSettings(optim=OptimSection()), process)
    unit.model[1].running_mean.fill_(process.rank)  # as the statistics of each worker's own samples are
    return unit


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def save_state(process: Process, folder: Path, unit: TrainUnit, state: TrainState, **settings: Any) -> None:
    saver = Saver(folder, CheckpointSection(**{"keep_last": 9} | settings), process, recipe="name: x\n")
    checkpoints = Checkpoints(saver, unit, state, process, IDENTITY, Order(9, 3, 0))
    checkpoints.save()
    checkpoints.finish("done")


def save(process: Process, folder: Path, step: int, **settings: Any) -> list[float]:
    """Save as a run would; what each worker would draw next."""
    unit = unit_of(process, seed=step)
    seed_all(100 * step + process.rank)
    state = TrainState(step=step, window_loss=0.25 + process.rank, window_count=4 + process.rank, samples=9)
    save_state(process, folder, unit, state, **settings)
    return draw()


def restore(process: Process, folders: list[Path], seed: int = 7, remote: Remote | None = None) -> Found:
    unit = unit_of(process, seed=1000)
    folder = folders[process.rank % len(folders)]
    found = restore_newest(folder, unit, process, IDENTITY, seed, remote)
    weights = [float(tensor.double().sum()) for _, tensor in sorted(unit.state().tensors.items())]
    return Found(found.state, draw(), weights, found.told)


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
    assert found[0].weights == found[1].weights, "the statistics of batch norm are those of rank 0"


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
    save_state(ALONE, tmp_path / "one", unit_of(ALONE, seed=3), alone.state)
    found = ranks(3)(restore, [tmp_path / "one"])
    assert [(worker.state.window_loss, worker.state.window_count) for worker in found] == [(1.5, 9), (0, 0), (0, 0)]


def test_a_checkpoint_that_another_worker_does_not_see_names_the_machine(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path / "shared", 3)
    seen, unseen = ranks(2)(refusal, [tmp_path / "shared", tmp_path / "own"])
    assert seen == unseen, "told by all"
    assert seen.startswith(f"--run-dir: {tmp_path / 'own'} on {socket.gethostname()} has no checkpoint of step 3")
    assert "storage that every machine shares" in seen


def test_a_file_that_is_broken_for_one_worker_alone_is_broken_for_all(ranks: MakeRanks, tmp_path: Path) -> None:
    for step in (3, 6):
        ranks(2)(save, tmp_path / "good", step)
    shutil.copytree(tmp_path / "good", tmp_path / "bad")
    for path in (tmp_path / "bad" / "step-00000006").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    first, second = ranks(2)(restore, [tmp_path / "good", tmp_path / "bad"])
    assert first.state.step == second.state.step == 3 and [name for name, _ in first.told] == ["checkpoint_rejected"]


def test_all_workers_go_on_from_the_one_that_is_whole(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path, 3)
    ranks(2)(save, tmp_path, 6)
    (tmp_path / "step-00000006" / "state.json").write_text("{}")
    first, second = ranks(2)(restore, [tmp_path])
    assert first.state.step == second.state.step == 3 and first.weights == second.weights
    assert [fields["step"] for _, fields in first.told] == [6] and second.told == []
    assert not (tmp_path / "step-00000006").exists()


def test_what_keeps_the_first_from_resuming_is_told_by_all(ranks: MakeRanks, tmp_path: Path) -> None:
    ranks(2)(save, tmp_path, 3)
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    messages = ranks(2)(refusal, [tmp_path])
    assert messages[0] == messages[1] and messages[0].startswith("--resume: none of the checkpoints in")
    assert (tmp_path / "step-00000003").is_dir(), "nothing is touched"


def test_weights_and_moments_must_be_finite_and_buffers_need_not() -> None:
    unit = unit_of(ALONE, seed=1)
    unit.model(torch.ones(4, 2)).sum().backward()
    unit.optimizer_step(0.1)
    taken = take_snapshot(unit, TrainState(), ALONE, IDENTITY, Order(9, 3, 0))
    assert taken.finite == taken.tensors.keys() - taken.of_first
    assert {"optim.0.weight.exp_avg", "model.0.weight"} <= taken.finite
    assert taken.of_first == {"model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked"}


def test_a_run_without_checkpoints_begins_anew(tmp_path: Path) -> None:
    found = restore(ALONE, [tmp_path / "none"])
    assert found.state == TrainState() and found.told == []


@pytest.mark.parametrize("changed", [Identity(10, {"task": "x"}), Identity(9, {"task": "y"})])
def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_touched(tmp_path: Path, changed: Identity) -> None:
    for step in (3, 6):
        save(ALONE, tmp_path, step)
    (tmp_path / "step-00000006" / "state.json").write_text("{}")
    with pytest.raises(UserError, match=r"when step 3 was saved"):
        restore_newest(tmp_path, unit_of(ALONE, 1), ALONE, changed, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006"]


def damage(newest: Path, before: Path, draw_from: random.Random) -> str:
    """Do something to one file of a checkpoint; what, in words."""
    while True:
        path = draw_from.choice(sorted(newest.iterdir()))
        content = path.read_bytes()
        kind = draw_from.choice(["flip", "truncate", "delete", "swap", "swap within", "empty", "append", "zero"])
        place = draw_from.randrange(len(content))
        changed: bytes | None
        if kind == "flip":
            changed = content[:place] + bytes([content[place] ^ 1 << draw_from.randrange(8)]) + content[place + 1 :]
        elif kind == "truncate":
            changed = content[:place]
        elif kind == "swap":  # for the file of another checkpoint
            changed = (before / path.name).read_bytes()
        elif kind == "swap within":  # two files of the checkpoint
            other = draw_from.choice(sorted(newest.iterdir()))
            changed = other.read_bytes()
            if changed != content:
                other.write_bytes(content)
        elif kind == "zero":  # as a file system does with blocks that it has lost
            changed = content[:place] + bytes(min(len(content) - place, 512)) + content[place + 512 :]
        else:
            changed = {"delete": None, "empty": b"", "append": content + b"\0"}[kind]
        if changed is None:
            path.unlink()
        elif changed != content:
            path.write_bytes(changed)
        else:
            continue  # that was no damage
        return f"{kind} of {path.name} at {place}"


def test_whatever_is_done_to_the_newest_the_run_goes_on_from_the_one_before(ranks: MakeRanks, tmp_path: Path) -> None:
    for step in (3, 6):
        ranks(2)(save, tmp_path / "whole", step)
    shutil.copytree(tmp_path / "whole", tmp_path / "older")
    shutil.rmtree(tmp_path / "older" / "step-00000006")
    expected = restore(ALONE, [tmp_path / "older"])
    draw_from = random.Random(4)
    for case in range(320):
        folder = tmp_path / "case"
        shutil.copytree(tmp_path / "whole", folder)
        what = damage(folder / "step-00000006", folder / "step-00000003", draw_from)
        found = restore(ALONE, [folder])
        assert (found.state, found.weights) == (expected.state, expected.weights), f"case {case}: {what}"
        ((name, fields),) = found.told
        assert name == "checkpoint_rejected" and fields["step"] == 6 and fields["reason"], what
        assert Path(fields["path"]).is_dir() and not (folder / "step-00000006").exists(), what
        shutil.rmtree(folder)


def store(tmp_path: Path) -> tuple[Path, Remote, str]:
    folder = tmp_path / "run" / "checkpoints"
    url = f"file://{tmp_path}/store"
    return folder, Remote(f"{url}/run/checkpoints", Access("checkpoint.upload_to")), url


def test_what_is_gone_or_broken_here_comes_from_the_store(tmp_path: Path) -> None:
    folder, remote, url = store(tmp_path)
    for step in (3, 6):
        save(ALONE, folder, step, upload_to=url)
    expected = restore(ALONE, [folder])
    (folder / "step-00000006" / "state.json").write_text("{}")
    broken = restore(ALONE, [folder], remote=remote)
    assert (broken.state, broken.weights) == (expected.state, expected.weights)
    assert [name for name, _ in broken.told] == ["checkpoint_rejected", "fetched"]
    shutil.rmtree(folder)
    gone = restore(ALONE, [folder], remote=remote)
    assert (gone.state, gone.weights) == (expected.state, expected.weights)
    assert gone.told[0][1]["from"] == f"{url}/run/checkpoints/step-00000006"
    (tmp_path / "store" / "run" / "checkpoints" / "step-00000006" / "shard-00000.safetensors").write_bytes(b"")
    shutil.rmtree(folder)
    assert restore(ALONE, [folder], remote=remote).state.step == 3, "broken in the store, so the one before"


def test_a_store_that_does_not_answer_matters_only_if_nothing_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, remote, _ = store(tmp_path)
    save(ALONE, folder, 3)
    remote.sleep = lambda seconds: None

    def fails(*arguments: Any, **named: Any) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(remote._fs, "ls", fails)
    found = restore(ALONE, [folder], remote=remote)
    ((name, fields),) = found.told
    assert found.state.step == 3 and name == "warning" and "TimeoutError: no answer; going on with" in fields["message"]
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"--resume: there is no checkpoint in .*TimeoutError: no answer"):
        restore(ALONE, [folder], remote=remote)
