"""Going on from a checkpoint: the newest that is whole, found and read by all workers together."""

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.checkpoint.folder import being_read, read_info, set_aside, step_folders, step_name, step_of
from shoal.checkpoint.manifest import CheckpointInfo, CorruptCheckpointError
from shoal.checkpoint.read import Content, read_content, verify
from shoal.checkpoint.store import fetch, list_remote
from shoal.core.errors import UserError
from shoal.core.group import Group
from shoal.core.process import Process
from shoal.core.remote import Remote, RemoteError
from shoal.core.rng import derive_seed, restore_rng, seed_all
from shoal.parallel.unit import TrainUnit, UnitState
from shoal.recipe.identity import changed_field
from shoal.train.state import Identity, TrainState


@dataclass
class Restored:
    """What a run goes on with."""

    state: TrainState = field(default_factory=TrainState)
    checkpoint: CheckpointInfo | None = None
    """None: there was none, and the run begins anew."""
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Events for those who want to know: what was found corrupt, what was fetched. On rank 0 alone."""


def restore_newest(
    folder: Path, unit: TrainUnit, process: Process, identity: Identity, seed: int, remote: Remote | None = None
) -> Restored:
    """Load the newest checkpoint of which every byte is as it was written.

    Rank 0 says which ones there are, and each worker verifies its share of the files. Corrupt ones are set aside and
    told of, once there is a better; one that the store has too is fetched from there.
    """
    restored = Restored()
    search = _Search(folder, remote, restored.told)
    found = _find(search, process)
    if found is None:
        return restored
    try:
        with being_read(found):
            content = read_content(found)
            on_first(process.group, lambda: _check_identity(content, identity, found.step))
            on_first(process.group, search.tidy)
            unit.load(UnitState(content.tensors, content.values["unit"]))
            restored.state = _take_own_part(content, process, unit.random_rank, seed)
    except (CorruptCheckpointError, KeyError, TypeError) as error:  # although it has just been verified
        raise UserError(f"--resume: {found.path} cannot be read on {socket.gethostname()}: {error}") from error
    restored.checkpoint = found
    return restored


def _find(search: "_Search", process: Process) -> CheckpointInfo | None:
    """The newest checkpoint that all workers find whole; None if there never was one."""
    while (step := on_first(process.group, search.next)) is not None:
        path = search.folder / step_name(step)
        problems = [problem for problem in process.group.gather(_problem(path, process)) if problem is not None]
        if wrong := next((words for kind, words in problems if kind == "user"), None):
            raise UserError(wrong)
        if not problems:
            return read_info(path)
        search.reject(step, problems[0][1])
    on_first(process.group, search.check_there_was_none)
    return None


class _Search:
    """Rank 0's way from the newest checkpoint down, in the run's folder and in the store."""

    def __init__(self, folder: Path, remote: Remote | None, told: list[tuple[str, dict[str, Any]]]) -> None:
        self.folder = folder
        self.remote = remote
        self.told = told
        self.rejected: dict[int, str] = {}
        """Why, by step; those that are still in their place."""
        self.words_for_all = ""
        self._here: set[int] | None = None
        self._there: dict[int, CheckpointInfo] = {}

    def next(self) -> int | None:
        """The step to try next, whose files are in the folder now."""
        if self._here is None:
            self._here = {step_of(path) for path in step_folders(self.folder)}
            self._look_into_store()
        while steps := self._here | self._there.keys():
            step = max(steps)
            if step in self._here:
                self._here.discard(step)
                return step
            if self._fetch(self._there.pop(step)):
                return step
        return None

    def reject(self, step: int, why: str) -> None:
        """It is not whole."""
        self.rejected[step] = why
        self.words_for_all = self.words_for_all or f"{step_name(step)}: {why}"

    def tidy(self) -> None:
        """There is a better one: those that are not whole go out of the way."""
        for step in sorted(self.rejected):  # of which the last, the newest, are kept to be looked at
            self._set_aside(step)

    def check_there_was_none(self) -> None:
        """Whether a run may begin anew: not if it has checkpoints that cannot be read."""
        if self.words_for_all:
            raise UserError(
                f"--resume: none of the checkpoints in {self.folder} can be read ({self.words_for_all}); "
                "bring them back from a copy, or start a new run"
            )

    def _set_aside(self, step: int) -> None:
        why, path = self.rejected.pop(step), set_aside(self.folder / step_name(step))
        self.told.append(("checkpoint_rejected", {"step": step, "reason": why, "path": str(path)}))

    def _look_into_store(self) -> None:
        if self.remote is None:
            return
        try:
            self._there = {info.step: info for info in list_remote(self.remote)}
        except RemoteError as error:
            if not self._here:
                raise UserError(f"--resume: there is no checkpoint in {self.folder}, and {error}") from error
            self.told.append(("warning", {"message": f"{error}; going on with what is in {self.folder}"}))

    def _fetch(self, info: CheckpointInfo) -> bool:
        """Bring it from the store into the folder, in place of one that is not whole."""
        assert self.remote is not None
        path = self.folder / step_name(info.step)
        try:
            if info.step in self.rejected:
                self._set_aside(info.step)
            fetch(self.remote, info, self.folder)
        except (RemoteError, OSError) as error:
            self.told.append(("warning", {"message": f"step {info.step} is in the store, but {error}"}))
            return False
        self.told.append(("fetched", {"step": info.step, "from": f"{self.remote.url}/{path.name}"}))
        return True


def _problem(path: Path, process: Process) -> list[str] | None:
    """What this worker finds wrong with its share of a checkpoint's files: a kind and words."""
    try:
        if not process.is_first and not path.is_dir():
            return [
                "user",
                f"--run-dir: {path.parent} on {socket.gethostname()} has no checkpoint of step {step_of(path)}, which "
                "worker 0 sees; the run's folder must be on storage that every machine shares",
            ]
        verify(read_info(path), process.rank, process.world_size)
    except CorruptCheckpointError as error:
        return ["corrupt", str(error)]
    except UserError as error:
        return ["user", f"--resume: {error}"]
    return None


