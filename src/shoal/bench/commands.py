"""Running what is measured, each as the command that its user would type, and taking turns."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import RunError, UserError
from shoal.core.section import one_of

PEERS = Path(__file__).parent / "peers"
Tell = Callable[[str], None]
_Measured = TypeVar("_Measured")
_LIMIT_S = 900.0
_ENDS_WITHIN_S = 20.0


def shoal_train(recipe: Path, run_dir: Path, launcher: str, address: str | None = None) -> list[str]:
    """`shoal train`."""
    where = ["--address", address] if address else ["--launcher", launcher]
    return [sys.executable, "-m", "shoal.cli.main", "train", str(recipe), "--run-dir", str(run_dir), *where]


def plain_ddp(workers: int, out: Path, *arguments: str) -> list[str]:
    """The hand-written script under torchrun."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return [*start, str(PEERS / "plain_ddp.py"), "--out", str(out), *arguments]


def plain_ray_train(workers: int, out: Path, *arguments: str) -> list[str]:
    """The hand-written script on Ray Train."""
    script = [sys.executable, str(PEERS / "plain_ray_train.py")]
    return [*script, "--workers", str(workers), "--out", str(out), *arguments]


def run(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> float:
    """Run a command to its end; unix seconds when it was started."""
    began = time.time()
    with started(command, log, environment) as process:
        try:
            status = process.wait(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RunError(f"{_short(command)} did not end within {_LIMIT_S:.0f} s") from None
        if status:
            last = "\n".join(log.read_text(errors="replace").strip().splitlines()[-15:])
            raise RunError(f"{_short(command)} ended with status {status}\n{last}")
    return began


@contextlib.contextmanager
def started(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """A command that runs; it is ended, if it has not by then. What it says goes to `log`: Ray's processes may hold a
    pipe open for longer than the command lives."""
    given = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - ourselves and our peers
            command,
            env=given | {"RAY_USAGE_STATS_ENABLED": "0"} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C is for the benchmark
        )
    try:
        yield process
    finally:
        end(process, signal.SIGTERM)


def end(process: "subprocess.Popen[bytes]", how: signal.Signals) -> None:
    """Ask it to end, and see to it that it does."""
    if process.poll() is None:
        process.send_signal(how)
        try:
            process.wait(timeout=_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # of the session that is its own
            process.wait()


def wait_until(found: Callable[[], _Measured | None], what: str, limit_s: float = 120.0) -> _Measured:
    """What `found` returns as soon as it is something."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if (value := found()) is not None:
            return value
        time.sleep(0.05)
    raise RunError(f"waited {limit_s:.0f} s in vain for {what}")


def in_turns(names: Iterable[str], number: int) -> list[str]:
    """The order of a round: every other one backwards, so that what drifts in a round hits all alike."""
    order = list(names)
    return order if number % 2 == 0 else order[::-1]


def choose(only: str | None, contenders: Sequence[str]) -> list[str]:
    """The contenders of `--only a,b`, in their own order; all of them without it."""
    asked = only.split(",") if only else list(contenders)
    for name in asked:
        if name not in contenders:
            raise UserError(f"--only: {name!r} is not measured here; {one_of(name, contenders)}")
    return [name for name in contenders if name in asked]


def digits_like(workers: int, **sections: Any) -> dict[str, Any]:
    """The recipe of the small model that `plain_ddp.py` and `plain_ray_train.py` train, 32 samples a worker."""
    recipe: dict[str, Any] = {
        "name": "digits_like",
        "task": "image_classification",
        "model": {"name": "simple_cnn", "channels": [16, 32], "hidden": 64, "dropout": 0.1},
        "data": {"name": "synthetic", "samples": 1438, "val_samples": 8, "shape": [1, 8, 8]},
        "optim": {"name": "adamw", "lr": 3.0e-3},
        "train": {"steps": 3, "global_batch": 32 * workers},
        "cluster": {"workers": workers, "threads_per_worker": 1, "gpus_per_worker": 0},
    }
    return recipe | sections


def _short(command: Sequence[str]) -> str:
    return " ".join(Path(word).name if word.startswith("/") else word for word in command[:6])
