"""Starting a search: a Ray to search on, places for its trials, and what is written when it ends."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores
from shoal.core.storage import to_json_line, write_atomically
from shoal.launch.interrupts import Phase
from shoal.launch.local import check_shared
from shoal.launch.nursery import Nursery, new_nursery_name
from shoal.launch.on_ray import check_address, connected, is_here, readers_of
from shoal.launch.policy import Size
from shoal.launch.room import size_of_worker
from shoal.launch.run import Launch
from shoal.observe.console import SilentConsole
from shoal.recipe.schema import ClusterSection
from shoal.tune.failures import too_many_failures
from shoal.tune.folder import SearchFolder, is_search, read_setup
from shoal.tune.journal import Journal, read_journal
from shoal.tune.page import write_search_page
from shoal.tune.results import best_trial, is_over, searched_s, summarise, trials_csv
from shoal.tune.setup import Setup
from shoal.tune.tracking import EVENT, Tracking
from shoal.tune.trial import Trial, fold
from shoal.tune.watching import View

_WRITE_EVERY_S = 30.0


@dataclass(frozen=True)
class TuneLaunch:
    """How to carry out a search."""

    view: View
    stop: Callable[[], str | None] = lambda: None
    enter: Callable[[Phase], None] = lambda phase: None
    address: str | None = None
    """The Ray cluster to use; None starts one in this process, for as long as the search takes."""
    verbose: bool = False
    dashboard: bool = False
    retry_failed: bool = False
    """Start trials again that have failed."""
    started: float = field(default_factory=time.time)


def run_search(setup: Setup, folder: SearchFolder, how: TuneLaunch) -> dict[str, Any]:
    """Search, and return the summary; what there is at the end is written in any case."""
    check_address(how.address)
    share = _share(setup, how.address)
    is_resumed = is_search(folder.path)
    new = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    folder.open()
    with contextlib.ExitStack() as stack:
        stack.callback(folder.close)
        journal = Journal(folder.path)
        stack.callback(journal.close)
        if (made := len(fold(journal.read()))) > setup.num_trials:
            raise UserError(
                f"tune.trials: {made} have been made, and {setup.num_trials} is fewer; it can only be raised"
            )
        try:
            folder.write_setup(setup)
            if (summary := _finished(setup, folder, journal, how)) is None:
                summary = _search_on_ray(setup, folder, journal, share, how, stack)
        except (UserError, KeyboardInterrupt):
            if not is_resumed and not any((folder.path / "trials").iterdir()):
                _remove(folder.path, new)
            raise
    if summary["status"] == "failed":
        error = RunError(summary["error"])
        error.__dict__["summary"] = summary
        raise error
    return summary


def _remove(folder: Path, new: list[Path]) -> None:
    """Nothing of a search that did not start stays behind; `new`: the folders that were made for it."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder not in new:
        folder.mkdir()
    for path in new:
        with contextlib.suppress(OSError):  # gone already, or another search is there by now
            path.rmdir()


def _finished(setup: Setup, folder: SearchFolder, journal: Journal, how: TuneLaunch) -> dict[str, Any] | None:
    """The summary of a search that is resumed and has nothing left to do."""
    trials = fold(journal.read())
    if not is_over(trials, setup):
        return None
    if how.retry_failed and any(trial.status == "failed" for trial in trials.values()):
        return None
    failure = too_many_failures(list(trials.values()), setup.num_trials, setup.section.max_failed)
    if failure is None:
        how.view.note(f"{folder.path} is already done; to search on, raise --trials")
    return _conclude(trials, setup, folder, journal, failure, how)


@dataclass(frozen=True)
class _Share:
    """What a search has of the machine that it starts a Ray on; of a cluster, only what a worker asks for is known."""

    trials: int | None
    """At a time."""
    cpus: int
    """Of each worker."""


def _share(setup: Setup, address: str | None) -> _Share:
    cluster, concurrency = setup.base.recipe.cluster, setup.section.concurrency
    return _Share(concurrency, cluster.cpus_per_worker or 1) if address is not None else own_share(cluster, concurrency)


