"""What `cluster.sh` asks of a Ray cluster that runs: its machines, that some of them be drained, that its jobs end."""

import argparse
import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import RunError, UserError
from shoal.core.ray_connection import host_and_port, why_silent

_ANSWER_S = 10.0
_LOOK_EVERY_S = 0.5
_PREEMPTION = 2
"""Ray's number for a machine that will go, which no raylet may refuse."""


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    node_id: str
    address: str
    is_alive: bool
    is_head: bool


def latest(nodes: Sequence[Node]) -> dict[str, Node]:
    """The machines by their addresses: of several lives the one that goes on, or else any."""
    found: dict[str, Node] = {}
    for node in nodes:
        if node.is_alive or node.address not in found:
            found[node.address] = node
    return found


def to_drain(nodes: Sequence[Node], addresses: Sequence[str]) -> list[Node]:
    """Those at these addresses that run; the head is never drained."""
    known = latest(nodes)
    return [known[one] for one in addresses if one in known and known[one].is_alive and not known[one].is_head]


def _client(address: str) -> Any:
    if reason := why_silent(*_parts(address)):  # Ray itself would try for long
        raise RunError(f"nothing answers at {address}: {reason}")
    return importlib.import_module("ray._raylet").GcsClient(address=address)


def _parts(address: str) -> tuple[str, int]:
    host, port = host_and_port(address)
    if port is None:
        raise UserError(f"address: {address!r} should be HOST:PORT")
    return host, port


def nodes_of(client: Any) -> list[Node]:
    """All that Ray knows of."""
    infos = client.get_all_node_info(timeout=_ANSWER_S)
    return [
        Node(
            node_id=node_id.hex(),
            address=info.node_manager_address,
            is_alive=info.state == 0,
            is_head="node:__internal_head__" in info.resources_total,
        )
        for node_id, info in infos.items()
    ]


def drain(client: Any, addresses: Sequence[str], grace_s: float) -> list[str]:
    """Have Ray drain machines, so that runs save and leave them, and wait until they are empty and have ended; the
    addresses of those that have not."""
    deadline_ms = int((time.time() + grace_s) * 1000)
    waiting = {node.node_id: node.address for node in to_drain(nodes_of(client), addresses)}
    for node_id in waiting:
        client.drain_node(node_id.encode(), _PREEMPTION, b"cluster.sh", deadline_ms, timeout=_ANSWER_S)
    until = time.monotonic() + grace_s
    while waiting and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        alive = {node.node_id for node in nodes_of(client) if node.is_alive}
        waiting = {node_id: address for node_id, address in waiting.items() if node_id in alive}
    return sorted(waiting.values())


def stop_jobs(dashboard: str, grace_s: float, tell: Callable[[str], None]) -> None:
    """Ask every job to save and end, and wait for it."""
    from shoal.launch.dashboard import client_of, in_words

    client = client_of(dashboard)
    with in_words(dashboard):
        jobs = [job.submission_id for job in client.list_jobs() if job.submission_id and not job.status.is_terminal()]
        for job_id in jobs:
            tell(f"job {job_id} is asked to save and end")
            client.stop_job(job_id)
        until = time.monotonic() + grace_s
        while jobs and time.monotonic() < until:
            time.sleep(_LOOK_EVERY_S)
            jobs = [job_id for job_id in jobs if not client.get_job_status(job_id).is_terminal()]
    for job_id in jobs:
        tell(f"job {job_id} has not ended within {grace_s:g} s")


def main(words: Sequence[str] | None = None) -> int:
    """`python -m shoal.deploy.nodes`; for scripts, which read what is printed."""
    parser = argparse.ArgumentParser(prog="python -m shoal.deploy.nodes", description=__doc__)
    parser.add_argument("what", choices=("list", "drain", "stop-jobs"))
    parser.add_argument("address", help="HOST:PORT of Ray; for stop-jobs http://HOST:PORT of its dashboard")
    parser.add_argument("machines", nargs="*", help="addresses, to drain")
    parser.add_argument("--grace", type=float, default=120.0, metavar="S", help="seconds for runs to save and end")
    given = parser.parse_args(words)

    def tell(line: str) -> None:
        print(line, flush=True)

    try:
        if given.what == "stop-jobs":
            stop_jobs(given.address, given.grace, tell)
            return 0
        with _gcs_errors(given.address):
            client = _client(given.address)
            if given.what == "drain":
                left = drain(client, given.machines, given.grace)
                if left:
                    tell(f"{', '.join(left)}: still busy after {given.grace:g} s")
                return 0
            for node in sorted(latest(nodes_of(client)).values(), key=lambda node: (not node.is_head, node.address)):
                tell(f"{node.address} {'alive' if node.is_alive else 'dead'} {'head' if node.is_head else 'worker'}")
        return 0
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1


@contextlib.contextmanager
def _gcs_errors(address: str) -> Iterator[None]:
    """What Ray complains about, in one line."""
    from ray.exceptions import RayError

    try:
        yield
    except (UserError, RunError):
        raise
    except (RayError, RuntimeError, OSError, ValueError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise RunError(f"Ray at {address} does not answer: {first}") from error


if __name__ == "__main__":
    sys.exit(main())
