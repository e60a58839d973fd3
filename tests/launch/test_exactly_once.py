"""Real runs whose weights record their samples: a weight a sample, from which the step that it came in can be read.

Every sample moves its own weight by the learning rate of its step, which is another one in every step. So two runs end
with the same weights exactly when every sample came in the same step of every epoch, and as often.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.api import train
from shoal.launch.crew import LocalCrew
from shoal.launch.run import prepare
from tests.data.shards.making import write_json_lines
from tests.launch.gangs import Watch, run_gang, warm_crew
from tests.launch.test_gang import kill

ROWS = (9, 14, 1, 20, 6, 10)
TASK = """
import torch
from torch import nn

from shoal.data.shards.index import parse_index
from shoal.data.shards.sharded import ShardedRows
from shoal.data.shards.store import LocalStore
from pathlib import Path


class Items(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __getitem__(self, index):
        return index


class Passing(torch.utils.data.IterableDataset):
    def __init__(self, size):
        self.size = size
    def __len__(self):
        return self.size
    def __iter__(self):
        return iter(range(self.size))


class Ids(ShardedRows):
    def batch(self, indices, epoch):
        return torch.tensor(self.rows(indices, lambda row, place: row["id"]))


class Weights(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(size))
    def forward(self, ids):
        return self.seen[ids]


class Recording:
    def __init__(self, kind, folder, size):
        self.kind, self.folder, self.size = kind, Path(folder), size
    def model(self):
        return Weights(self.size)
    def datasets(self):
        if self.kind == "memory":
            return {"train": torch.utils.data.TensorDataset(torch.arange(self.size))}
        if self.kind == "stream":
            index = parse_index((self.folder / "index.json").read_text(), "index")
            return {"train": Ids(index, LocalStore(self.folder, index))}
        return {"train": Items(self.size) if self.kind == "map" else Passing(self.size)}
    def loss(self, model, batch):
        ids = batch[0] if isinstance(batch, (list, tuple)) else batch
        return -model(ids).mean()
"""
KINDS = ("memory", "map", "iterable", "stream")


@pytest.fixture(scope="module")
def crews() -> Iterator[Callable[[int], LocalCrew]]:
    with warm_crew(2) as two, warm_crew(3) as three, warm_crew(4) as four:
        yield lambda workers: {2: two, 3: three, 4: four}[workers]


@pytest.fixture
def recipe(here: Path) -> Callable[[str], dict[str, Any]]:
    (here / "recording.py").write_text(TASK)
    write_json_lines(here / "shards", ROWS)

    def made(kind: str) -> dict[str, Any]:
        args = {"kind": kind, "folder": str(here / "shards"), "size": sum(ROWS)}
        return {
            "task": {"name": "recording:Recording", "args": args},
            "data": {"workers": 0 if kind == "memory" else 1},
            # No weight is moved twice in a step, so sums are exact however many workers there are.
            "optim": {"name": "sgd", "momentum": 0.0, "weight_decay": 0.0, "lr": 1.0, "warmup_steps": 1024,
                      "schedule": "constant"},
            "train": {"epochs": 3, "global_batch": 12},
            "checkpoint": {"every_steps": 2},
            "observe": {"every_steps": 1},
            "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
        }  # fmt: skip

    return made


def weights_of(summary: dict[str, Any]) -> Any:
    assert summary["status"] == "done"
    return summary["weights_sha256"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_and_three_of_which_one_is_killed_and_two_that_go_on(crews, recipe, here, kind):
    alone = weights_of(train(recipe(kind), progress="silent"))
    run_dir = here / "run"
    watch = Watch(run_dir)
    watch.when_step(3, kill(1))
    # One epoch by three workers, the others by two.
    first = prepare([recipe(kind)], {"cluster.workers": 3, "train.epochs": 1}, run_dir=run_dir)
    assert run_gang(crews(3), first, watch)["restarts"] == 1
    rest = prepare([], {"cluster.workers": 2, "train.epochs": 3}, resume=run_dir)
    watch = Watch(run_dir)
    watch.when_step(9, kill(1))
    assert weights_of(run_gang(crews(2), rest, watch)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_workers(crews, recipe, here, kind, workers):
    alone = weights_of(train(recipe(kind), progress="silent"))
    prepared = prepare([recipe(kind)], {"cluster.workers": workers}, run_dir=here / "run")
    watch = Watch(here / "run")
    watch.when_step(7, kill(workers - 1))
    assert weights_of(run_gang(crews(workers), prepared, watch)) == alone


def test_other_samples_would_be_noticed(recipe):
    """The measure itself: another seed has other samples in its steps, and other weights."""
    one = train(recipe("map"), progress="silent")["weights_sha256"]
    other = train(recipe("map") | {"train": {"epochs": 3, "global_batch": 12, "seed": 1}}, progress="silent")
    assert one != other["weights_sha256"]