def own_share(cluster: ClusterSection, concurrency: int | None) -> _Share:
    """How many trials at a time on this machine, and how many cores for each of their workers."""
    cores = usable_cores()
    if cluster.cpus_per_worker is not None:
        needed = cluster.cpus_per_worker * cluster.workers
        if needed > cores:
            raise UserError(
                f"cluster.cpus_per_worker: {cluster.workers} workers need {needed} CPU and this machine has {cores}; "
                "ask for fewer, or leave it out to share the cores"
            )
        return _Share(concurrency or cores // needed, cluster.cpus_per_worker)
    at_a_time = concurrency or max(1, cores // cluster.workers)
    check_shared(at_a_time * cluster.workers, cores)
    return _Share(at_a_time, max(1, cores // (at_a_time * cluster.workers)))


def _search_on_ray(
    setup: Setup, folder: SearchFolder, journal: Journal, share: _Share, how: TuneLaunch, stack: contextlib.ExitStack
) -> dict[str, Any]:
    cluster = setup.base.recipe.cluster
    nursery = new_nursery_name()
    if how.address in (None, "auto") or is_here(str(how.address)):
        stack.callback(Nursery(nursery).close)  # torch is imported while Ray starts
    how.view.note("starting Ray" if how.address is None else "connecting to Ray")
    launch = Launch(SilentConsole(), address=how.address, verbose=how.verbose, dashboard=how.dashboard)
    at_a_time = share.trials or 0
    readers = at_a_time * readers_of(setup.base.recipe)
    stack.enter_context(connected(at_a_time * cluster.workers * share.cpus, launch, readers))
    from shoal.launch.ray_crew import alive_nodes  # not before: importing Ray fixes its settings
    from shoal.tune.search import Search
    from shoal.tune.slots import Slots

    size = Size(cluster.min_workers or cluster.workers, cluster.workers)
    slots = Slots(size, size_of_worker(cluster, alive_nodes()) | {"CPU": float(share.cpus)}, nursery, share.trials)
    stack.callback(slots.close)
    if (obstacle := slots.obstacle()) is not None:
        raise UserError(f"cluster.workers: {obstacle}; ask for fewer or smaller ones")
    tracking = _tracking(setup, folder, journal, how)
    search = Search(
        setup=setup,
        folder=folder,
        journal=journal,
        slots=slots,
        threads=cluster.threads_per_worker or share.cpus,
        view=how.view,
        stop=how.stop,
        on_first_step=lambda: how.enter("training"),
        on_ended=_NowAndThen(journal, how),
        address=how.address,
        extra=tracking.fields | _own_store(setup, folder),
        retry_failed=how.retry_failed,
        began=how.started,
    )
    try:
        search.run()
    finally:
        summary = _conclude(search.trials, setup, folder, journal, search.failure or search.refusal, how)
        tracking.end(search.trials, summary)
    if search.refusal is not None:
        raise UserError(search.refusal)
    return summary


def _own_store(setup: Setup, folder: SearchFolder) -> dict[str, Any]:
    """Where trials upload their checkpoints: runs of all searches have the same names."""
    store = setup.base.tree()["checkpoint"]["upload_to"]
    return {"checkpoint.upload_to": f"{store.rstrip('/')}/{folder.path.name}"} if store else {}


class _NowAndThen:
    """Writes what there is so far, for those who look while the search goes on."""

    def __init__(self, journal: Journal, how: TuneLaunch) -> None:
        self._how = how
        self._journal = journal
        self._next = 0.0

    def __call__(self, search: Any) -> None:
        if (now := time.monotonic()) < self._next:
            return
        setup, folder, wall_s = search.setup, search.folder.path, searched_s(self._journal.read())
        _write(search.trials, setup, folder, summarise(search.trials, setup, folder, "running", wall_s), self._how)
        self._next = now + _WRITE_EVERY_S + 20 * (time.monotonic() - now)  # long ones less often


def _tracking(setup: Setup, folder: SearchFolder, journal: Journal, how: TuneLaunch) -> Tracking:
    known = next((event["run_id"] for event in journal.read() if event["event"] == EVENT), None)
    tracking = Tracking(setup, folder.path, known, how.view.note)
    if tracking.run_id != known:
        journal.add(EVENT, run_id=tracking.run_id)
    return tracking


def _conclude(
    trials: dict[int, Trial],
    setup: Setup,
    folder: SearchFolder,
    journal: Journal,
    reason: str | None,
    how: TuneLaunch,
) -> dict[str, Any]:
    """Sum up, and write down what was found. `reason`: why the search has failed, if it has."""
    if reason is None and is_over(trials, setup) and best_trial(trials, setup.objective) is None:
        reason = _no_value(trials, setup)
    status = "failed" if reason else "done" if is_over(trials, setup) else "interrupted"
    summary = summarise(trials, setup, folder.path, status, searched_s(journal.read()))
    if reason:
        summary["error"] = reason
    _write(trials, setup, folder.path, summary, how)
    return summary


def _write(trials: dict[int, Trial], setup: Setup, folder: Path, summary: dict[str, Any], how: TuneLaunch) -> None:
    try:
        write_results(trials, setup, folder, summary)
    except Exception as error:  # noqa: BLE001 - pages less; the journal has all of it, and shoal report writes them anew
        how.view.note(f"the results could not be written: {type(error).__name__}: {error}")


def _no_value(trials: dict[int, Trial], setup: Setup) -> str:
    if any(setup.objective.metric in result.metrics for trial in trials.values() for result in trial.results):
        return f"tune.metric: {setup.objective.metric} was never a number in any trial"
    reasons = [trial.reason for trial in trials.values() if trial.reason]
    if reasons:
        return f"no trial reported {setup.objective.metric}; the first one ended so: {reasons[0]}"
    known = sorted({name for trial in trials.values() for name in trial.summary.get("metrics", {})})
    return f"tune.metric: no trial reported {setup.objective.metric}; they reported {', '.join(known) or 'nothing'}"


def write_again(path: Path, target: Path | None = None) -> Path:
    """The page of a search as it is now, in its folder unless `target` says where; where it is."""
    setup, events = read_setup(path, {}), read_journal(path)
    trials = fold(events)
    has_failed = too_many_failures(list(trials.values()), setup.num_trials, setup.section.max_failed) is not None
    status = "failed" if has_failed else "done" if is_over(trials, setup) else "running"
    summary = summarise(trials, setup, path.absolute(), status, searched_s(events))
    return write_search_page(trials, setup, path.absolute(), summary, target)


def write_results(trials: dict[int, Trial], setup: Setup, folder: Path, summary: dict[str, Any]) -> None:
    """best.yaml, trials.csv, summary.json, report.html, and Optuna's own file where it was asked."""
    best = best_trial(trials, setup.objective)
    if best is not None:
        value = f"{setup.objective.metric} {best.value(setup.objective):g} (trial {best.number})"
        head = f"# The best of {len(trials)} trials of {folder.name}: {value}\n"
        if best.status == "failed":
            head += f"# It has failed in the end: {' '.join(best.reason.split())}\n"
        if best.lineage:
            head += "# These are its last settings. Its weights came by others before them: lineage in summary.json\n"
        write_atomically(folder / "best.yaml", head + setup.recipe_of(best.config).to_yaml())
    write_atomically(folder / "trials.csv", trials_csv(summary["trials"], setup.space.keys))
    write_atomically(folder / "summary.json", json.dumps(json.loads(to_json_line(summary)), indent=1) + "\n")
    write_search_page(trials, setup, folder, summary)
    if setup.section.search == "optuna":
        from shoal.tune.by_optuna import save_study

        save_study(folder / "optuna.journal", setup.space, setup.objectives, trials)
