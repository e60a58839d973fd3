"""Many workers: stopped and resumed is the same run, and another number of them trains on the same samples."""

import contextlib
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from shoal.core.process import Process
from shoal.data.order import Order
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.records import Report
from shoal.observe.runs import read_events, read_metrics
from shoal.train import agree
from shoal.train.request import RunRequest
from shoal.train.worker import train_worker
from tests.many import CPU, Ranks
from tests.small_recipes import small
from tests.train.test_exact_resume import StopsAt, comparable

MakeRanks = Callable[[int], Ranks]
ALONE = Process(0, 1, CPU)
STEPS = 24
PLAIN = {"cluster.threads_per_worker": 1, "cluster.gpus_per_worker": 0, "cluster.min_workers": 1}
HARD: dict[str, dict[str, Any]] = {
    "digits": {"model.dropout": 0.2, "train.micro_batch": 16, "train.clip_norm": 0.5},  # batch norm besides
    "shakespeare": {"model.dropout": 0.2, "train.precision": "fp16", "train.micro_batch": 2},
    "synthetic_mlp": {"model.dropout": 0.3, "data.samples": 289, "optim.name": "sgd", "optim.momentum": 0.9},
}
"""What makes a resume hard; the last has a step of a single sample in the middle."""


class Asked:
    """A reason to stop from the given question on, by one worker alone."""

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.times = 0

    def __call__(self) -> str | None:
        self.times += 1
        return "SIGTERM" if self.after is not None and self.times > self.after else None


def run(
    process: Process, name: str, overrides: dict[str, Any], run_dir: Path, resume: bool, who: int, after: int | None
) -> dict[str, Any]:
    """Train as a worker of a launcher does; worker `who` wants to stop after so many calls."""
    loaded = (prepare(resume=run_dir) if resume else prepare([name], overrides, run_dir=run_dir)).loaded
    stop = Asked(after if process.rank == who else None)
    request = RunRequest(loaded=loaded, run_dir=run_dir, console=SilentConsole(), resume=resume, stop=stop)
    with patch.object(agree, "_EVERY_S", 0.0):  # asked at every call: a small run is over in a moment
        return train_worker(request, process)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *(("shakespeare", 2), ("synthetic_mlp", 3)),
        *(pytest.param(name, 2, marks=pytest.mark.slow) for name in ("digits", "synthetic_mlp")),
    ],
)
def test_resumed_is_the_same_as_never_stopped(ranks: MakeRanks, tmp_path: Path, name: str, world_size: int) -> None:
    overrides = small(name, tmp_path / "data", STEPS) | HARD[name] | PLAIN | {"cluster.workers": world_size}
    workers = ranks(world_size)
    reference = workers(run, name, overrides, tmp_path / "whole", False, 0, None)[0]
    assert reference["status"] == "done" and reference["step"] == STEPS and reference["world_size"] == world_size
    steps = []
    for number, (who, after) in enumerate([(0, 4), (world_size - 1, 9)]):
        found = workers(run, name, overrides, tmp_path / "stopped", number > 0, who, after)
        assert all((end["status"], end["ended_by"]) == ("interrupted", "SIGTERM") for end in found)
        steps.append(found[0]["step"])
    assert 0 < steps[0] < steps[1] < STEPS
    final = workers(run, name, overrides, tmp_path / "stopped", True, 0, None)[0]
    assert final["resumed_from_step"] == steps[1] and final["status"] == "done"
    assert final["weights_sha256"] == reference["weights_sha256"]
    assert final["metrics"] == reference["metrics"]
    assert comparable(tmp_path / "stopped") == comparable(tmp_path / "whole")


@pytest.mark.parametrize("sizes", [(2, 1, 2), (3, 1, 2)], ids=str)
def test_another_number_of_workers_reports_the_losses_of_the_steady_run(
    ranks: MakeRanks, tmp_path: Path, sizes: tuple[int, ...]
) -> None:
    def change(number: int, after: int | None) -> dict[str, Any]:
        arguments = ("synthetic_mlp", overrides, tmp_path / "changed", number > 0, 0, after)
        size = sizes[number]
        summary: dict[str, Any] = run(ALONE, *arguments) if size == 1 else ranks(size)(run, *arguments)[0]
        assert summary["world_size"] == size
        return summary

    overrides = small("synthetic_mlp", tmp_path / "data", STEPS) | PLAIN
    overrides |= {"cluster.workers": 2, "data.samples": 289, "observe.every_steps": 4, "optim.schedule": "cosine"}
    reference = ranks(2)(run, "synthetic_mlp", overrides, tmp_path / "steady", False, 0, None)[0]
    first, second, final = change(0, 6), change(1, 9), change(2, None)
    assert 0 < first["step"] < second["step"] < final["step"] == STEPS == reference["step"]
    assert {first["step"] % 4, second["step"] % 4} != {0}, "between two reports, so that a loss must be taken along"
    for name, value in reference["metrics"].items():
        assert final["metrics"][name] == pytest.approx(value, abs=1e-4)
    steady, changed = comparable(tmp_path / "steady"), comparable(tmp_path / "changed")
    assert [report["step"] for report in changed] == [report["step"] for report in steady]
    for one, other in zip(changed, steady, strict=True):
        assert one["epoch"] == other["epoch"] and one["metrics"] == pytest.approx(other["metrics"], abs=1e-4)


