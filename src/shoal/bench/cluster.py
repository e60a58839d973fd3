"""A Ray cluster of our own for the time of a measurement: one head node on this machine, as `ray start` makes it."""

import contextlib
import itertools
import random
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.bench.commands import end, started, wait_until
from shoal.core.errors import RunError

_LOOPBACK = "127.0.0.1"
_FIRST_PORT, _LAST_PORT = 20_000, 65_000  # below lie those of Ray's own workers
_GIVEN_TO_ANYBODY = Path("/proc/sys/net/ipv4/ip_local_port_range")
_SETTLE_S = 10.0
"""Its processes are busy with their own start for a while after it answers."""
_RAY = (
    "import ctypes, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGINT); "
    "from ray.scripts.scripts import main; sys.exit(main())"
)
"""The command `ray`, which ends with this process however that ends."""


@contextlib.contextmanager
def running_cluster(cpus: int, settle_s: float = _SETTLE_S) -> Iterator[tuple[str, dict[str, str]]]:
    """Its address, and the environment by which commands may use it. Nobody else finds it, and only it is stopped."""
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else Ray takes the loopback's address for the machine's other one
    }
    port, *others = free_ports(4)
    # Short, because the names of sockets in there are limited.
    with tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as folder:
        command = [
            *(sys.executable, "-c", _RAY, "start", "--head", "--block", "--temp-dir", folder),
            *("--num-cpus", str(cpus), "--node-ip-address", _LOOPBACK, "--port", str(port)),
            *("--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-host", _LOOPBACK),
            *("--dashboard-port", str(others[0]), "--dashboard-agent-listen-port", str(others[1])),
            *("--ray-client-server-port", str(others[2]), "--disable-usage-stats"),
        ]
        log = Path(folder) / "head.log"
        with started(command, log, environment) as head:

            def answers() -> bool | None:
                if head.poll() is not None:
                    raise RunError(f"a Ray cluster does not start here\n{log.read_text(errors='replace')[-2000:]}")
                return True if (Path(folder) / "ray_current_cluster").is_file() else None

            try:
                wait_until(answers, "a Ray cluster to start")
                time.sleep(settle_s)
                yield f"{_LOOPBACK}:{port}", environment
            finally:
                end(head, signal.SIGINT)  # at a SIGTERM it would wait for half a minute


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has; if there are such, ones that nobody gets who asks for any port.

    Ray binds them seconds later, and a head ends when one of its ports is taken meanwhile.
    """
    lowest, highest = map(int, _GIVEN_TO_ANYBODY.read_text().split())
    kept = [*range(_FIRST_PORT, lowest), *range(highest + 1, _LAST_PORT)] or range(_FIRST_PORT, _LAST_PORT)
    found = list(itertools.islice(filter(_is_free, random.SystemRandom().sample(kept, k=len(kept))), count))
    if len(found) < count:
        raise RunError(f"this machine has no {count} free ports for a Ray cluster")
    return found


def _is_free(port: int) -> bool:
    try:
        socket.create_server((_LOOPBACK, port)).close()
    except OSError:
        return False
    return True
