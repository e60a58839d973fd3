"""The process beside a training that tells MLflow, TensorBoard and others what the run's folder says.

    python -m shoal.train.track RUN_DIR [--once] [track.KEY=VALUE ...]

It reads the folder and nothing else, so that nothing in it can stop or slow a training. It ends with its parent.
"""

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError, create_model

from shoal.core.errors import UserError
from shoal.core.secrets import scrub, scrubbed
from shoal.core.storage import to_json_line, write_atomically
from shoal.observe.track.progress import FOLDER
from shoal.observe.track.section import ENVIRONMENT, SINKS, TrackSection
from shoal.recipe.load import LoadedRecipe
from shoal.recipe.merge import merge, overlay_of, override_paths
from shoal.recipe.messages import describe
from shoal.recipe.references import environment, hide_values, resolve_references, restore_references
from shoal.recipe.yaml_tree import Tree, read_yaml

LOG = "log"
_SENT = "sent_to.json"
END = b"end\n"
"""What the parent says when the run is over."""
_PACKAGES = {
    "mlflow": ("mlflow",),
    "tensorboard": ("tensorboard",),
    "wandb": ("wandb",),
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
_REFERENCE = r"\$\{env:\w+\}"
_PASSWORD = re.compile(rf"://(?:{_REFERENCE}|(?!\$\{{env:)[^\s/@:])*:(?!{_REFERENCE}@)[^\s/@]+@")
_REFERRED = re.compile(rf"://(?:[^\s/@:]*:)?{_REFERENCE}@")
"""A password or token in an address that is a reference, with the name of its user."""
_TELLING = re.compile(r"authori[sz]ation|token|key|secret|password|cookie", re.IGNORECASE)
_OnlyTrack = create_model("_OnlyTrack", track=(TrackSection, TrackSection()))


@dataclass(frozen=True)
class Asked:
    """A `track:` section, and how to take out of a text what it has from the environment."""

    section: TrackSection
    hide: Callable[[str], str]
    given: Tree = field(default_factory=dict)
    """The section as it was written, with references in it."""


def read_asked(run_dir: Path, overrides: Iterable[str] = ()) -> Asked:
    """The section in a run's recipe, with overrides laid over it; all else of the recipe may be out of date. Where
    neither says where to, it is where the run was sent before."""
    by_path = override_paths(overrides)
    if other := next((path for path in by_path if path[0] != "track"), None):
        raise UserError(f"{'.'.join(other)}: only fields of track can be given here, such as track.mlflow=true")
    tree, _ = read_yaml(run_dir / "recipe.yaml")
    over = overlay_of(by_path)
    asked = _asked(merge({"track": tree.get("track") or {}}, over))
    before = _read_sent(run_dir) if not asked.section.sinks else {}
    return _asked(merge({"track": before}, over)) if before else asked


def _asked(given: Tree) -> Asked:
    values, references = resolve_references(given, environment())
    try:
        section: TrackSection = _OnlyTrack.model_validate(values).track  # type: ignore[attr-defined]
    except ValidationError as error:
        raise UserError(describe(error, references, {})) from None
    _check(section, given)
    return Asked(section, lambda text: scrub(hide_values(text, values, references)), given["track"])


def _read_sent(run_dir: Path) -> Tree:
    try:
        value = json.loads((run_dir / FOLDER / _SENT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _remember(run_dir: Path, asked: Asked, sinks: Iterable[str]) -> None:
    """Where a run was sent to that did not ask for it, so that it can be sent there again by its name alone."""
    sent = {name: asked.given[name] for name in sinks if not _may_hold_secret(asked.given[name], name)}
    if sent:
        with contextlib.suppress(OSError):  # a full disk: it must be said again, next time
            write_atomically(run_dir / FOLDER / _SENT, to_json_line(_read_sent(run_dir) | sent) + "\n")


def _may_hold_secret(given: Any, name: str) -> bool:
    """Whether there is more in it than names, places and references: what was typed once must not stay on the disk."""
    for path, text in _texts(given, name):
        rest = _REFERRED.sub("://", text)
        is_header = path.startswith("otlp.headers.") and "${env:" not in text
        if is_header or "?" in rest or scrubbed(rest, path.rpartition(".")[2]) != rest:
            return True
    return False


def check_tracking(loaded: LoadedRecipe, is_here: bool = True) -> None:
    """Before a training starts: `UserError` where a secret stands in the recipe or, if it trains here, where a package
    is missing."""
    tree = restore_references(loaded.recipe.model_dump(mode="json"), loaded.references)
    _check(loaded.recipe.track, tree, is_here)


def _check(section: TrackSection, tree: Tree, is_here: bool = True) -> None:
    for path, text in _texts(tree.get("track"), "track"):
        is_header = path.startswith("track.otlp.headers.") and _TELLING.search(path.rpartition(".")[2])
        if _PASSWORD.search(text) or (is_header and "${env:" not in text):
            raise UserError(f"{path}: holds a password; write ${{env:NAME}} in its place, and export NAME")
    for name in section.sinks if is_here else ():
        for package in _PACKAGES[name]:
            if not _is_installed(package):
                raise UserError(f"track.{name}: needs {package}: pip install 'shoal[{name}]'")
    uri = section.mlflow.uri if section.mlflow is not None else None
    if uri is not None and (uri.startswith("file:") or "://" not in uri) and uri != "databricks":
        raise UserError(
            "track.mlflow.uri: MLflow no longer keeps runs in plain folders; write sqlite:////FOLDER/mlflow.db, or the "
            "address of a server"
        )


def _texts(value: Any, path: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, f"{path}.{key}")
    elif isinstance(value, str):
        yield path, value


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def track_command(run_dir: Path) -> str:
    """What to type to send what is left."""
    import shlex

    return f"shoal track {shlex.quote(str(run_dir))}"


class Tracking:
    """The process beside this one."""

    def __init__(self, run_dir: Path, asked: Asked, process: "subprocess.Popen[bytes]") -> None:
        self._run_dir = run_dir
        self._section, self._hide = asked.section, asked.hide
        self._process = process

    def finish(self, wait_s: float | None = None) -> list[str]:
        """The run is over and its summary written: wait until all is sent, but no longer than `wait_s`.

        Never raises; returns words for what was not sent.
        """
        try:
            return self._finish(self._section.wait_s if wait_s is None else wait_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the run is done
            return [f"track: {scrub(str(error))}; send what is left: {track_command(self._run_dir)}"]

    def leave(self) -> None:
        """This process has nothing more to do with the run: what becomes of it, the other one reads in its folder."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended already, or is being told
            self._process.stdin.close()

    def _finish(self, wait_s: float) -> list[str]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(END)
            self._process.stdin.close()
        except BrokenPipeError:  # it has ended already
            pass
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(1.0)
            status = None
        return [] if status == 0 else self._what_is_left(status)

    def _what_is_left(self, status: int | None) -> list[str]:
        from shoal.observe.track.build import target_of
        from shoal.observe.track.progress import Progress

        why = "track.wait_s was up" if status is None else f"its process ended with status {status}, see {FOLDER}/{LOG}"
        words = []
        for name in self._section.sinks:
            progress = Progress.read(self._run_dir, name, target_of(name, self._section, self._run_dir, self._hide))
            if not progress.complete:
                because = progress.problem or why
                words.append(f"track.{name}: not all was sent ({because}); later: {track_command(self._run_dir)}")
        return words


def start_tracking(run_dir: Path, section: TrackSection, tell: Callable[[str], None]) -> Tracking | None:
    """Start the process beside this one; None where there is nothing to track, or it cannot be started.

    Args:
        run_dir: The run's folder, with its recipe.
        section: Of the recipe.
        tell: Takes words on why it could not be started. Nothing is raised.
    """
    if not section.sinks:
        return None
    log: IO[bytes] | int = subprocess.DEVNULL
    try:
        hide = read_asked(run_dir).hide
    except (UserError, OSError) as error:
        tell(f"{scrub(str(error))}; nobody is told of the run")
        return None
    try:
        (run_dir / FOLDER).mkdir(exist_ok=True)
        log = (run_dir / FOLDER / LOG).open("ab")
    except OSError as error:  # a full disk, say: it may have room later, and it has nothing to do with the sinks
        tell(f"track: {run_dir / FOLDER} cannot be written: {error.strerror}; how far it is will not be kept")
    command = [sys.executable, "-m", "shoal.train.track", str(run_dir.absolute()), "--parent", str(os.getpid())]
    try:
        process = subprocess.Popen(  # noqa: S603 - ourselves
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        )
    except OSError as error:
        tell(f"track: the process that tells others could not be started: {error}; later: {track_command(run_dir)}")
        return None
    finally:
        if not isinstance(log, int):
            log.close()
    return Tracking(run_dir, Asked(section, hide), process)


def _environment() -> dict[str, str]:
    """With what packages read from it and a .env file may say; without GPUs, and with one thread for arithmetic."""
    told = {name: value for name, value in environment().items() if name.startswith(ENVIRONMENT)}
    return told | dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def main(arguments: list[str]) -> None:
    """The program; does not return."""
    from shoal.train.track_process import beside, once

    run_dir, rest = Path(arguments[0]), arguments[1:]
    if rest[:1] == ["--parent"]:
        beside(run_dir, read_asked(run_dir), parent=int(rest[1]))
    assert rest[:1] == ["--once"]
    once(run_dir, read_asked(run_dir, rest[1:]))


def send_now(run_dir: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Send what was not sent yet, in a process of its own; says for each sink where to, what went wrong if it did, and
    what is left to type if something is.

    `UserError` where nothing is asked for, or not so.
    """
    overrides = list(overrides)
    asked = read_asked(run_dir, overrides)
    if not asked.section.sinks:
        raise UserError(
            f"track: the run's recipe asks for nothing; say where to, with track.{SINKS[0]}=true for example"
        )
    command = [sys.executable, "-m", "shoal.train.track", str(run_dir.absolute()), "--once", *overrides]
    done = subprocess.run(  # noqa: S603 - ourselves
        command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=_environment(), check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        raise UserError(
            f"track: the process that sends ended with status {done.returncode}; see {run_dir / FOLDER / LOG}"
        ) from None
    _remember(run_dir, asked, [name for name in found["targets"] if name not in found["problems"]])
    return found | {"next": _next(run_dir, asked.section)}


def _next(run_dir: Path, section: TrackSection) -> dict[str, str]:
    """sink -> a command, where what was written is not where it should be in the end."""
    from shoal.observe.track.facts import read_facts
    from shoal.observe.track.to_wandb import wandb_sync

    if section.wandb is None:
        return {}
    command = wandb_sync(section.wandb, run_dir, read_facts(run_dir, is_at_work=True).key)
    return {} if command is None else {"wandb": command}


if __name__ == "__main__":
    main(sys.argv[1:])
