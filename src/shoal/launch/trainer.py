"""A trainer: one worker of a run in a process of its own, which talks to its agent over a socket."""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import RunError, UserError
from shoal.core.group import Group, Meeting, by_network, joined
from shoal.core.process import Process, choose_device
from shoal.core.storage import to_json_line
from shoal.observe.records import Report
from shoal.recipe.load import LoadedRecipe, check_tree
from shoal.train.request import RunRequest
from shoal.train.worker import train_worker

_BEAT_EVERY_S = 0.2


class Channel:
    """JSON lines to the agent and back."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()

    def send(self, what: str, **fields: Any) -> None:
        """A message; nobody to hear it is the agent's end, and so this process's, very soon."""
        line = to_json_line({"what": what, **fields}) + "\n"
        with self._lock:
            self._socket.sendall(line.encode())

    def receive(self) -> Any:
        """Messages, until the agent closes."""
        with self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)


class _ToAgent:
    """Shows the run to whoever watches the launcher."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._next_tick = 0.0

    def report(self, report: Report) -> None:
        """Metrics."""
        self.channel.send("report", report=report.to_message())

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """An event."""
        self.channel.send("event", name=name, fields=fields)

    def tick(self, step: int) -> None:
        """Now and then, for the bar."""
        if (now := time.monotonic()) >= self._next_tick:
            self._next_tick = now + _BEAT_EVERY_S
            self.channel.send("tick", step=step)


class _Stop:
    """Whether to stop: asked by the agent, or by a signal to this process alone. Being asked is the sign of life."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.reason: str | None = None
        self.beats = 0
        self._next_beat = 0.0

    def __call__(self) -> str | None:
        self.beats += 1
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + _BEAT_EVERY_S
            self.channel.send("beat", calls=self.beats)
        return self.reason

    def listen(self) -> None:
        """Follow the agent's orders until it is gone."""
        for message in self.channel.receive():
            if message["what"] == "stop":
                self.reason = message["reason"]

    def on_signal(self, number: int, frame: object) -> None:
        # Somebody ends this machine, not the run: save, and let the launcher see what is left.
        self.reason = self.reason or "preemption"


def run_trainer(job: dict[str, Any], descriptor: int, others: list[int]) -> int:
    """Run the worker that `job` describes and tell the agent how it ended.

    `others` are the file for its stacks and, for rank 0, the socket where the workers meet.
    """
    channel = Channel(descriptor)
    _mark(job, "trainer")
    os.environ.clear()
    os.environ.update(job["environment"])
    stacks, *listening = others
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = _Stop(channel)
    signal.signal(signal.SIGTERM, stop.on_signal)
    threading.Thread(target=stop.listen, name="orders", daemon=True).start()
    try:
        _use_paths(job)
        loaded = check_tree(job["recipe"])
        # Where somebody hands out GPUs, as Ray does, the worker takes the one it was given, or none.
        gpus = job.get("gpus", loaded.recipe.cluster.gpus_per_worker)
        device = choose_device(gpus, job.get("gpu", job["local_rank"]))
        meeting = Meeting(**job["meeting"], listen_fd=listening[0] if listening else None)
        with joined(meeting, device, loaded.recipe.parallel.backend) as group:
            _mark(job, "joined")
            return _train_and_tell(job, loaded, device, group, channel, stop)
    except BaseException as error:  # noqa: BLE001 - sent to the agent in full
        channel.send("failed", **_describe(error))
        return 1


def _train_and_tell(
    job: dict[str, Any], loaded: LoadedRecipe, device: torch.device, group: Group, channel: Channel, stop: _Stop
) -> int:
    """Told while still in the group: leaving it may wait for workers who will not come."""
    try:
        summary = _train(job, loaded, device, group, channel, stop)
    except KeyboardInterrupt:
        channel.send("ended", summary={"status": "interrupted", "ended_by": stop.reason, "before_start": True})
        return 0
    except BaseException as error:  # noqa: BLE001 - sent to the agent in full
        channel.send("failed", **_describe(error))
        return 1
    channel.send("ended", summary=summary)
    return 0


def _mark(job: dict[str, Any], name: str) -> None:
    job["marks"][name] = round(time.time() - job["started"], 3)


def _use_paths(job: dict[str, Any]) -> None:
    """Find the user's modules as the launcher would."""
    for folder in reversed(job["paths"]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if Path(job["directory"]).is_dir():
        os.chdir(job["directory"])


def _train(
    job: dict[str, Any], loaded: LoadedRecipe, device: torch.device, group: Group, channel: Channel, stop: _Stop
) -> dict[str, Any]:
    process = Process(
        rank=group.rank,
        world_size=group.world_size,
        device=device,
        group=group,
        local_rank=job["local_rank"],
        local_world_size=job["local_world_size"],
        node=job["node"],
        address=job.get("address", ""),
        agent_pid=job["agent_pid"],
    )
    run_dir = Path(job["run_dir"])
    # Workers that are not the first go on with what those before them have begun, if they came so far.
    began = group.from_first((run_dir / "events.jsonl").is_file()) if job["starts"] else False
    request = RunRequest(
        loaded=loaded,
        run_dir=run_dir,
        console=_ToAgent(channel),
        resume=job["resume"] or began,
        stop=stop,
        started=job["started"],
        restarts=job["restarts"],
        supervised=True,
        threads=job["threads"],
        first_step_s=job["first_step_s"],
        marks=job["marks"],
        pause_at=job.get("pause_at"),
        launch=job.get("launch", {}),
    )
    return train_worker(request, process)


def _describe(error: BaseException) -> dict[str, Any]:
    kind = "user" if isinstance(error, UserError) else "run" if isinstance(error, RunError) else "exception"
    return {
        "kind": kind,
        "type": type(error).__name__,
        "message": str(error),
        "notes": list(getattr(error, "__notes__", [])),
        "traceback": _trace(error),
        "by_network": kind == "exception" and by_network(error),
    }


def _trace(error: BaseException) -> str:
    """The traceback from where the worker begins: how it was started is of no use to anybody."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename == __file__:
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first))
