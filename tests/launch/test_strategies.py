"""Whole runs under every strategy: a worker that is killed costs nothing, and a run goes on under another strategy."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.crew import LocalCrew
from shoal.launch.run import prepare
from tests.launch.gangs import Watch, run_gang, warm_crew
from tests.launch.test_gang import kill
from tests.parallel.conform import STRATEGIES

VIT = {
    "model": {"name": "vit", "patch": 4, "dim": 16, "layers": 4, "heads": 4},
    "train.epochs": None,
    "train.steps": 20,
    "train.global_batch": 16,
    "train.clip_norm": 1.0,
    "evaluate.every_steps": 10,
    "checkpoint.every_steps": 4,
    "observe.every_steps": 1,
    "cluster.threads_per_worker": 1,
    "cluster.gpus_per_worker": 0,
}
ON_TWO = ("fsdp", "zero3", "1f1b")
"""Those that `make test` kills a worker of; the others take the same way."""


@pytest.fixture(scope="module")
def crews() -> Iterator[Callable[[int], LocalCrew]]:
    with warm_crew(2) as two, warm_crew(4) as four:
        yield lambda workers: {2: two, 4: four}[workers]


def run(crews: Callable[[int], LocalCrew], folder: Path, name: str, workers: int, *kills: Any) -> tuple[Any, Watch]:
    prepared = prepare(
        ["digits"], VIT | {"cluster.workers": workers, "parallel": STRATEGIES[name]}, run_dir=folder / "run"
    )
    watch = Watch(folder / "run")
    for step, rank in kills:
        watch.when_step(step, kill(rank))
    return run_gang(crews(workers), prepared, watch), watch


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *(pytest.param(name, 2, marks=pytest.mark.slow if name == "zero3" else ()) for name in ON_TWO),
        *(pytest.param(name, 4, marks=pytest.mark.slow) for name in STRATEGIES),
    ],
)
def test_a_killed_worker_costs_nothing_under_any_strategy(
    crews: Callable[[int], LocalCrew], tmp_path_factory: pytest.TempPathFactory, name: str, workers: int
) -> None:
    undisturbed, _ = run(crews, tmp_path_factory.mktemp("undisturbed"), name, workers)
    assert undisturbed["status"] == "done" and undisturbed["restarts"] == 0
    summary, watch = run(crews, tmp_path_factory.mktemp("killed"), name, workers, (6, workers - 1), (13, 0))
    assert summary["status"] == "done" and summary["restarts"] == 2
    assert summary["weights_sha256"] == undisturbed["weights_sha256"]
    assert summary["metrics"] == undisturbed["metrics"]
    assert watch.names().count("failure") == 2


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "fsdp" else pytest.mark.slow) for n in STRATEGIES])
def test_initial_weights_are_taken_under_any_strategy(
    crews: Callable[[int], LocalCrew], tmp_path: Path, name: str
) -> None:
    first, _ = run(crews, tmp_path / "first", "ddp", 2)
    prepared = prepare(
        ["digits"],
        VIT
        | {
            "cluster.workers": 4,
            "parallel": STRATEGIES[name],
            "train.init_from": first["run_dir"],
            "optim.lr": 1e-30,  # so that what was taken is still there at the end
            "optim.weight_decay": 0.0,
            "train.steps": 2,
        },
        run_dir=tmp_path / "run",
    )
    summary = run_gang(crews(4), prepared, Watch(tmp_path / "run"))
    assert summary["weights_sha256"] == first["weights_sha256"]
