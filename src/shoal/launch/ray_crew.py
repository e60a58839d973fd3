"""Places for workers on a Ray cluster: one actor each, which Ray schedules, and which hosts the worker's agent.

The least number of workers is reserved as one placement group, all or nothing, so that two runs cannot block each other
with half of what each needs. Places beyond that are asked for one by one; they join when the cluster has room.
"""

import contextlib
import json
import os
import threading
import time
from concurrent.futures import Future
from typing import Any

import ray
import ray.util.client
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from shoal.core.errors import UserError
from shoal.core.ray_connection import RUNTIME_ENV
from shoal.core.version import VERSION
from shoal.launch.agent import Agent
from shoal.launch.crew import Member
from shoal.launch.environment import QUIET_RAY
from shoal.launch.policy import Size, missing_resources
from shoal.launch.ray_metrics import RayMetrics, ray_collects_metrics

_COMING_S = 4.0
"""An actor that the cluster has room for is there within so long; one that is not waits for a machine."""
_LOOK_EVERY_S = 1.0
_AGAIN_S = 1.0
"""An actor that could not start is asked for again, but not more often than this."""


class RayAgent(Agent):
    """An agent in an actor."""

    def __init__(self, nursery: str) -> None:
        super().__init__(nursery)
        self._collects_metrics = ray_collects_metrics()  # before `start` hides what says so
        self._metrics: RayMetrics | None = None
        """Where this is rank 0's."""

    def start(self, job: dict[str, Any]) -> int:
        """As `Agent`, on the device that Ray has given this actor."""
        self._tell_metrics(job)
        for name, value in QUIET_RAY.items():  # meant for Ray, which has read it, and not for what the worker starts
            if os.environ.get(name) == value:
                del os.environ[name]
        # Where the data is read by the cluster too, the trainer joins it as a program of its own, and what reads for
        # it needs the code that came with the job.
        context = ray.get_runtime_context()
        joins = {"RAY_ADDRESS": context.gcs_address}
        # Ray has put the hook into a variable of the others, and takes it from one place alone.
        brought = {name: value for name, value in context.runtime_env.items() if name != "worker_process_setup_hook"}
        if brought:
            joins[RUNTIME_ENV] = json.dumps(brought)
        return super().start(job | self.device() | {"environment": joins | job["environment"]})

    def poll(self, attempt: int, timeout_s: float) -> dict[str, Any]:
        """As `Agent`; what rank 0 tells is told to Ray's metrics agent too."""
        answer = super().poll(attempt, timeout_s)
        if self._metrics is not None:
            self._metrics.see(answer["messages"])
        return answer

    def _tell_metrics(self, job: dict[str, Any]) -> None:
        """From now on, if the trainer to start is rank 0; another may have been before, in another place."""
        is_first = job["meeting"]["rank"] == 0
        if self._metrics is not None and not is_first:
            self._metrics.close()
            self._metrics = None
        elif self._metrics is None and is_first and self._collects_metrics:
            self._metrics = RayMetrics()
        if self._metrics is not None:
            self._metrics.begin(job["run_dir"])

    def device(self) -> dict[str, int]:
        """Whether Ray has given this actor a GPU, and its number: it sees no other, so it is always the first."""
        return {"gpus": len(ray.get_runtime_context().get_accelerator_ids().get("GPU", [])), "gpu": 0}

    def place(self) -> dict[str, Any]:
        """Where this is, and what runs here."""
        context = ray.get_runtime_context()
        return self.facts() | {
            "node": context.get_node_id(),
            "address": ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            "version": VERSION,
        }


class RayMember:
    """A worker's place on the cluster."""

    def __init__(self, actor: Any, bundle: int | None) -> None:
        self.actor = actor
        self.bundle = bundle
        """Its part of the placement group; None for a place beyond the least."""
        self.asked = time.monotonic()
        self.node = ""
        self.address = ""
        self.host = ""
        self._place = actor.place.remote()

    def is_ready(self) -> bool:
        """Whether the actor runs; it is then known where."""
        if not self.node and ray.wait([self._place], timeout=0)[0]:
            place = ray.get(self._place)
            if place["version"] != VERSION:
                raise UserError(
                    f"--address: {place['host']} has Shoal {place['version']} and this is {VERSION}; "
                    "install the same on both"
                )
            self.node, self.address, self.host = place["node"], place["address"], place["host"]
        return bool(self.node)

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """As `Member`."""
        future: Future[Any] = getattr(self.actor, method).remote(*arguments).future()
        return future


def is_client() -> bool:
    """Whether this is a Ray client (`ray://`), who is not told of machines that will go, nor of an autoscaler."""
    return bool(ray.util.client.ray.is_connected())  # type: ignore[no-untyped-call]


