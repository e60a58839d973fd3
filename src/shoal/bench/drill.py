"""Breaking a real run on purpose, beside an undisturbed one, and finding out whether anything was lost.

How a run is broken is in `drill_breaks`; what was lost is read from the folders of both runs (`drill_check`).
"""

import contextlib
import importlib.util
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal.bench.drill_breaks import BREAKS, GO_ON, NEED_A_LAUNCHER, NEED_NODES, NOTICES, Break, LossError, Scene
from shoal.bench.drill_check import Comparison, Outcome, compare, excuses_of, read_outcome
from shoal.bench.drill_cluster import DrillCluster
from shoal.bench.drill_run import OverError, TrainRun, last_step
from shoal.checkpoint.folder import step_name
from shoal.core.errors import RunError, UserError
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe

_LEAST_HANG_TIMEOUT_S = 3.0
_MOST_FAILURES = 1000
"""A run that saves several times a second is not stopped by a disk that is full for one."""


@dataclass(frozen=True)
class Request:
    """What to drill."""

    recipes: Sequence[str]
    overrides: Sequence[str]
    drills: Sequence[str] = ("kill-worker",)
    launcher: str = "auto"
    """auto, local or ray."""
    address: str | None = None
    seed: int = 0
    """Fixes which worker is broken and at which step."""
    folder: Path | None = None
    """Where the runs go, and stay; None: a temporary folder."""
    keep: bool = False
    """Keep the temporary folder; it is kept anyway where a drill failed."""
    say: Callable[[str], None] = lambda message: None


@dataclass(frozen=True)
class Result:
    """How one drill went."""

    drill: str
    passed: bool
    losses: list[str]
    """What was lost, in words."""
    nothing_broken: str | None = None
    """Why this drill proves nothing, if so."""
    broken: str | None = None
    rank: int | None = None
    at_step: int | None = None
    noticed_after_s: float | None = None
    training_again_after_s: float | None = None
    steps_lost: int | None = None
    """Steps that were trained a second time."""
    world_sizes: list[int] = field(default_factory=list)
    same_weights: bool | None = None
    loss_difference: float | None = None
    compared: str | None = None
    """By what it was judged."""
    run_dir: str | None = None


@dataclass(frozen=True)
class _Place:
    """Where all runs of a command take place."""

    folder: Path
    arguments: list[str]
    cluster: DrillCluster | None

    @contextlib.contextmanager
    def run(self, name: str, limit_s: float) -> Iterator[TrainRun]:
        """A run that is ended when its context is left."""
        environment = self.cluster.environment if self.cluster is not None else {}
        run = TrainRun(self.folder / name, self.arguments, environment, limit_s)
        try:
            yield run
        finally:
            run.end()


def run_drills(request: Request) -> dict[str, Any]:
    """Train undisturbed, then once for every drill; what was found."""
    request, recipe = _checked(request)
    results: list[Result] = []
    with _place(request, recipe, results) as place:
        steady = _undisturbed(request, place)
        excuses = excuses_of(recipe, place.folder / "undisturbed")
        for name in request.drills:
            if place.cluster is not None and results:
                place.cluster.mend()
            results.append(_drill(name, request, place, steady, excuses))
            request.say(f"  {'passed' if results[-1].passed else 'failed'}")
    return {
        "recipe": recipe.name,
        "launcher": request.launcher,
        "workers": recipe.cluster.workers,
        "min_workers": recipe.cluster.min_workers,
        "seed": request.seed,
        "passed": all(result.passed for result in results),
        "undisturbed": {name: steady.summary[name] for name in ("weights_sha256", "step", "world_size", "took_s")},
        "drills": [asdict(result) for result in results],
        "folder": str(place.folder) if place.folder.exists() else None,
    }


def _checked(request: Request) -> tuple[Request, Recipe]:
    """The request with nothing left open, and its recipe; `UserError` for what cannot work."""
    launcher = request.launcher
    if launcher == "auto":
        launcher = "ray" if request.address or importlib.util.find_spec("ray") else "local"
    if request.address is not None and launcher == "local":
        raise UserError("--address: is for Ray, but --launcher is local; drop one of them")
    recipe = load_recipe(request.recipes, request.overrides).recipe
    overrides = [*request.overrides]
    for name in request.drills:
        if name in NEED_NODES:
            _check_nodes(name, launcher, request.address, recipe)
            overrides.append("cluster.gpus_per_worker=0")
        if name in NEED_A_LAUNCHER and launcher == "local" and recipe.cluster.workers == 1:
            raise UserError(
                f"--workers: 1 trains in the launcher itself, so nobody would be left after --{name}; use 2"
            )
    # Every step is compared, and the checkpoint before the newest is needed where that one is spoilt.
    overrides += ["observe.every_steps=1", f"checkpoint.keep_last={max(2, recipe.checkpoint.keep_last)}"]
    return replace(request, launcher=launcher, overrides=overrides), load_recipe(request.recipes, overrides).recipe