def test_workers_of_a_launcher_and_of_a_test_end_with_the_same_weights(ranks: MakeRanks, tmp_path: Path) -> None:
    overrides = small("digits", tmp_path / "data", 12) | HARD["digits"] | PLAIN
    overrides |= {"cluster.workers": 2, "cluster.min_workers": None}
    by_ranks = ranks(2)(run, "digits", overrides, tmp_path / "ranks", False, 0, None)[0]
    by_launcher = launch(
        prepare(["digits"], overrides, run_dir=tmp_path / "launcher"), Launch(SilentConsole(), launcher="local")
    )
    assert by_launcher["weights_sha256"] == by_ranks["weights_sha256"]
    assert comparable(tmp_path / "launcher") == comparable(tmp_path / "ranks")


SAMPLES, BATCH, LONG = 64, 12, 60
RECORDING = f"""
import os, signal, time, torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

class Data(torch.utils.data.Dataset):
    def __init__(self, size, records):
        self.size, self.records = size, records

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.records:
            with open(f"reads-{{dist.get_rank() if dist.is_initialized() else 0}}", "a") as file:
                file.write(f"{{index}}\\n")
        generator = torch.Generator().manual_seed(index)
        return torch.randn(1, 8, 8, generator=generator), index % 3

class Task:
    def model(self):
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(144, 3)
        )

    def datasets(self):
        return {{"train": Data({SAMPLES}, True), "val": Data(10, False)}}

    def loss(self, model, batch):
        if model.training and os.path.exists("slow"):
            time.sleep(0.1)
        if model.training and os.path.exists("preempt") and dist.get_rank() == 1:
            os.remove("preempt")
            os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(model(batch[0]), batch[1])
"""
RECIPE = {
    "name": "recording",
    "task": "recording_workers:Task",
    "train": {"steps": LONG, "global_batch": BATCH, "micro_batch": 3},
    "checkpoint": {"every_steps": 1000},
    "observe": {"every_steps": 1},
    "cluster": {"workers": 2, "threads_per_worker": 1, "gpus_per_worker": 0},
}


class StopsAfterReport(SilentConsole):
    """Asks for a stop once a step has been reported."""

    def __init__(self, step: int | None) -> None:
        self.at = step
        self.reached = False

    def report(self, report: Report) -> None:
        self.reached = self.reached or (self.at is not None and report.step >= self.at)

    def stop(self) -> str | None:
        return "SIGINT" if self.reached else None


def start(prepared: Any, stop_after: int | None = None) -> dict[str, Any]:
    console = StopsAfterReport(stop_after)
    return launch(prepared, Launch(console, console.stop, launcher="local"))


