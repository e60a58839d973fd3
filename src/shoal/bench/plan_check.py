"""`shoal plan --check`: a few real steps of a recipe on this machine, and their memory beside what was foreseen."""

import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.bench.comm_workers import explain
from shoal.bench.commands import started
from shoal.core.errors import RunError, UserError
from shoal.launch.crew import LOOPBACK
from shoal.launch.environment import network_environment
from shoal.launch.job import own_paths
from shoal.recipe.schema import Recipe
from shoal.train.advise import Outcome

TOLERANCE, SLACK = 0.1, 16 << 20
"""How far off a prediction may be: a share of what was measured, or so many bytes, where that is more."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
"""Has the C library give back what is freed at once, so that the memory of a process is that of its live tensors."""
HOW = {
    "cuda": "most that PyTorch's allocator had given out at once, in the second step or later",
    "cpu": "most memory of a worker's own that was resident at once, in the second step or later, over what it had "
    "before the model was built; the C library gives freed memory back at once for this, which it does not in a run",
}
_LOOK_EVERY_S = 0.05
_CAUSE_S = 1.0
"""How long the others get to fail as well: the first to end may only have lost the one that failed."""
_LIMIT_S = 1800.0


def compare(recipe: Recipe, outcome: Outcome, num_steps: int = 3) -> dict[str, Any]:
    """Take steps as `outcome` foresees them, and put both beside each other. For the worker that took most."""
    train = recipe.train.model_copy(update={"micro_batch": outcome.micro_batch})
    measured = measure(recipe.model_copy(update={"parallel": outcome.option.parallel, "train": train}), num_steps)
    most = max(measured, key=lambda worker: worker["peak"])
    memory = outcome.memory
    rows = {"peak": (memory.total, most["peak"])}
    if outcome.option.parallel.strategy != "deepspeed":  # which holds weights in several forms
        predicted, found = memory.weights + memory.optimizer, most["weights"] + most["optimizer"]
        rows = {
            "weights": (memory.weights, most["weights"]),
            "optimizer": (memory.optimizer, most["optimizer"]),
            "all else": (memory.total - predicted, most["peak"] - found),
            **rows,
        }
    parts = {
        name: {
            "predicted_bytes": predicted,
            "measured_bytes": found,
            "difference": predicted / found - 1 if found > 0 else None,
        }
        for name, (predicted, found) in rows.items()
    }
    is_right = abs(memory.total - most["peak"]) <= max(TOLERANCE * most["peak"], SLACK)
    facts = {"strategy": outcome.option.name, "micro_batch": outcome.micro_batch, "steps": num_steps}
    return facts | {"parts": parts, "agrees": is_right, "how": HOW[most["device"]], "workers": measured}


def measure(recipe: Recipe, num_steps: int) -> list[dict[str, Any]]:
    """What each worker took, in bytes, by rank: `peak` in a step, `between` steps, and by part."""
    workers = recipe.cluster.workers
    environment = network_environment(LOOPBACK, {}) | {"TORCH_CPP_LOG_LEVEL": "ERROR"} | GIVES_BACK
    with tempfile.TemporaryDirectory() as temporary, contextlib.ExitStack() as stack:
        folder = Path(temporary)
        job = {"recipe": recipe.model_dump(mode="json"), "steps": num_steps, "world_size": workers}
        job |= {"port": stack.enter_context(_meeting_place(workers)), "paths": own_paths(), "parent": os.getpid()}
        file = folder / "job.json"
        file.touch(mode=0o600)  # the recipe may hold what came from the environment
        file.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "shoal.bench.plan_worker", str(folder)]
        logs = [folder / f"log-{rank}" for rank in range(workers)]
        processes = [
            stack.enter_context(started([*command, str(rank)], log, environment)) for rank, log in enumerate(logs)
        ]
        deadline = time.monotonic() + _LIMIT_S
        statuses: list[int | None] = [None]
        while None in statuses and time.monotonic() < deadline:
            statuses = [process.poll() for process in processes]
            if any(statuses):
                deadline = min(deadline, time.monotonic() + _CAUSE_S)
            time.sleep(_LOOK_EVERY_S)
        if (failure := explain(folder, statuses)) is not None:
            raise (UserError if failure.is_refused else RunError)(f"--check: {failure.message}")
        return [_read(folder / f"found-{rank}.json") for rank in range(workers)]


@contextlib.contextmanager
def _meeting_place(workers: int) -> Iterator[int]:
    """The port where workers find each other, on the loopback alone."""
    from torch._C._distributed_c10d import TCPStore

    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        descriptor = os.dup(server.fileno())
    # It listens as long as it is there.
    store = TCPStore(LOOPBACK, port, workers, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    yield port
    del store


def _read(path: Path) -> dict[str, Any]:
    """Without the dataset, which is not the step's."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    # Optimizer state comes with the first step, so that the second is the first whole one.
    peak = max(found["steps"][1:] or found["steps"]) - found["data"]
    return found | {"peak": peak, "between": found["between"] - found["data"]}
