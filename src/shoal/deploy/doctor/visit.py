"""An actor on every machine of a cluster, for as long as the doctor is there."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.deploy.doctor.members import Member
from shoal.deploy.doctor.probe import Probe
from shoal.launch.ray_crew import is_client

START_WITHIN_S = 60.0
CLOSE_WITHIN_S = 5.0


@dataclass(frozen=True)
class Place:
    """A machine with an actor of ours."""

    name: str
    """Its address; with a part of its id where several have one."""
    member: Member
    actor: Any


@dataclass(frozen=True)
class Answers:
    """Of machines that were asked the same, by name."""

    values: Mapping[str, Any]
    errors: Mapping[str, str]


def members() -> dict[str, Member]:
    """Every machine that the head knows, by its id."""
    # There is no public way to ask who is leaving; a Ray client is not told.
    leaving = set() if is_client() else set(ray._private.state.state.get_draining_nodes())
    return {
        node["NodeID"]: Member(
            address=node["NodeManagerAddress"],
            is_alive=node["Alive"],
            resources=dict(node["Resources"]),
            is_leaving=node["NodeID"] in leaving,
            why_dead=str(node.get("DeathReasonMessage") or ""),
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
    }


def busy() -> str:
    """Why figures of speed say little; empty where nobody else has the cluster."""
    free, there = ray.available_resources(), ray.cluster_resources()  # type: ignore[no-untyped-call]
    taken = {name: there[name] - free.get(name, 0.0) for name in ("CPU", "GPU") if there.get(name)}
    words = [f"{amount:g} of {there[name]:g} {name}" for name, amount in taken.items() if amount > 0]
    return f"while others use {' and '.join(words)}" if words else ""


class Visit:
    """Start with `begin`; `close` leaves nothing behind."""

    def __init__(self, known: Mapping[str, Member]) -> None:
        alive = {node: member for node, member in known.items() if member.is_alive}
        shared = Counter(member.address for member in alive.values())
        names = {
            node: member.address if shared[member.address] == 1 else f"{member.address}#{node[:6]}"
            for node, member in alive.items()
        }
        self.places: list[Place] = []
        for node, member in sorted(alive.items(), key=lambda item: item[1].address):
            remote = ray.remote(Probe).options(
                num_cpus=0,
                max_concurrency=8,
                max_restarts=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            self.places.append(Place(names[node], member, remote.remote(member.address)))

    def begin(self) -> dict[str, str]:
        """Wait for the actors; those that do not come, and why. They are not asked anything from then on."""
        answers = self.ask("pid", timeout_s=START_WITHIN_S)
        for place in self.places:
            if place.name in answers.errors:
                _kill(place.actor)
        self.places = [place for place in self.places if place.name in answers.values]
        return dict(answers.errors)

    def ask(
        self,
        method: str,
        *given: Any,
        timeout_s: float,
        of: Sequence[Place] | None = None,
        each: Callable[[Place], tuple[Any, ...]] | None = None,
    ) -> Answers:
        """Call a method on all at the same time.

        Args:
            method: Of `Probe`.
            given: What all are given.
            timeout_s: For all together.
            of: Ask these alone.
            each: What each is given, instead of `given`.
        """
        asked = self.places if of is None else of
        refs = {p.name: getattr(p.actor, method).remote(*(each(p) if each else given)) for p in asked}
        if not refs:
            return Answers({}, {})
        ready, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout_s)
        done = set(ready)
        values, errors = {}, {}
        for name, ref in refs.items():
            if ref not in done:
                errors[name] = f"no answer within {timeout_s:.0f} s"
                continue
            try:
                values[name] = ray.get(ref)
            except RayError as error:
                errors[name] = _words(error)
        return Answers(values, errors)

    def ask_one(self, place: Place, method: str, timeout_s: float) -> Any:
        """One of them, as fast as can be."""
        return ray.get(getattr(place.actor, method).remote(), timeout=timeout_s)

    def close(self) -> None:
        """End what the actors have started, and the actors."""
        with contextlib.suppress(RayError, ConnectionError):  # a cluster that is gone has nothing left of ours
            self.ask("close", timeout_s=CLOSE_WITHIN_S)
        for place in self.places:
            _kill(place.actor)
        self.places = []


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor)


def _words(error: BaseException) -> str:
    """The last line that says something: what Ray puts around it is long."""
    cause = getattr(error, "cause", None)
    text = str(cause if isinstance(cause, Exception) else error).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
