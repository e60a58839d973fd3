"""What runs of a kind have taken before: one file for each model x recipe x hardware, for people to read and to keep in
version control."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import UserError
from shoal.core.section import nearest
from shoal.core.storage import expand_home, write_atomically
from shoal.observe.runs import Run

VERSION = 1
MOST_RUNS = 10
"""Of each kind, the newest so many are kept: enough to know how much runs differ."""
_PLACE = frozenset(
    {
        *("dir", "workers", "download", "on_error", "transform_on", "resident"),
        *("cache_dir", "cache_gb", "patience_s", "loader"),
    }
)
"""Fields of data: that say from where and how it is read. A change of those is to be compared, not told apart."""
_LONGEST_WORD = 50
"""Of a file's name, which may have 255 bytes in all."""
_TRAIN = ("global_batch", "precision", "compile", "activation_checkpointing", "clip_norm", "fp8")


@dataclass(frozen=True)
class Timing:
    """What the steps of one run took."""

    run: str
    time: float
    """When it began, in unix seconds."""
    step_s: list[float]
    """Seconds a step, between one report and the next, in their order."""
    phases_s: dict[str, float]
    """Seconds a step by phase: the median over the reports."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of Shoal and torch, where the run tells."""


def key_of(run: Run, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What must be the same for two runs to be comparable: what is computed, how it is divided, and on what."""
    starts = [event for event in events if event["event"] == "start"]
    groups = [event.get("workers") for event in events if event["event"] == "workers"]
    workers = [worker for worker in (groups[-1] if groups else None) or [] if isinstance(worker, dict)]
    if not starts or not workers:
        raise UserError(f"run {run.name!r}: its events.jsonl tells of no start; was it trained by shoal train?")
    if len(sizes := {str(start.get("world_size")) for start in starts}) > 1:
        raise UserError(
            f"run {run.name!r}: went on with another number of workers ({' and '.join(sorted(sizes))}), so "
            "its steps are not of one kind; train it anew"
        )
    return {
        "task": _named(run.recipe.get("task")) or {"name": "unknown"},
        "model": _named(run.recipe.get("model")),
        "data": _named(run.recipe.get("data"), without=_PLACE),
        "train": {name: _section(run.recipe, "train").get(name) for name in _TRAIN},
        "optim": _section(run.recipe, "optim").get("name"),
        "strategy": starts[-1].get("strategy"),
        "micro_batch": starts[-1].get("micro_batch"),
        "world_size": starts[-1].get("world_size"),
        "hardware": _hardware(workers),
    }


def _named(section: Any, without: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """The name of a task, model or dataset, and a hash of its other fields: they may be long."""
    if not isinstance(section, dict):
        return None
    others = {name: value for name, value in section.items() if name not in without | {"name"}}
    return {"name": section.get("name"), "args": _hash(others)}


def _section(recipe: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = recipe.get(name)
    return found if isinstance(found, dict) else {}


def _hardware(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Devices and how many, on how many machines; processor and cores, where the run tells."""
    first = workers[0]
    names = sorted({str(worker.get("device_name")) for worker in workers})
    return {
        "device": " + ".join(names),
        "devices": len(workers),
        "machines": len({worker.get("node") for worker in workers}),
        "cpu": first.get("cpu", "unknown"),
        "cores": first.get("cores"),
        "threads": first.get("threads"),
    }


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def file_name(key: Mapping[str, Any]) -> str:
    """`mlp-digits-cpu-x2-1a2b3c4d.json`: what a person looks for first, and a hash of all of it."""
    names = [key[part]["name"] for part in ("model", "data") if key[part] is not None] or [key["task"]["name"]]
    words = [*names, key["hardware"]["device"], f"x{key['world_size']}", _hash(key)[:8]]
    plain = [re.sub(r"[^A-Za-z0-9]+", "_", str(word)).strip("_").lower() for word in words]
    return "-".join(word[:_LONGEST_WORD] for word in plain) + ".json"


@dataclass(frozen=True)
class Baseline:
    """The runs that are kept of one kind."""

    path: Path
    key: dict[str, Any]
    runs: list[Timing]

    def others(self, timing: Timing) -> list[Timing]:
        """Those that are not this very run."""
        return [run for run in self.runs if (run.run, run.time) != (timing.run, timing.time)]


def check_place(given: str, may_begin: bool) -> Path:
    """Where baselines are kept: a folder, or the file of one. `may_begin`: it need not be there yet."""
    if not given.strip() or "://" in given:
        raise UserError(f"--baselines: {given!r} should be a folder, or the file of one baseline, ending in .json")
    place = expand_home(given)
    try:
        if place.exists():  # asked first: another gate may make it at this moment
            if place.is_dir() or (place.is_file() and place.suffix == ".json"):
                return place
            raise UserError(
                f"--baselines: {place} is neither a folder nor the file of a baseline, which ends in .json; "
                "give the folder they are kept in"
            )
        if may_begin:
            return place
        beside = place.parent.iterdir() if place.parent.is_dir() else ()
        guess = nearest(place.name, [path.name for path in beside if path.is_dir() or path.suffix == ".json"])
    except OSError as error:
        raise UserError(f"--baselines: {place} cannot be looked into: {error.strerror or error}") from error
    what = "file" if place.suffix == ".json" else "folder"
    raise UserError(
        f"--baselines: there is no {what} {place}; "
        + (f"did you mean {place.parent / guess}? Or, " if guess else "")
        + "to begin one with this run, add --save"
    )


def find_baseline(place: Path, key: dict[str, Any]) -> Baseline:
    """The baseline for `key`, without any runs where there is none; `place` is its file, or the folder of all."""
    path = place if place.suffix == ".json" and not place.is_dir() else place / file_name(key)
    if not path.exists():
        return Baseline(path, key, [])
    found = read_baseline(path)
    if differing := differences(found.key, key):
        raise UserError(f"--baselines: {path} is of another kind of run: {differing}")
    return found


def nearest_kind(folder: Path, key: dict[str, Any]) -> str | None:
    """Of the baselines that are there, the one that differs least, and in what; in words."""
    told = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            other = read_baseline(path)
        except UserError:
            continue
        told.append((len(_differing(other.key, key)), path, differences(other.key, key)))
    return "the nearest, {1}, differs: {2}".format(*min(told)) if told else None


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """`train.precision fp32 there, bf16 here; ...`, or nothing."""
    # Of arguments, which may be long, only a hash is kept.
    return "; ".join(
        f"other fields of {name.removesuffix('.args')}"
        if name.endswith(".args")
        else f"{name} {there} there, {here} here"
        for name, there, here in _differing(before, now)
    )


def _differing(before: dict[str, Any], now: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    there, here = _flat(before), _flat(now)
    return [
        (name, there.get(name), here.get(name)) for name in sorted(there | here) if there.get(name) != here.get(name)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def read_baseline(path: Path) -> Baseline:
    """A baseline's file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--baselines: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise _not_one(path, f"it is not JSON: {error}") from error
    if not isinstance(content, dict) or "version" not in content or not isinstance(content.get("key"), dict):
        raise _not_one(path, "it has no version and key")
    if content["version"] != VERSION:
        raise UserError(
            f"--baselines: {path} is of version {content['version']}, and this Shoal reads {VERSION}; "
            "use the Shoal that wrote it, or remove it to begin anew"
        )
    try:
        return Baseline(path, content["key"], [_timing(run) for run in content["runs"]])
    except KeyError as error:
        raise _not_one(path, f"{error.args[0]} is missing") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise _not_one(path, str(error)) from error


def _not_one(path: Path, why: str) -> UserError:
    return UserError(
        f"--baselines: {path} is no baseline, or a broken one ({why}); take it from version control again, or remove it"
    )


def _timing(record: Mapping[str, Any]) -> Timing:
    steps = [float(value) for value in record["step_s"]]
    phases = {str(name): float(value) for name, value in record["phases_s"].items()}
    run, time = str(record["run"]), float(record["time"])
    if not steps or not all(0 < value < math.inf for value in steps):
        raise ValueError(f"run {run} has step times that are none")
    if not all(0 <= value < math.inf for value in phases.values()) or not math.isfinite(time):
        raise ValueError(f"run {run} has times that are none")
    return Timing(run, time, steps, phases, dict(record.get("versions", {})))


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """While no other gate changes a baseline of this folder, which is made if it is not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path.parent, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--baselines: {path} cannot be written: {error.strerror or error}") from error
    try:
        # Not every network file system locks folders; then only two gates of one kind at one moment would collide.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write_baseline(path: Path, key: Mapping[str, Any], runs: Sequence[Timing]) -> None:
    """Keep the newest of `runs`; the folder is there."""
    kept = sorted(runs, key=lambda run: run.time)[-MOST_RUNS:]
    head = {"version": VERSION, "key": key}
    # A run a line: readable, and a diff shows which came and went.
    lines = ",\n".join(f"  {json.dumps(_rounded(run))}" for run in kept)
    text = json.dumps(head, indent=1).rstrip("}").rstrip() + f',\n "runs": [\n{lines}\n ]\n}}\n'
    try:
        write_atomically(path, text)
    except OSError as error:
        raise UserError(f"--baselines: {path} cannot be written: {error.strerror or error}") from error


def _rounded(run: Timing) -> dict[str, Any]:
    record = asdict(run)
    record["step_s"] = [float(f"{value:.4g}") for value in run.step_s]
    record["phases_s"] = {name: float(f"{value:.4g}") for name, value in run.phases_s.items()}
    return record
