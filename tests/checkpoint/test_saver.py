"""Saving in the background: what is copied is saved, what fails is told and tried again, and one is always finished."""

import itertools
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.checkpoint import write as module
from shoal.checkpoint.folder import list_checkpoints, read_info
from shoal.checkpoint.saver import TROUBLE, Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.core.errors import DivergedError, RunError
from shoal.core.process import Process
from tests.checkpoint.states import ALONE, check, read, snapshot


class Told:
    """What a saver tells."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))

    def steps(self, name: str) -> list[int]:
        return [fields["step"] for event, fields in self.events if event == name]


class Gate:
    """Holds every write back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        write_file = module.write_file

        def slowly(path: Path, chunks: Any, go_on: Callable[[], bool]) -> Any:
            self.entered.set()
            while go_on() and not self.opened.wait(0.01):
                pass
            return write_file(path, chunks, go_on)

        monkeypatch.setattr(module, "write_file", slowly)


def make(folder: Path, tell: Callable[..., None] = lambda *_: None, **settings: Any) -> Saver:
    return Saver(folder, CheckpointSection(**{"keep_last": 100} | settings), ALONE, tell=tell)


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_training_goes_on_while_the_state_of_its_step_is_written(tmp_path, monkeypatch):
    gate, told = Gate(monkeypatch), Told()
    saver = make(tmp_path, told)
    taken = snapshot(3)
    saver.save(taken)
    for tensor in taken.tensors.values():  # as the next step would
        tensor.zero_()
    assert list_checkpoints(tmp_path) == [] and told.events == []
    gate.opened.set()
    saver.finish()
    check(read(read_info(tmp_path / "step-00000003")), 3)
    assert told.steps("save") == [3] and told.events[0][1]["stall_s"] < told.events[0][1]["seconds"] + 5


def test_a_later_save_waits_for_the_one_before(tmp_path, monkeypatch):
    gate, alive = Gate(monkeypatch), []
    saver = Saver(tmp_path, CheckpointSection(keep_last=9), ALONE, alive=lambda: alive.append(1))
    saver.save(snapshot(1))
    threading.Timer(0.5, gate.opened.set).start()
    saver.save(snapshot(2))
    assert [info.step for info in list_checkpoints(tmp_path)][:1] == [1] and alive, "and says that it is not hung"
    saver.finish()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 2]


def test_a_later_save_supersedes_the_one_before_but_never_two_in_a_row(tmp_path, monkeypatch):
    gate, told = Gate(monkeypatch), Told()
    saver = make(tmp_path, told, if_busy="supersede")
    saver.save(snapshot(1))
    gate.entered.wait()
    saver.save(snapshot(2))
    assert told.steps("save_superseded") == [1]
    threading.Timer(0.3, gate.opened.set).start()
    saver.save(snapshot(3))
    saver.save(snapshot(4))
    saver.finish()
    assert 2 in told.steps("save") and 1 not in told.steps("save") and told.steps("save")[-1] == 4
    check(read(read_info(tmp_path / "step-00000002")), 2)
    assert not list(tmp_path.glob(".*")), "what was called off leaves nothing"


def test_on_a_full_disk_training_goes_on_and_the_save_is_made_when_there_is_room(small_disk):
    told = Told()
    saver = make(small_disk, told)
    saver.save(snapshot(1))
    filler = small_disk / "filler"
    wait_until(lambda: told.steps("save") == [1])
    with filler.open("wb") as file:
        file.write(b"x" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize - 50_000))
    saver.save(snapshot(2))
    wait_until(lambda: told.steps("save_failed"))
    assert told.events[-1] == ("save_failed", {"step": 2, "message": "No space left on device"})
    assert [info.step for info in list_checkpoints(small_disk)] == [1]
    assert saver.trouble() is None
    filler.unlink()
    saver.finish()
    assert told.steps("save") == [1, 2] == [1, *told.steps("save_recovered")] and not list(small_disk.glob(".*"))
    check(read(read_info(small_disk / "step-00000002")), 2)


