"""From killing a worker to training again: Shoal beside a plain Ray Train script that goes on from its checkpoint.

Both train the same small model, save a checkpoint, and lose one worker to `kill -9`. Told is after how long that was
noticed, and after how long rank 0 has done a step again.
"""

import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.bench.commands import Tell, digits_like, end, in_turns, plain_ray_train, shoal_train, started, wait_until
from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores
from shoal.core.storage import read_json_lines
from shoal.observe.runs import read_events

CONTENDERS = ("ray_train", "shoal_local", "shoal_ray")
GOAL = 0.6
"""The most that Shoal on Ray may take of the plain script's time."""
_SAVE_AT = 200
_LATER_S = 3.0
"""How long after its checkpoint a run is hit: Ray Train's controller must have heard of it."""
_FOREVER = 10_000_000


def measure(workers: int, rounds: int, names: Sequence[str], tell: Tell = lambda line: None) -> dict[str, Any]:
    """Seconds from the kill until it was noticed, and until training was running again."""
    if not 2 <= workers <= usable_cores():
        raise UserError(f"--workers: should be 2 or more, and at most the {usable_cores()} cores of this machine")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        for number in range(rounds):
            for name in in_turns(found, number):
                folder = Path(temporary) / f"{number} {name}"
                folder.mkdir()
                took = _kill_plain(workers, folder) if name == "ray_train" else _kill_shoal(name, workers, folder)
                found[name].append(took)
                words = f"noticed after {took['noticed_s']:.1f} s, training again after {took['again_s']:.1f} s"
                tell(f"round {number + 1} of {rounds}, {name}: {words}")
    return {"workers": workers, "rounds": rounds} | summed_up(found)


def _kill_shoal(name: str, workers: int, folder: Path) -> dict[str, float]:
    recipe = digits_like(
        workers, train={"steps": _FOREVER, "global_batch": 32 * workers}, checkpoint={"every_steps": _SAVE_AT}
    )
    recipe |= {"evaluate": {"every_steps": _FOREVER}, "observe": {"every_steps": _SAVE_AT}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    command = shoal_train(folder / "recipe.yaml", folder / "run", name.split("_")[1])

    def event(wanted: str, after: float = 0.0) -> dict[str, Any] | None:
        events = read_events(folder / "run")
        return next((e for e in events if e["event"] == wanted and e["time"] > after), None)

    with started(command, folder / "log") as process:
        _wait_for(process, folder, lambda: event("save"), "the first checkpoint")
        time.sleep(_LATER_S)
        victims = event("workers")
        assert victims is not None
        killed = _kill(next(worker["pid"] for worker in victims["workers"] if worker["rank"] == 1))
        again = _wait_for(process, folder, lambda: event("first_step", killed), "training again")
        noticed = event("failure", killed)
        assert noticed is not None
        end(process, signal.SIGINT)
    return {"noticed_s": noticed["time"] - killed, "again_s": again["time"] - killed}


def _kill_plain(workers: int, folder: Path) -> dict[str, float]:
    out = folder / "out"
    command = plain_ray_train(workers, out, "--steps", str(_FOREVER), "--save-at", str(_SAVE_AT))

    def line(what: str, rank: int | None = None, after: float = 0.0) -> dict[str, Any] | None:
        lines = read_json_lines(out)
        return next((e for e in lines if e["what"] == what and e.get("rank") == rank and e["time"] > after), None)

    with started(command, folder / "log") as process:
        victim = _wait_for(process, folder, lambda: line("saved", 1), "the first checkpoint")
        time.sleep(_LATER_S)
        killed = _kill(victim["pid"])
        again = _wait_for(process, folder, lambda: line("first_step", 0, killed), "training again")
        noticed = line("noticed", after=killed)
    assert noticed is not None
    return {"noticed_s": noticed["time"] - killed, "again_s": again["time"] - killed}


def _kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.time()


def _wait_for(process: Any, folder: Path, found: Callable[[], dict[str, Any] | None], what: str) -> dict[str, Any]:
    """As `wait_until`, unless the command has ended."""

    def look() -> dict[str, Any] | None:
        if process.poll() is not None:
            log = (folder / "log").read_text(errors="replace")
            raise RunError(f"the run ended with status {process.returncode} before {what}\n{log[-2000:]}")
        return found()

    return wait_until(look, what)


def summed_up(found: Mapping[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians over the rounds; the ratio is taken within a round."""
    medians = {
        name: {key: statistics.median(took[key] for took in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    result: dict[str, Any] = {"contenders": medians, "seconds": dict(found)}
    if "shoal_ray" in found and "ray_train" in found:
        pairs = zip(found["shoal_ray"], found["ray_train"], strict=True)
        ratios = [ours["again_s"] / theirs["again_s"] for ours, theirs in pairs]
        result |= {"ratio": statistics.median(ratios), "goal": GOAL, "ratios": ratios}
    return result


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """The result as rows of text, headed."""
    lines = [["after kill -9", "noticed", "training again"]]
    lines += [
        [name, f"{took['noticed_s']:.1f} s", f"{took['again_s']:.1f} s"] for name, took in result["contenders"].items()
    ]
    if "ratio" in result:
        lines.append(["shoal_ray / ray_train", "", f"{result['ratio']:.2f} (goal: at most {result['goal']:g})"])
    return lines
