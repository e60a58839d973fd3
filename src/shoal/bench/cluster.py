"""A Ray cluster of our own for the time of a measurement: one head node on this machine, as `ray start` makes it."""

import contextlib
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
    port, *others = _free_ports(4)
    # Short, because the names of sockets in there are limited.
    with tempfile.TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as folder:
        command = [
            *(sys.executable, "-c", _RAY, "start", "--head", "--block", "--temp-dir", folder),
            *("--num-cpus", str(cpus), "--node-ip-address", "127.0.0.1", "--port", str(port)),
            *("--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-host", "127.0.0.1"),
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
                yield f"127.0.0.1:{port}", environment
            finally:
                end(head, signal.SIGINT)  # at a SIGTERM it would wait for half a minute


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [opened.getsockname()[1] for opened in sockets]