def read_samples(world_size: int, first_step: int, last_step: int) -> list[list[int]]:
    """What the workers have read since the last call, by step: each reads its share of a step in one go."""
    order, files = Order(SAMPLES, BATCH, seed=0), []
    for rank in range(world_size):
        file = Path(f"reads-{rank}")
        files.append([int(line) for line in file.read_text().split()])
        file.unlink()
    steps = []
    for step in range(first_step, last_step):
        first, last = order.bounds(step)
        shares = [-(-(last - first - rank) // world_size) for rank in range(world_size)]
        steps.append([files[rank].pop(0) for rank in range(world_size) for _ in range(shares[rank])])
    assert not any(files), "nothing else was read"
    return steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the task and a run of it in `whole`, and its summary."""
    folder = tmp_path_factory.mktemp("recording")
    (folder / "recording_workers.py").write_text(RECORDING)
    with contextlib.chdir(folder):
        reference = start(prepare([RECIPE], run_dir="whole"))
        assert reference["status"] == "done" and reference["world_size"] == 2
        assert read_samples(2, 0, LONG) == samples_by_step()
    return folder, reference


def samples_by_step() -> list[list[int]]:
    order = Order(SAMPLES, BATCH, seed=0)
    return [order.permutation(order.epoch_of(step))[slice(*order.bounds(step))].tolist() for step in range(LONG)]


@pytest.mark.slow
def test_a_launched_run_is_exact_over_a_stop_and_reads_every_sample_once_whatever_the_workers(
    undisturbed: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, reference = undisturbed
    monkeypatch.chdir(here)
    expected = samples_by_step()
    (here / "slow").touch()
    stopped = start(prepare([RECIPE], run_dir="stopped"), stop_after=3)
    (here / "slow").unlink()
    assert (stopped["status"], stopped["ended_by"]) == ("interrupted", "SIGINT") and 3 <= stopped["step"] < LONG
    assert read_samples(2, 0, stopped["step"]) == expected[: stopped["step"]]
    shutil.copytree("stopped", "changed")

    # As many workers as before: the very same run.
    final = start(prepare(resume="stopped"))
    assert final["resumed_from_step"] == stopped["step"] and final["weights_sha256"] == reference["weights_sha256"]
    assert final["metrics"] == reference["metrics"]
    assert comparable(here / "stopped") == comparable(here / "whole")
    assert read_samples(2, stopped["step"], LONG) == expected[stopped["step"] :]

    # One worker for a while, then two again: the same samples in every step.
    console = StopsAt(stopped["step"] + 7)
    by_one = launch(prepare(overrides={"cluster.workers": 1}, resume="changed"), Launch(console, console.stop))
    assert by_one["step"] == stopped["step"] + 7 and by_one["world_size"] == 1
    assert read_samples(1, stopped["step"], by_one["step"]) == expected[stopped["step"] : by_one["step"]]
    by_two = start(prepare(overrides={"cluster.workers": 2}, resume="changed"))
    assert by_two["status"] == "done" and by_two["step"] == LONG and by_two["world_size"] == 2
    rest = read_samples(2, by_one["step"], LONG)
    assert rest == expected[by_one["step"] :]
    seen = Counter(index for step in expected[: by_one["step"]] + rest for index in step)
    assert seen == dict.fromkeys(range(SAMPLES), 10), "every sample once an epoch"
    assert [record["step"] for record in read_metrics(Path("changed"))] == [
        record["step"] for record in read_metrics(Path("whole"))
    ]
    starts = [event["world_size"] for event in read_events(Path("changed")) if event["event"] == "start"]
    assert starts == [2, 1, 2]


def test_a_worker_that_is_told_to_go_saves_first_and_the_run_goes_on_without_a_loss(
    undisturbed: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, reference = undisturbed
    monkeypatch.chdir(here)
    (here / "preempt").touch()
    (here / "slow").touch()
    console = Hurries()
    summary = launch(prepare([RECIPE], run_dir="preempted"), Launch(console, launcher="local"))
    assert (summary["status"], summary["step"], summary["restarts"]) == ("done", LONG, 0)
    assert summary["weights_sha256"] == reference["weights_sha256"]
    assert comparable(here / "preempted") == comparable(here / "whole")
    events = read_events(Path("preempted"))
    saved, resumed = ([event["step"] for event in events if event["event"] == name] for name in ("save", "resume"))
    assert saved[0] == resumed[0] < LONG and saved[-1] == LONG
    assert read_samples(2, 0, LONG) == samples_by_step(), "no step was made twice"


class Hurries(SilentConsole):
    """Slow until the run is resumed, so that it is not over before the worker is heard."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "resume":
            Path("slow").unlink()


def test_what_runs_is_told_and_a_pipeline_that_waits_for_itself(ranks: MakeRanks, here: Path) -> None:
    fields = small("shakespeare", here / "data", 1) | PLAIN | {"cluster.workers": 2, "cluster.min_workers": None}
    fields |= {"parallel.strategy": "pipeline", "train.micro_batch": 4, "train.global_batch": 4, "model.layers": 2}
    fields["parallel.tensor.size"] = 2
    ranks(2)(run, "shakespeare", fields, here / "r", False, 0, None)
    events = read_events(here / "r")
    (start,) = (event for event in events if event["event"] == "start")
    assert start["strategy"] == "pipeline 2, 1f1b" and start["micro_batch"] == 4 and start["accumulation"] == 1
    warnings = [event["message"] for event in events if event["event"] == "warning"]
    assert any(
        words.startswith("train.micro_batch: 4 makes 1 micro-batch a step, fewer than the 2 stages")
        for words in warnings
    )
    assert "parallel.tensor.size: is not used, because parallel.strategy is pipeline" in warnings
