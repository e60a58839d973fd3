"""`shoal plan --check`: a few real steps of a recipe on this machine, and their memory beside what was foreseen."""

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.bench.workers import run_job
from shoal.core.errors import RunError, UserError
from shoal.recipe.load import LoadedRecipe
from shoal.train.advise import Outcome

TOLERANCE, SLACK = 0.1, 16 << 20
"""How far off a prediction may be: a share of what was measured, or so many bytes, where that is more."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
"""Has the C library give back what is freed at once, so that the memory of a process is that of its live tensors."""
HOST_SLACK = 512 << 20
"""The same for what is kept in the host's memory, where libraries load more of themselves as they are used."""
HOW = {
    "cuda": "most that PyTorch's allocator had given out at once, in the second step or later",
    "cpu": "most memory of a worker's own that was resident at once, in the second step or later, over what it had "
    "before the model was built; the C library gives freed memory back at once for this, which it does not in a run",
}
HOW_IN_HOST = "in host: most memory of a worker's own, pinned or not, over what it and its data had before"
_LIMIT_S = 1800.0


def compare(loaded: LoadedRecipe, outcome: Outcome, num_steps: int = 4) -> dict[str, Any]:
    """Take steps as `outcome` foresees them, and put both beside each other. For the worker that took most."""
    measured = measure(recipe_for(loaded, outcome), num_steps)
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
    how = HOW[most["device"]]
    if hosts := [worker["host"] for worker in measured if "host" in worker]:
        rows["in host"] = (memory.host, max(hosts))
        how = f"{how}; {HOW_IN_HOST}"
    parts = {
        name: {
            "predicted_bytes": predicted,
            "measured_bytes": found,
            "difference": predicted / found - 1 if found > 0 else None,
        }
        for name, (predicted, found) in rows.items()
    }
    slacks = {"peak": SLACK, "in host": HOST_SLACK}
    off = [name for name, slack in slacks.items() if name in rows and not _is_near(*rows[name], slack)]
    # The first ones make what the others find: the optimizer's state, pinned memory. On the CPU, memory that is given
    # back at once makes them slower than those of a run.
    step_s = max(min(worker["seconds"]) for worker in measured) if most["device"] == "cuda" else None
    facts = {"strategy": outcome.option.name, "micro_batch": outcome.micro_batch, "steps": num_steps, "step_s": step_s}
    return facts | {"parts": parts, "agrees": not off, "off": off, "how": how, "workers": measured}


def _is_near(predicted: int, found: int, slack: int) -> bool:
    return abs(predicted - found) <= max(TOLERANCE * found, slack)


def recipe_for(loaded: LoadedRecipe, outcome: Outcome) -> LoadedRecipe:
    """The recipe that takes steps as `outcome` foresees them.

    A micro-batch that follows from the rest of the recipe is left to follow from it: it need not divide anything.
    """
    recipe = loaded.recipe
    # Packing by powersgd begins late, and the few steps of a check are to have it.
    parallel = outcome.option.parallel.model_copy(update={"powersgd_start_step": 2})
    changes: dict[str, Any] = {"parallel": parallel}
    if not outcome.is_own_micro_batch:
        changes["train"] = recipe.train.model_copy(update={"micro_batch": outcome.micro_batch})
    changed = recipe.model_copy(update=changes)
    before, after = (one.model_dump(mode="json") for one in (recipe, changed))
    references = {path: text for path, text in loaded.references.items() if _at(before, path) == _at(after, path)}
    return replace(loaded, recipe=changed, references=references)


def _at(tree: Any, path: Sequence[str]) -> Any:
    """What is at a path of a tree."""
    for name in path:
        tree = tree[int(name)] if isinstance(tree, list) else tree.get(name)
    return tree


def measure(loaded: LoadedRecipe, num_steps: int) -> list[dict[str, Any]]:
    """What each worker took, in bytes, by rank: `peak` in a step, `between` steps, and by part."""
    recipe, cluster = loaded.recipe, loaded.recipe.cluster
    job = {"what": "memory", "recipe": loaded.tree(), "steps": num_steps}
    job |= {"gpus_per_worker": cluster.gpus_per_worker, "backend": recipe.parallel.backend}
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        failure = run_job(job, cluster.workers, Path(folder), GIVES_BACK, found.append, limit_s=_LIMIT_S)
    if failure is not None:
        raise (UserError if failure.is_refused else RunError)(f"--check: {failure.message}")
    return [_without_data(worker) for worker in found]


def _without_data(found: dict[str, Any]) -> dict[str, Any]:
    """Without the dataset, which is not the step's."""
    # Optimizer state comes with the first step, so that the second is the first whole one.
    peak = max(found["steps"][1:] or found["steps"]) - found["data"]
    return found | {"peak": peak, "between": found["between"] - found["data"]}
