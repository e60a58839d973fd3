"""Starting a run: where it goes, what it goes on from, and who carries it out."""

import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError, UserError, WorkerError
from shoal.core.secrets import scrub
from shoal.core.storage import expand_home
from shoal.launch.interrupts import Phase
from shoal.observe.records import Observer
from shoal.observe.runs import differing_fields, find_run, read_run
from shoal.recipe.identity import changed_field, fixed_fields
from shoal.recipe.load import LoadedRecipe, check_tree, load_recipe, origins_with
from shoal.recipe.merge import merge, overlay_of, override_paths
from shoal.recipe.parallel_checks import check_ds_config
from shoal.recipe.yaml_tree import read_yaml
from shoal.train.track import check_tracking

_BEFORE_ITS_RECIPE = {".lock", "events.jsonl", "metrics.jsonl", "workers.jsonl"}
"""What the folder of a run may hold when it has no recipe yet."""


@dataclass(frozen=True)
class Prepared:
    """A run that can start."""

    loaded: LoadedRecipe
    run_dir: Path
    resume: bool = False
    finished: Mapping[str, Any] | None = None
    """The summary, where the run to resume has nothing left to do."""


def prepare(
    sources: Sequence[str | Path | Mapping[str, Any]] = (),
    overrides: Iterable[str] | Mapping[str, Any] = (),
    *,
    run_dir: str | Path | None = None,
    resume: str | Path | None = None,
    or_resume: bool = False,
) -> Prepared:
    """Read and check everything that can be checked before torch is loaded. Writes nothing.

    Args:
        or_resume: Go on with the run that `run_dir` holds, if it holds one: for schedulers that start a command again.
    """
    if or_resume:
        if run_dir is None:
            raise UserError("--or-resume: goes on with the run in a folder that is said before; give it with --run-dir")
        if resume is not None:
            raise UserError("--or-resume: is --resume where the folder holds a run; give one of them")
        folder = expand_home(run_dir)
        if (folder / "recipe.yaml").is_file():
            overrides = load_recipe(sources, overrides).tree()  # what of it must not change is refused below
            sources, run_dir, resume = (), None, folder
    if resume is not None:
        if sources:
            raise UserError("--resume: takes the recipe of the run it resumes; leave out the recipe")
        if run_dir is not None:
            raise UserError("--run-dir: the run goes on in its own folder; leave this out with --resume")
        prepared = _prepare_resume(str(resume), overrides)
    else:
        if run_dir is not None and (not str(run_dir) or "://" in str(run_dir)):
            raise UserError(
                f"--run-dir: {str(run_dir)!r} is no folder; to upload to a store there is checkpoint.upload_to"
            )
        loaded = load_recipe(sources, overrides)
        check_tracking(loaded, is_here=False)  # what only a machine that trains can tell comes later
        prepared = Prepared(loaded, expand_home(run_dir) if run_dir is not None else new_run_dir(loaded.recipe.name))
    if under_torchrun():
        from shoal.launch.torchrun import as_many_as_started

        return as_many_as_started(prepared, overrides)  # whether the folder is new shows when workers have met
    if resume is None and not (or_resume and _has_nothing(prepared.run_dir)):
        check_is_new(prepared.run_dir)
    return prepared


def _has_nothing(folder: Path) -> bool:
    """Whether a run that was begun there was ended before it had a recipe, and so anything to lose."""
    return folder.is_dir() and {item.name for item in folder.iterdir()} <= _BEFORE_ITS_RECIPE


def check_is_new(target: Path, option: str = "--run-dir") -> None:
    """Refuse a folder that holds something."""
    if target.is_file():
        raise UserError(f"{option}: {target} is a file")
    if target.is_dir() and any(target.iterdir()):
        goes_on = any((target / name).is_file() for name in ("recipe.yaml", "search.yaml"))
        hint = f", or go on there with --resume {target}" if goes_on else ""
        raise UserError(f"{option}: {target} is not empty; choose another{hint}")


def new_run_dir(name: str, root: Path = Path("runs")) -> Path:
    """`runs/NAME-DATE-ID`"""
    return root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _prepare_resume(name: str, overrides: Iterable[str] | Mapping[str, Any]) -> Prepared:
    by_path = override_paths(overrides)
    if "://" in name:  # its disk is gone, and it is left in a store
        from shoal.launch.from_store import folder_for

        folder, upload_to = folder_for(name)
        by_path = {("checkpoint", "upload_to"): upload_to} | by_path
    else:
        folder = find_run(name)
    tree, origins = read_yaml(folder / "recipe.yaml")
    changed = merge(tree, overlay_of(by_path))
    loaded = check_tree(changed, origins_with(origins, by_path))
    before = fixed_fields(check_tree(tree, origins).recipe)
    if (changed_name := changed_field(before, fixed_fields(loaded.recipe))) is not None:
        raise UserError(f"{changed_name}: cannot change when a run is resumed; start a new run for that")
    run = read_run(folder)
    if run.summary.get("status") != "done" or run.status != "done":
        return Prepared(loaded, folder, resume=True)
    differing = differing_fields([tree, changed])
    if not differing:
        return Prepared(loaded, folder, resume=True, finished=run.summary)
    train, summary = loaded.recipe.train, run.summary
    if summary.get("ended_by") == "early_stop":
        goes_on, remedy = any(name.startswith("early_stop") for name in differing), "change early_stop"
    else:
        goes_on = (train.steps or 0) > summary["step"] or (train.epochs or 0) > summary["epoch"]
        remedy = f"raise train.steps above {summary['step']} or train.epochs above {summary['epoch']:g}"
    if not goes_on:
        raise UserError(f"--resume: {folder} is done at step {summary['step']}; to train on, {remedy}")
    return Prepared(loaded, folder, resume=True)


