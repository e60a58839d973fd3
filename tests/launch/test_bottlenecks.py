"""Real runs of two workers that are held up on purpose: each time the verdict names what it was, live and at the end.

In all of them every worker-second is accounted for, and the phases of a step add up to the time it took.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.crew import LocalCrew
from shoal.launch.run import prepare
from shoal.observe.ledger import read_ledger
from shoal.observe.runs import read_metrics, read_workers
from tests.launch.gangs import Watch, run_gang, warm_crew
from tests.launch.test_gang import kill

pytestmark = pytest.mark.alone

TASK = """
import time

import torch
import torch.distributed as dist
from torch import nn


class Samples(torch.utils.data.Dataset):
    def __init__(self, size, each_s):
        self.size, self.each_s = size, each_s
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        time.sleep(self.each_s)
        return torch.full((64,), index / self.size)


class Model(nn.Module):
    def __init__(self, unused):
        super().__init__()
        self.work = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.table = nn.Embedding(max(unused // 64, 1), 64)
    def forward(self, x):
        return self.work(x) + self.table(torch.zeros(len(x), dtype=torch.int64))


class Held:
    def __init__(self, data_s=0.0, step_s=0.005, slow_rank=None, unused=64, val=4):
        self.data_s, self.step_s, self.slow_rank, self.unused, self.val = data_s, step_s, slow_rank, unused, val
    def model(self):
        return Model(self.unused)
    def datasets(self):
        return {"train": Samples(4096, self.data_s), "val": Samples(self.val, 0.02)}
    def loss(self, model, batch):
        time.sleep(self.step_s * (4 if dist.get_rank() == self.slow_rank else 1))
        return model(batch).square().mean()
    def metrics(self, model, batch):
        return {"loss": (model(batch).square().sum(), len(batch))}
"""
QUIET = {"evaluate": {"every_steps": 1000}, "checkpoint": {"every_steps": 1000}}
HELD: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "nothing": ("compute", {"step_s": 0.06}, QUIET, "as it should be"),
    "data": ("input", {"data_s": 0.004}, QUIET, "raise data.workers from 0 to 2"),
    "a slow worker": ("straggler", {"slow_rank": 1, "step_s": 0.01}, QUIET, "worker 1 takes"),
    "gradients": ("communication", {"unused": 3_000_000, "step_s": 0.0}, QUIET, "try parallel.compress=bf16"),
    "saving": (
        *("checkpoint", {"unused": 1_000_000, "step_s": 0.0}),
        QUIET | {"checkpoint": {"every_steps": 1, "keep_last": 1}},
        "raise checkpoint.every_steps from 1 to 4",
    ),
    "evaluation": (
        "evaluation",
        {"val": 16},
        QUIET | {"evaluate": {"every_steps": 5}},
        "raise evaluate.every_steps from 5 to 20",
    ),
}


@pytest.fixture(scope="module")
def crew() -> Iterator[LocalCrew]:
    with warm_crew(2) as two:
        yield two


@pytest.fixture
def held(here: Path, crew: LocalCrew) -> Callable[..., tuple[dict[str, Any], Path]]:
    (here / "held.py").write_text(TASK)

    def run(args: dict[str, Any], sections: dict[str, Any], *, steps: int = 60, kill_at: int | None = None) -> Any:
        recipe = {
            "task": {"name": "held:Held", "args": args},
            "data": {"workers": 0},
            "optim": {"name": "sgd", "lr": 1e-4},
            "train": {"steps": steps, "global_batch": 8},
            "observe": {"every_steps": 5, "workers_every_s": 0.5},
            "cluster": {"workers": 2, "threads_per_worker": 1, "gpus_per_worker": 0},
            **sections,
        }
        watch = Watch(here / "run")
        if kill_at is not None:
            watch.when_step(kill_at, kill(1))
        return run_gang(crew, prepare([recipe], run_dir=here / "run"), watch), here / "run"

    return run


def check_adds_up(run_dir: Path) -> None:
    ledger = read_ledger(run_dir)
    assert abs(ledger.unaccounted_s) <= 0.01 * ledger.worker_s, ledger
    # Between the first report and the last of a start, everything is a phase of something.
    reports = read_metrics(run_dir)
    wall_s = reports[-1]["time"] - reports[0]["time"]
    told_s = sum(sum(report["seconds"].values()) for report in reports[1:])
    assert told_s == pytest.approx(wall_s, rel=0.02)


@pytest.mark.parametrize("name", HELD)
def test_what_holds_a_run_up_is_named(held: Callable[..., Any], name: str) -> None:
    bottleneck, args, sections, advice = HELD[name]
    summary, run_dir = held(args, sections)
    assert summary["bottleneck"] == bottleneck, summary["verdict"]
    assert advice in summary["verdict"]
    live = [line["bottleneck"] for line in read_workers(run_dir)]
    assert live.count(bottleneck) > len(live) / 2, live
    check_adds_up(run_dir)


def test_what_a_killed_worker_costs_is_in_the_ledger(held: Callable[..., Any]) -> None:
    sections = QUIET | {"checkpoint": {"every_steps": 20}}
    summary, run_dir = held({"step_s": 0.02}, sections, steps=80, kill_at=35)
    assert summary["restarts"] == 1 and summary["status"] == "done"
    ledger = read_ledger(run_dir)
    assert abs(ledger.unaccounted_s) <= 0.01 * ledger.worker_s, ledger
    step_s = ledger.seconds["useful"] / 80
    assert ledger.seconds["recomputed"] >= 14 * step_s, "steps 21 to 35 at least were made twice"
    assert ledger.seconds["restart"] > 0 and ledger.seconds["startup"] > 0
    assert summary["ledger"]["seconds"] == pytest.approx(ledger.to_record()["seconds"], abs=0.2)
    assert summary["goodput"] == pytest.approx(ledger.goodput, abs=0.02)