def can_grow() -> bool:
    """Whether the cluster has an autoscaler, which may bring what is missing."""
    return not is_client() and bool(ray._private.state.state.get_cluster_config())


class Departures:
    """The machines that Ray drains, asked for by a thread: a head that is away answers nobody, and whoever asked it in
    between would not hear the workers, whose agents end them when nobody does."""

    def __init__(self) -> None:
        self.nodes: set[str] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="departures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()
        self._thread.join(timeout=_LOOK_EVERY_S)

    def _look(self) -> None:
        while not self._closed.is_set():
            # There is no public way to ask; Ray Train does it so. It raises when a head stays away, or we leave.
            with contextlib.suppress(Exception):
                self.nodes = set(ray._private.state.state.get_draining_nodes())
            self._closed.wait(_LOOK_EVERY_S)


def alive_nodes() -> list[dict[str, float]]:
    """What each machine of the cluster has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


class RayCrew:
    """Workers on a Ray cluster."""

    def __init__(self, size: Size, resources: dict[str, float], nursery: str) -> None:
        self._size = size
        self._nursery = nursery
        self._is_client = is_client()
        self._resources = {name: amount for name, amount in resources.items() if amount}
        self._group = placement_group([self._resources] * size.least, strategy="PACK")
        self._members = [self._ask(i if i < size.least else None) for i in range(size.most)]
        self._departures = None if self._is_client else Departures()
        self._is_complete = False
        """Whether there have ever been as many places as the run needs."""
        self._trouble = ""
        """Why the last actor that could not start did not."""

    def _ask(self, bundle: int | None) -> RayMember:
        """Ask Ray for a place."""
        strategy: Any = "DEFAULT"
        if bundle is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        remote = ray.remote(RayAgent).options(
            num_cpus=self._resources.get("CPU", 0.0),
            num_gpus=self._resources.get("GPU", 0.0),
            max_concurrency=8,
            max_restarts=0,
            scheduling_strategy=strategy,
        )
        return RayMember(remote.remote(self._nursery), bundle)

    def members(self) -> list[Member]:
        """Those whose actor runs, on machines that stay."""
        leaving = self.leaving()
        ready: list[Member] = []
        for member in list(self._members):
            try:
                if member.is_ready() and member.node not in leaving:
                    ready.append(member)
            except RayError as error:
                self._trouble = next(reversed(str(error).strip().splitlines()), type(error).__name__).strip()
                if time.monotonic() - member.asked > _AGAIN_S:
                    self.drop(member)
            except UserError as error:
                if not self._is_complete:
                    raise
                self._trouble = str(error)  # a machine that is of no use must not end a run that goes on without it
        self._is_complete = self._is_complete or len(ready) >= self._size.least
        return ready

    def expects_more(self) -> bool:
        """Whether an actor has been asked for so recently that it may just be starting."""
        now = time.monotonic()
        return any(not member.node and now - member.asked < _COMING_S for member in self._members)

    def is_short(self) -> bool:
        """Whether places that the run needs are missing, for longer than those take for which there is room."""
        missing = [member for member in self._members if not member.node]
        is_late = all(time.monotonic() - member.asked >= _COMING_S for member in missing)
        return len(self._members) - len(missing) < self._size.least and is_late

    def leaving(self) -> set[str]:
        """Machines that Ray drains."""
        return self._departures.nodes if self._departures is not None else set()

    def drop(self, member: Member) -> None:
        """Let go of the actor and ask for another."""
        assert isinstance(member, RayMember)
        with contextlib.suppress(RayError, ValueError):
            ray.kill(member.actor)
        # Ray moves what was reserved on a machine that is gone, but not what is on one that is about to go.
        bundle = None if member.node in self.leaving() else member.bundle
        self._members = [self._ask(bundle) if other is member else other for other in self._members]

    def obstacle(self) -> str | None:
        """What the machines of the cluster lack for the least number of workers."""
        return None if can_grow() else missing_resources(self._resources, self._size.least, alive_nodes())

    def waiting_for(self) -> str:
        """How many places are missing, and what is free."""
        ready = sum(bool(member.node) for member in self._members)
        size = ", ".join(f"{amount:g} {name}" for name, amount in self._resources.items())
        free = ray.available_resources()  # type: ignore[no-untyped-call]
        there = ", ".join(f"{free.get(name, 0.0):g} {name}" for name in self._resources)
        trouble = f"; the last one could not start: {self._trouble}" if self._trouble else ""
        return f"{self._size.least - ready} more workers of {size} each; the cluster has {there} free{trouble}"

    def close(self) -> None:
        """Let go of everything."""
        if self._departures is not None:
            self._departures.close()
        for member in self._members:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(member.actor)
        with contextlib.suppress(RayError, ValueError):
            remove_placement_group(self._group)