@dataclass(frozen=True)
class Launch:
    """How to carry out a prepared run."""

    console: Observer
    stop: Callable[[], str | None] = lambda: None
    enter: Callable[[Phase], None] = lambda phase: None
    """Told what the run does, which decides what a signal means."""
    started: float = field(default_factory=time.time)
    launcher: str = "auto"
    """auto, local, torchrun or ray."""
    address: str | None = None
    """The Ray cluster to use; None starts one in this process, for as long as the run takes."""
    wait_s: float = 0.0
    """How long to wait for what the cluster does not have yet."""
    verbose: bool = False
    """Show what Ray or torchrun itself has to say."""
    dashboard: bool = False
    """Start Ray's dashboard with a Ray of our own."""
    give_up_s: float | None = None
    """How long to wait for places before `NoRoomError` lets others have them; None: as recipe and `wait_s` say."""
    pause_at: float | None = None
    """Evaluate, save and end when so many epochs are done, or steps where the recipe counts those."""
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds from `started` to what the launcher has done last of each kind: where a start spends its time."""

    @property
    def asked(self) -> dict[str, str]:
        """What whoever resumes the run must say again: where it runs is not part of its recipe."""
        where = {"launcher": self.launcher} if self.launcher != "auto" else {}
        return where if self.address is None else where | {"address": scrub(self.address)}

    def mark(self, name: str) -> None:
        """It is done now."""
        self.marks[name] = round(time.time() - self.started, 3)


def launch(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Carry out a run and return its summary."""
    if prepared.finished is not None:
        return dict(prepared.finished)
    how.mark("prepared")
    try:
        _check_files(prepared, how.address)
        return _LAUNCHERS[choose_launcher(prepared, how)](prepared, how)
    except WorkerError as error:
        error.trace = prepared.loaded.hide(error.trace)
        raise
    except (UserError, RunError) as error:
        told = type(error)(prepared.loaded.hide(str(error)))
        told.__dict__.update(error.__dict__)
        raise told from error.__cause__


def _check_files(prepared: Prepared, address: str | None) -> None:
    """What a recipe names and workers will need, before they are started; on a cluster it may be there alone."""
    if address is None:
        check_tracking(prepared.loaded)
    recipe = prepared.loaded.recipe
    config = recipe.parallel.deepspeed.config
    if config is not None and (address is None or Path(config).expanduser().is_file()):
        check_ds_config(recipe)


def choose_launcher(prepared: Prepared, how: Launch) -> str:
    """Who starts the processes: `auto` is torchrun under torchrun, Ray for several workers, and else this process."""
    workers = prepared.loaded.recipe.cluster.workers
    if how.address is not None and how.launcher in ("local", "torchrun"):
        raise UserError(f"--address: is for Ray, but --launcher is {how.launcher}; drop one of them")
    if under_torchrun():
        if how.launcher not in ("auto", "torchrun"):
            raise UserError(f"--launcher: {how.launcher} under torchrun; start it without torchrun, or leave this out")
        return "worker"
    if how.dashboard and (how.address is not None or how.launcher in ("local", "torchrun")):
        raise UserError("--dashboard: is for a Ray that is started for the run, and there is none here; leave it out")
    if how.launcher != "auto":
        return how.launcher
    if how.dashboard:
        return "ray"
    if how.address is None and workers == 1:
        return "local"
    return "ray" if how.address is not None or importlib.util.find_spec("ray") is not None else "local"


def under_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_silent() -> bool:
    """Whether another process of the run does the talking: under torchrun, rank 0."""
    return under_torchrun() and os.environ["RANK"] != "0"


def _local(prepared: Prepared, how: Launch) -> dict[str, Any]:
    from shoal.launch.local import run_here, run_workers_here

    return (run_here if prepared.loaded.recipe.cluster.workers == 1 else run_workers_here)(prepared, how)


def _ray(prepared: Prepared, how: Launch) -> dict[str, Any]:
    from shoal.launch.on_ray import run_on_ray

    return run_on_ray(prepared, how)


def _torchrun(prepared: Prepared, how: Launch) -> dict[str, Any]:
    from shoal.launch.by_torchrun import run_by_torchrun

    return run_by_torchrun(prepared, how)


def _worker(prepared: Prepared, how: Launch) -> dict[str, Any]:
    from shoal.launch.torchrun import run_under_torchrun

    return run_under_torchrun(prepared, how)


_LAUNCHERS = {"local": _local, "ray": _ray, "torchrun": _torchrun, "worker": _worker}
