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
from shoal.core.group import Meeting, joined
from shoal.core.process import Process, choose_device
from shoal.core.storage import to_json_line
from shoal.observe.records import Report
from shoal.recipe.load import LoadedRecipe, check_tree
from shoal.train.worker import RunRequest, train_worker

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
        self.channel.send("report", report=report.to_record())

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
    """Run the worker that `job` describes and tell the agent how it ended."""
    channel = Channel(descriptor)
    os.environ.clear()
    os.environ.update(job["environment"])
    stacks = open(job["stacks"], "w", encoding="utf-8")  # noqa: SIM115, PTH123 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = _Stop(channel)
    signal.signal(signal.SIGTERM, stop.on_signal)
    threading.Thread(target=stop.listen, name="orders", daemon=True).start()
    _use_paths(job)
    try:
        summary = _train(job, channel, stop, others)
    except KeyboardInterrupt:
        channel.send("ended", summary={"status": "interrupted", "ended_by": stop.reason, "before_start": True})
        return 0
    except Exception as error:  # noqa: BLE001 - sent to the agent in full
        channel.send("failed", **_describe(error))
        return 1
    channel.send("ended", summary=summary)
    return 0


def _use_paths(job: dict[str, Any]) -> None:
    """Find the user's modules as the launcher would."""
    for folder in reversed(job["paths"]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    if Path(job["directory"]).is_dir():
        os.chdir(job["directory"])


def _train(job: dict[str, Any], channel: Channel, stop: _Stop, others: list[int]) -> dict[str, Any]:
    loaded: LoadedRecipe = check_tree(job["recipe"])
    device = choose_device(loaded.recipe.cluster.gpus_per_worker, job["local_rank"])
    meeting = Meeting(**job["meeting"], listen_fd=others[0] if others else None)
    with joined(meeting, device, loaded.recipe.parallel.backend) as group:
        process = Process(
            rank=meeting.rank,
            world_size=meeting.world_size,
            device=device,
            group=group,
            local_rank=job["local_rank"],
            local_world_size=job["local_world_size"],
            node=job["node"],
        )
        run_dir = Path(job["run_dir"])
        # After a restart there is a run to go on with, if it came so far as to be one.
        began = group.from_first((run_dir / "recipe.yaml").is_file()) if job["restarts"] else False
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
        )
        return train_worker(request, process)


def _describe(error: Exception) -> dict[str, Any]:
    kind = "user" if isinstance(error, UserError) else "run" if isinstance(error, RunError) else "exception"
    return {
        "kind": kind,
        "type": type(error).__name__,
        "message": str(error),
        "notes": list(getattr(error, "__notes__", [])),
        "traceback": "".join(traceback.format_exception(error)),
        "by_network": _by_network(error),
    }


def _by_network(error: BaseException) -> bool:
    """Whether another worker's end, or the network, explains the error."""
    if isinstance(error, torch.distributed.DistError):
        return True
    words = str(error).lower()
    signs = ("connection closed by peer", "connection reset", "connection refused", "broken pipe", "gloo", "nccl")
    return isinstance(error, RuntimeError) and any(sign in words for sign in signs)
