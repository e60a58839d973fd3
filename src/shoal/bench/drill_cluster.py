"""A Ray cluster of several nodes on this machine, in a process of its own, whose nodes can be drained and killed.

It listens on the loopback interface alone, with a token and a folder of its own, so that no other Ray on the machine
has anything to do with it. It ends when whoever started it does.
"""

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TextIO

from shoal.core.errors import RunError

_END_WITHIN_S = 30.0
_SETTLE_WITHIN_S = 60.0
_PREEMPTED = 2
"""Ray's number for a node that is taken away, as against one that has nothing to do."""


class DrillCluster:
    """The drill's side: a head without CPUs, and `num_nodes` nodes with `cpus` each."""

    def __init__(self, num_nodes: int, cpus: int, log: Path) -> None:
        # Short, because Ray keeps sockets there, whose paths may not be long.
        self._folder = Path(tempfile.mkdtemp(prefix="shoal-ray-", dir="/tmp"))
        (self._folder / "ray").mkdir()
        self._log = log
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # or Ray takes another address of this machine for loopback
        }
        """What a driver needs to find it and be let in."""
        own = {
            "RAY_TMPDIR": str(self._folder),  # Ray's note of the newest cluster is there too: others keep theirs
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with log.open("ab") as file:
            self._process = subprocess.Popen(  # noqa: S603 - ourselves
                [sys.executable, "-P", "-m", "shoal.bench.drill_cluster", str(num_nodes), str(cpus)],
                env=dict(os.environ) | self.environment | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,  # Ray ends a whole process group when its parent is gone: not ours
            )
        try:
            self.address = str(self._answer()["address"])
        except BaseException:
            self.close()
            raise

    def nodes(self) -> list[str]:
        """Those that run, by their ids."""
        return list(self._ask("nodes")["nodes"])

    def kill(self, node: str) -> None:
        """End a node with all its processes, without a word."""
        self._ask("kill", node)

    def preempt(self, node: str, within_s: float) -> None:
        """Announce that a node will be taken away, and do it then."""
        self._ask("preempt", node, within_s)

    def mend(self) -> None:
        """Nodes anew for those that were killed or drained."""
        self._ask("mend")

    def close(self) -> None:
        """End all of it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(_END_WITHIN_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            self._process.stdout.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _ask(self, *words: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
            raise RunError(f"the drill's Ray cluster ended: {said[-1] if said else 'without a word'}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """The process that the cluster lives in; orders come as lines, and the end of them is the end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # Ray prints
    from ray.cluster_utils import Cluster

    where = {"node_ip_address": "127.0.0.1", "num_gpus": 0, "object_store_memory": 128 << 20}
    num_nodes, cpus = int(sys.argv[1]), int(sys.argv[2])
    head = {"num_cpus": 0, "include_dashboard": False, **where}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(num_nodes):
            cluster.add_node(num_cpus=cpus, **where)
        print(json.dumps({"address": cluster.address}), file=answers)
        _obey(cluster, num_nodes, {"num_cpus": cpus, **where}, answers)
    finally:
        cluster.shutdown()


def _obey(cluster: Any, num_nodes: int, node: dict[str, Any], answers: TextIO) -> None:
    """Carry out one order after the other; nodes that are preempted go when their time has come."""
    leaving: dict[str, float] = {}
    while True:
        left_s = max(0.0, min(leaving.values()) - time.time()) if leaving else None
        if not select.select([sys.stdin], [], [], left_s)[0]:
            for name in [name for name, then in leaving.items() if then <= time.time()]:
                _kill(cluster, name)
                del leaving[name]
            continue
        if not (line := sys.stdin.readline()):
            return
        what, *arguments = json.loads(line)
        if what == "kill":
            _kill(cluster, *arguments)
        elif what == "preempt":
            name, within_s = arguments
            leaving[name] = time.time() + within_s
            _drain(cluster, name, leaving[name])
        elif what == "mend":
            _mend(cluster, leaving, num_nodes, node)
        nodes = [node.node_id for node in cluster.worker_nodes if node.node_id not in leaving]
        print(json.dumps({"nodes": nodes}), file=answers)


def _kill(cluster: Any, node: str) -> None:
    """The raylet and everything that it has started, at once, as when a machine loses its power."""
    doomed = next(found for found in cluster.worker_nodes if found.node_id == node)
    raylets = [info.process.pid for infos in doomed.all_processes.values() for info in infos]
    below = [pid for raylet in raylets for pid in _descendants(raylet)]
    cluster.remove_node(doomed, allow_graceful=False)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _drain(cluster: Any, node: str, deadline: float) -> None:
    from ray._raylet import GcsClient  # type: ignore[attr-defined] # there is no public way

    client = GcsClient(address=cluster.gcs_address)
    accepted, why = client.drain_node(node, _PREEMPTED, "a drill", int(deadline * 1000))
    if not accepted:
        raise RuntimeError(f"Ray does not drain the node: {why}")


def _mend(cluster: Any, leaving: dict[str, float], num_nodes: int, node: dict[str, Any]) -> None:
    for name in leaving:
        _kill(cluster, name)
    leaving.clear()
    while len(cluster.worker_nodes) < num_nodes:
        cluster.add_node(**node)
    cluster.wait_for_nodes(timeout=_SETTLE_WITHIN_S)  # until those that are gone are known to be


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        todo += (below := children.get(todo.pop(), []))
        found += below
    return found


if __name__ == "__main__":
    main()
