"""One contender of `shoal bench step --peers`: `python -m shoal.bench.step_worker FOLDER`, told what to do by JOB."""

import contextlib
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from shoal.bench.step_contenders import CONTENDERS
from shoal.bench.step_turns import Link, Turns
from shoal.core.errors import UserError
from shoal.core.process import choose_device
from shoal.core.sessions import end_with_parent
from shoal.recipe.load import check_tree
from shoal.recipe.schema import Recipe

JOB = "job.json"
SOCKET = "socket"


def main() -> int:
    """Be the contender that the job names; the exit status."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for whoever measures
    folder = Path(sys.argv[1])
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    if os.getppid() != job["parent"]:  # it has gone before it could take this one along
        return 1
    sys.path[:0] = [path for path in job["paths"] if path not in sys.path]
    if job["packages"] is not None:
        sys.path.append(job["packages"])  # behind Shoal's own, which it must not replace
    if job["contender"] == "shoal_ray":
        return _through_ray(job, folder)
    return serve(job, folder)


def _through_ray(job: dict[str, Any], folder: Path) -> int:
    """Have a worker on Ray do so; what is the matter with Ray itself is told from here."""
    from shoal.bench.step_ray import train_on_ray

    try:
        return train_on_ray(check_tree(job["recipe"]), job, folder)
    except Exception as error:  # noqa: BLE001 - told in full
        with contextlib.suppress(OSError):  # the worker has told more
            link = Link(folder / SOCKET)
            _tell_failure(link, error)
            link.close()
        return 1


def serve(job: dict[str, Any], folder: Path) -> int:
    """Be the contender, here; the exit status."""
    link = Link(folder / SOCKET)
    try:
        be(job, link)
    except Exception as error:  # noqa: BLE001 - told in full
        _tell_failure(link, error)
        return 1
    finally:
        link.close()
    return 0


def _tell_failure(link: Link, error: Exception) -> None:
    traceback.print_exception(error)
    words = str(error).strip().splitlines()[:1]
    is_refused = isinstance(error, UserError)
    message = "".join(words) if is_refused else ": ".join([type(error).__name__, *words])
    link.tell({"failed": message, "is_refused": is_refused})


def be(job: dict[str, Any], link: Link) -> None:
    """Train as the job says, until nobody asks for another turn."""
    recipe = check_tree(job["recipe"]).recipe
    contender = CONTENDERS[job["contender"]]
    device = choose_device(recipe.cluster.gpus_per_worker)
    turns = Turns(link, device)
    if contender.is_shoal:
        from shoal.bench import step_shoal

        step_shoal.train(recipe, job, turns, device)
        return
    _be_peer(contender.kind, contender.compiles, recipe, job, turns, device)


def _be_peer(
    kind: str, compiles: bool, recipe: Recipe, job: dict[str, Any], turns: Turns, device: torch.device
) -> None:
    from shoal.bench.peers.step_setup import set_up
    from shoal.bench.step import build_bench
    from shoal.bench.step_facts import facts_of, flops_of_step
    from shoal.bench.step_recipes import peer_precision
    from shoal.parallel.numerics import check_precision, torch_settings

    precision = peer_precision(recipe, device)
    check_precision(precision, device)
    with torch_settings(
        precision=precision,
        deterministic=recipe.train.deterministic,
        threads=recipe.cluster.threads_per_worker,
        device=device,
    ):
        bench = build_bench(recipe)
        facts = facts_of(bench) | {"precision": precision, "compiles": compiles}
        if job["counts_flops"]:
            facts["flops"] = flops_of_step(bench)
        setup = set_up(bench, job, precision, compiles)
        train = importlib.import_module(f"shoal.bench.peers.step_{kind}").train
        turns.facts = facts
        train(setup, turns)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of a loader, or of a compiler, may take their time to wind up
