"""A Ray cluster of its own: one head node with its dashboard, on the loopback interface, with its own token."""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.bench.cluster import free_ports

_STARTS_WITHIN_S = 90.0


@dataclass(frozen=True)
class Head:
    """Where it is, and what opens it."""

    address: str
    token: str


@contextlib.contextmanager
def head_node(num_cpus: int = 2) -> Iterator[Head]:
    """Started as a user would in an activated environment; it ends with everything that runs on it."""
    dashboard_port, client_port = free_ports(2)
    head = Head(f"http://127.0.0.1:{dashboard_port}", secrets.token_hex(16))
    folder = Path(tempfile.mkdtemp(prefix="shoal-head-", dir="/tmp"))  # short, because sockets lie in it
    binaries = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "COV"))} | {
        "PATH": f"{binaries}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": head.token,
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else 127.0.0.1 becomes the address of another interface
    }
    command = [
        *(str(binaries / "ray"), "start", "--head", "--block", "--disable-usage-stats"),
        *("--port", "0", "--node-ip-address", "127.0.0.1", "--num-cpus", str(num_cpus), "--num-gpus", "0"),
        *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard_port)),
        *("--ray-client-server-port", str(client_port), "--dashboard-agent-listen-port", "0"),
        *("--object-store-memory", str(80 << 20), "--temp-dir", str(folder)),
    ]
    log = (folder / "head.log").open("w+")
    # In a folder of its own: what lies in the working directory would hide modules from Ray's own processes.
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        _wait_until_up(head, process, folder)
        yield head
        if process.poll() is not None:
            raise AssertionError(f"the cluster ended by itself, status {process.returncode}:\n{_last_words(folder)}")
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
        process.kill()
        process.wait()
        log.close()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(head: Head, process: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + _STARTS_WITHIN_S
    request = urllib.request.Request(f"{head.address}/api/jobs/", headers={"Authorization": f"Bearer {head.token}"})
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(request, timeout=5):
            if (folder / "ray_current_cluster").is_file():  # the dashboard answers before the rest is there
                return
        time.sleep(0.2)
    raise AssertionError(f"the cluster did not start:\n{_last_words(folder)}")


def _last_words(folder: Path) -> str:
    """The end of what the head and each of its processes wrote: which of them ended first, and why."""
    files = [folder / "head.log", *sorted(folder.glob("session_2*/logs/*.*"))]
    texts = {path.name: path.read_text(errors="replace").splitlines()[-8:] for path in files if path.is_file()}
    return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in texts.items() if lines)
