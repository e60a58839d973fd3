"""A trial takes over from another: a new run folder that begins with the other's checkpoint."""

import os
import shutil
from pathlib import Path

from shoal.checkpoint.folder import being_read, read_info, step_name
from shoal.checkpoint.manifest import CorruptCheckpointError
from shoal.checkpoint.read import verify
from shoal.core.errors import RunError, UserError
from shoal.core.storage import NO_ROOM, fsync_directory, read_json_lines, to_json_line
from shoal.observe.run_folder import event_record
from shoal.observe.runs import read_events
from shoal.recipe.load import LoadedRecipe


class DamagedError(RunError):
    """There is nothing to take over: the donor's checkpoint cannot be read."""


def adopt(donor: Path, step: int, target: Path, recipe: LoadedRecipe) -> None:
    """Make `target` a run that goes on from the donor's checkpoint of `step`, by another recipe; it is there as a whole
    or not at all. Its files are links where the file system has them: a checkpoint is never changed, only deleted."""
    told = {"from": str(donor), "step": step}
    if _is_made(target, told, recipe):
        return
    aside = target.with_name(f".adopting-{target.name}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        copy = aside / "checkpoints" / step_name(step)
        copy.mkdir(parents=True)
        _copy_checkpoint(donor / "checkpoints" / step_name(step), copy)
        reports = [to_json_line(r) for r in read_json_lines(donor / "metrics.jsonl") if r.get("step", step + 1) <= step]
        _write(aside / "metrics.jsonl", "".join(report + "\n" for report in reports))
        _write(aside / "events.jsonl", to_json_line(event_record("adopted", told)) + "\n")
        _write(aside / "recipe.yaml", recipe.to_yaml())
        for folder in (copy, copy.parent, aside):
            fsync_directory(folder)
        aside.rename(target)
        fsync_directory(target.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        words = f"{target} cannot be written: {error.strerror or error}; make room, then resume the search"
        raise RunError(words) from error
    except RunError:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _is_made(target: Path, told: dict[str, object], recipe: LoadedRecipe) -> bool:
    """Whether it was made before a crash, from the same and for the same, and has not begun since."""
    try:
        events, text = read_events(target), (target / "recipe.yaml").read_text(encoding="utf-8")
    except OSError:
        return False
    is_same = len(events) == 1 and told.items() <= events[0].items()
    return is_same and text == recipe.to_yaml()


def _copy_checkpoint(source: Path, target: Path) -> None:
    try:
        info = read_info(source)
        with being_read(info):
            verify(info, 0, 1)
            for file in sorted(source.iterdir()):
                _link(file, target / file.name)
    except (CorruptCheckpointError, UserError, FileNotFoundError) as error:
        raise DamagedError(f"the checkpoint {source} cannot be read: {error}") from error


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        shutil.copyfile(source, target)  # another file system, or one without links
        with target.open("rb") as file:
            os.fsync(file.fileno())


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