def _check_nodes(name: str, launcher: str, address: str | None, recipe: Recipe) -> None:
    if launcher == "local":
        raise UserError(f"--{name}: takes a machine away from Ray, but --launcher is local; drop one of them")
    if address is not None:
        raise UserError(
            f"--{name}: the machines of {address} are not the drill's to take away; "
            "without --address it starts a cluster of its own on this machine"
        )
    if recipe.cluster.gpus_per_worker:
        raise UserError(
            f"cluster.gpus_per_worker: {recipe.cluster.gpus_per_worker}, but the nodes that --{name} starts share this "
            "machine and have no GPU of their own; set it to 0 for this drill"
        )


@contextlib.contextmanager
def _place(request: Request, recipe: Recipe, results: Sequence[Result]) -> Iterator[_Place]:
    """A folder, and nodes where some drill needs them. All runs go there then, so that they can be compared."""
    folder = request.folder
    if folder is None:
        folder = Path(tempfile.mkdtemp(prefix="shoal-drill-"))
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--dir: {folder} is not an empty folder; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    arguments = ["--launcher", request.launcher]
    if request.address is not None:
        arguments += ["--address", request.address]
    with contextlib.ExitStack() as stack:
        if request.folder is None and not request.keep:
            stack.callback(lambda: None if any(not r.passed for r in results) else shutil.rmtree(folder))
        cluster = None
        if any(name in NEED_NODES for name in request.drills):
            size = recipe.cluster
            # One to spare, where fewer workers will not do.
            num_nodes = size.workers + ((size.min_workers or size.workers) == size.workers)
            request.say(f"starting a Ray cluster of {num_nodes} nodes on this machine")
            cluster = DrillCluster(num_nodes, size.cpus_per_worker or 1, folder / "cluster.log")
            stack.callback(cluster.close)
            arguments += ["--address", cluster.address]
        yield _Place(folder, arguments, cluster)


def _undisturbed(request: Request, place: _Place) -> Outcome:
    """The run that the others are held against."""
    request.say("undisturbed: training")
    began = time.monotonic()
    with place.run("undisturbed", limit_s=float("inf")) as run:
        run.start([*request.recipes, *request.overrides])
        status = run.wait_for_end()
    if status == 2:
        raise UserError(run.complaint())
    if status != 0:
        raise RunError(f"the undisturbed run ended with status {status}: {run.complaint()}")
    summary = run.summary() | {"took_s": round(time.monotonic() - began, 1)}
    steady = read_outcome(run.run_dir, status, summary)
    last, saved = summary["step"], steady.saved_steps
    request.say(f"  {last} steps in {summary['took_s']:.0f} s, weights {summary['weights_sha256'][:16]}")
    if len(saved) < 3 or saved[1] + 1 >= last:
        raise UserError(
            f"checkpoint.every_steps: the run saves after steps {', '.join(map(str, saved))} and ends at {last}; "
            "a drill breaks it after the second checkpoint, so save more often or train longer"
        )
    return steady