def _take_own_part(content: Content, process: Process, random_rank: int, seed: int) -> TrainState:
    """The state with this worker's own generators and loss since the last report.

    Generators are those of `random_rank`, as they are on all workers that must draw the same.
    """
    state, workers = TrainState.from_values(content.values["train"]), content.workers
    if len(workers) == process.world_size:
        own = workers[process.rank]
        restore_rng(workers[random_rank]["rng"], process.device)
        state.window_loss, state.window_count = own["window_loss"], own["window_count"]
        return state
    # Another number of workers: their generators cannot be divided, so new ones begin, the same ones every time.
    seed_all(derive_seed(seed, 3, state.step, process.world_size, random_rank))
    state.window_loss = sum(worker["window_loss"] for worker in workers) if process.is_first else 0.0
    state.window_count = sum(worker["window_count"] for worker in workers) if process.is_first else 0
    return state


def on_first(group: Group, action: Callable[[], Any]) -> Any:
    """What `action` gives on rank 0; an error of the user's input there is raised on every worker."""
    value, error = None, None
    if group.rank == 0:
        try:
            value = action()
        except UserError as caught:
            error = caught
    shared, message = group.from_first([value, None if error is None else str(error)])
    if error is not None:
        raise error
    if message is not None:
        raise UserError(message)
    return shared


def _check_identity(content: Content, present: Identity, step: int) -> None:
    saved = Identity(**content.values["identity"])
    if (changed := changed_field(saved.fixed, present.fixed)) is not None:
        raise UserError(f"{changed}: is not what it was when step {step} was saved; start a new run for that")
    if saved.train_samples != present.train_samples:
        raise UserError(
            f"data: there are {present.train_samples:,} training samples now and there were "
            f"{saved.train_samples:,} when step {step} was saved, so the order would be another; "
            "bring the data back as it was, or start a new run"
        )
    if saved.files != present.files:
        raise UserError(
            f"data.dir: the samples are in other files, or in other numbers in them, than when step {step} was saved, "
            "so the order would be another; bring the files back as they were, or start a new run"
        )