@pytest.fixture
def unwritable(tmp_path: Path) -> Path:
    """A folder in which no checkpoint can be written, whoever tries: its place is taken by a file."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def test_a_newer_state_is_saved_instead_of_one_that_fails_and_failures_in_a_row_are_trouble(unwritable, tmp_path):
    told = Told()
    saver = make(unwritable, told, max_failures=2)
    saver.save(snapshot(1))
    wait_until(lambda: told.events)
    saver.save(snapshot(2))
    assert saver.report() == {"save_failures": 1.0} and saver.trouble() is None
    wait_until(lambda: 2 in told.steps("save_failed"))
    saver.save(snapshot(3))
    assert saver.trouble() == TROUBLE
    assert saver.too_many_failures() == "2 saves of checkpoints failed in a row, the last one because: Not a directory"
    unwritable.unlink()
    saver.finish()
    assert [info.step for info in list_checkpoints(unwritable)] == [3]
    assert saver.trouble() is None and saver.report() == {}


def test_a_last_save_that_fails_for_good_fails_the_run(unwritable):
    told = Told()
    saver = make(unwritable, told, give_up_after_s=0.3)
    saver.save(snapshot(1))
    with pytest.raises(
        RunError, match=r"step 1 could not be written to .*: Not a directory; earlier checkpoints are unt"
    ):
        saver.finish()
    assert ("waiting_to_save", {"step": 1, "for_s": 0.3}) in told.events


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_never_saved(tmp_path, value):
    saver = make(tmp_path)
    saver.save(snapshot(1))
    tensors = {"model.weight": torch.tensor([1.0, value]), "model.mask": torch.tensor([-math.inf])}
    saver.save(snapshot(2, tensors=tensors, finite=frozenset({"model.weight"})))
    wait_until(saver.trouble)
    with pytest.raises(DivergedError, match=r"the weights became infinite or nan by step 2: lower optim.lr"):
        saver.save(snapshot(3))
    assert [info.step for info in list_checkpoints(tmp_path)] == [1] and not list(tmp_path.glob(".*"))


def test_what_nobody_has_foreseen_is_raised_where_the_run_trains(tmp_path):
    saver = make(tmp_path)
    saver.save(snapshot(1, own={"what": object()}))
    wait_until(saver.trouble)
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.finish()


def test_a_run_that_fails_still_finishes_what_is_being_written(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    saver = make(tmp_path)
    saver.save(snapshot(1))
    threading.Timer(0.2, gate.opened.set).start()
    saver.settle(timeout_s=30)
    check(read(read_info(tmp_path / "step-00000001")), 1)
    make(tmp_path).settle(timeout_s=1)


def test_old_ones_go_and_every_saved_one_is_announced(tmp_path):
    seen: list[tuple[str, float]] = []
    saver = Saver(
        tmp_path,
        CheckpointSection(keep_last=1, keep_best=1, metric="val_loss"),
        ALONE,
        on_saved=lambda path, metrics: seen.append((path.name, metrics["val_loss"])),
    )
    for step in range(1, 5):
        saver.save(snapshot(step))
    saver.finish()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 4]
    assert seen == [(f"step-{step:08d}", float(step)) for step in range(1, 5)]


def test_a_checkpoint_that_cannot_be_deleted_is_told(tmp_path, monkeypatch):
    told = Told()

    def fails(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "delete_checkpoint", fails)
    saver = make(tmp_path, told, keep_last=1)
    saver.save(snapshot(1))
    saver.save(snapshot(2))
    saver.finish()
    assert "an old checkpoint could not be deleted" in dict(told.events)["warning"]["message"]


MEMORY = """
import os, sys
from pathlib import Path
import torch
from shoal.checkpoint.saver import TROUBLE, Saver
from shoal.checkpoint.section import CheckpointSection
from tests.checkpoint.states import ALONE, snapshot

def memory_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

torch.set_num_threads(1)
size = int(sys.argv[2])
tensors = {f"model.{number}": torch.ones(size // 16) for number in range(4)}
saver = Saver(Path(sys.argv[1]), CheckpointSection(keep_last=1), ALONE)
small = {"model.0": torch.ones(10)}
saver.save(snapshot(0, tensors=small, finite=frozenset(small)))  # what the first save loads and makes is not its state
saver.finish()
found = [memory_bytes()]
for saves in (3, 100):
    for step in range(1, saves + 1):
        saver.save(snapshot(step, tensors=tensors, finite=frozenset(tensors)))
    saver.finish()
    found.append(memory_bytes())
print(*found)
"""


def test_a_hundred_saves_take_no_more_memory_than_one_copy_of_the_state(tmp_path, without_coverage):
    size = 16_000_000
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "c"), str(size)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, env=without_coverage, cwd=root, capture_output=True, text=True, check=True)
    before, after_few, after_many = map(int, ended.stdout.split())
    assert after_few - before < 1.5 * size
    assert after_many - after_few < 0.2 * size


def save_where_one_cannot(process: Process, folder: Path, disk: Path) -> tuple[list[Any], float | None]:
    """Rank 1 writes to a disk that takes nothing."""
    told = Told()
    settings = CheckpointSection(give_up_after_s=0.5)
    saver = Saver(folder if process.rank != 1 else disk, settings, process, tell=told)
    saver.save(snapshot(1, rank=process.rank))
    try:
        saver.finish()
    except RunError as error:
        return told.events, str(error)
    return told.events, None


def test_if_one_worker_cannot_write_nobody_commits_and_all_know(ranks, tmp_path, unwritable):
    folder = tmp_path / "good"
    (told, first), (silent, second) = ranks(2)(save_where_one_cannot, folder, unwritable)
    assert told[0] == ("save_failed", {"step": 1, "message": "worker 1: Not a directory"}) and silent == []
    assert "could not be written" in first and "could not be written" in second
    assert list(folder.iterdir()) == []


def save_others(process: Process, folder: Path, other: str) -> str:
    saver = Saver(folder, CheckpointSection(), process)
    tensors = {f"model.{process.rank}": torch.ones(3)} if other == "name" else {"model.a": torch.ones(3 + process.rank)}
    saver.save(snapshot(1, rank=process.rank, tensors=tensors))
    with pytest.raises(RunError) as caught:
        saver.finish()
    return str(caught.value)


@pytest.mark.parametrize("other", ["name", "shape"])
def test_workers_that_hold_different_tensors_commit_nothing(ranks, tmp_path, other):
    for message in ranks(2)(save_others, tmp_path, other):
        assert message.startswith("the workers hold different tensors")
    assert list_checkpoints(tmp_path) == []


def supersede(process: Process, folder: Path) -> list[str]:
    told = Told()
    saver = Saver(folder, CheckpointSection(if_busy="supersede", keep_last=50), process, tell=told)
    large = {"model.w": torch.ones(2_000_000)}
    for step in range(1, 31):
        saver.save(snapshot(step, rank=process.rank, tensors=large))
    saver.finish()
    return [f"{name} {fields['step']}" for name, fields in told.events]


def test_workers_that_supersede_agree_on_what_was_saved(ranks, tmp_path):
    told, silent = ranks(2)(supersede, tmp_path)
    saved = [int(words.split()[1]) for words in told if words.startswith("save ")]
    assert silent == [] and saved == [info.step for info in list_checkpoints(tmp_path)] and saved[-1] == 30
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(saved)), "one is always finished"
    for info in list_checkpoints(tmp_path):
        assert bool((read(info).tensors["model.w"] == 1).all())