def _drill(name: str, request: Request, place: _Place, steady: Outcome, excuses: Sequence[str]) -> Result:
    """Train once more, and break that run."""
    draw = random.Random(f"{request.seed} {name}")  # noqa: S311 - to be drawn again by the same seed
    first, last = steady.saved_steps[1] + 1, steady.summary["step"]
    step = draw.randint(first, first + (last - first) // 2)
    words = [*request.recipes, *request.overrides]
    words += _own_words(name, request, steady)
    request.say(f"{name}: training, to be broken at step {step}")
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(place.run(name, limit_s=300.0 + 5 * steady.summary["took_s"]))
        run.start(words)
        try:
            reached = run.wait_for_step(step)
            before = stack.enter_context(run.reports_as_they_are())
            done = BREAKS[name](Scene(run, draw, place.cluster, stack))
            request.say(f"  {done.what}")
            status = run.wait_for_end()
        except OverError as error:
            if run.wait_for_end() == 0:
                return Result(name, False, [], nothing_broken=f"{error}; train longer for this drill")
            return Result(name, False, [f"{error}: {run.complaint()}"], run_dir=str(run.run_dir))
        except (TimeoutError, LossError) as error:
            return Result(name, False, [str(error)], run_dir=str(run.run_dir))
        broken = read_outcome(run.run_dir, status, run.summary(), run.complaint() if status else "")
        result = judge(name, done, broken, compare(steady, broken, excuses), last_step(before))
        return replace(result, at_step=reached, run_dir=str(run.run_dir))


def _own_words(name: str, request: Request, steady: Outcome) -> list[str]:
    """What a drill changes in the recipe; nothing of it changes the weights."""
    if name == "hang-worker":
        return [f"failures.hang_timeout_s={max(_LEAST_HANG_TIMEOUT_S, 4 * steady.longest_step_s()):.1f}"]
    if name == "fill-disk":
        recipe = load_recipe(request.recipes, request.overrides).recipe
        # Processes that read data would have no room for their batches, which they pass on in files of memory.
        in_line = ["data.workers=0"] if recipe.data is not None and recipe.data.workers else []
        return [f"checkpoint.max_failures={max(_MOST_FAILURES, recipe.checkpoint.max_failures)}", *in_line]
    return []


def judge(name: str, done: Break, broken: Outcome, comparison: Comparison, reached: int) -> Result:
    """Put together what is known of a drill; `reached` is the last step before the run was started again."""
    notice = broken.first(NOTICES[name], done.time) if name in NOTICES else None
    noticed = notice["time"] if notice else done.noticed
    resume = broken.first("resume", done.time)
    again = broken.first("first_step", resume["time"]) if resume else None
    steps_lost = max(0, reached - resume["step"]) if resume else 0 if name in GO_ON else None
    losses, nothing_broken = [*comparison.losses, *_shortcomings(name, done, broken, steps_lost)], None
    if name == "fill-disk" and done.over is None:
        nothing_broken = "the run was over before a save failed; train longer for this drill"
    elif name not in GO_ON and (noticed is None or resume is None):
        nothing_broken = "the run was over before it noticed; train longer for this drill"
    return Result(
        drill=name,
        passed=not losses and nothing_broken is None,
        losses=losses,
        nothing_broken=None if losses else nothing_broken,
        broken=done.what,
        rank=done.rank,
        noticed_after_s=_since(done, noticed),
        training_again_after_s=_since(done, again["time"] if again else None),
        steps_lost=steps_lost,
        world_sizes=broken.sizes,
        same_weights=comparison.same_weights,
        loss_difference=comparison.loss_difference,
        compared=comparison.compared,
    )


def _shortcomings(name: str, done: Break, broken: Outcome, steps_lost: int | None) -> list[str]:
    """What this drill asks for besides the same weights, and did not get."""
    resume, found = broken.first("resume", done.time), []
    if name in GO_ON and any(broken.first(event, done.time) for event in ("failure", "hang", "restart", "resume")):
        found.append(f"the workers failed or were restarted, although {GO_ON[name]}")
    if name == "preempt" and steps_lost is not None and steps_lost > 1:
        found.append(f"{steps_lost} steps were trained again, although the preemption was announced")
    if done.resumes_at is not None and (resume is None or resume["step"] != done.resumes_at):
        where = "the beginning" if resume is None else f"step {resume['step']}"
        found.append(f"the run went on from {where} instead of step {done.resumes_at}")
    if done.spoilt is not None:
        rejected = broken.first("checkpoint_rejected", done.time)
        if rejected is None or rejected["step"] != done.spoilt:
            found.append(f"no checkpoint_rejected event tells that step {done.spoilt} is spoilt")
        if not any(kept.startswith(f"corrupt-{step_name(done.spoilt)}-") for kept in broken.checkpoints):
            found.append(f"the spoilt checkpoint of step {done.spoilt} was not set aside")
    if done.over is not None:
        if broken.first("save_failed", done.time) is None:
            found.append("saves failed, and no save_failed event tells of it")
        if broken.first("save", done.over) is None:
            found.append("nothing was saved any more when the disk took files again")
    return found


def _since(done: Break, then: float | None) -> float | None:
    return None if then is None else round(then - done.time, 2)
