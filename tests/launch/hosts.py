"""Several hosts on one machine: network namespaces with addresses of their own, joined by a bridge."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.launch.processes import wait_until_dead

RAY = Path(sys.executable).with_name("ray")


class NotPermittedError(Exception):
    """This machine does not let us make network namespaces."""


def _ip(*arguments: str) -> None:
    result = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if result.returncode:
        raise NotPermittedError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


class Hosts:
    """`number` hosts; the first is the head of a Ray cluster and takes no work, the others have one CPU each."""

    def __init__(self, number: int) -> None:
        if shutil.which("ip") is None:
            raise NotPermittedError("there is no ip command")
        self.tag = f"s{os.getpid() % 10000}"
        self.number = number
        self.folder = Path(tempfile.mkdtemp(prefix="sh-", dir="/tmp"))
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.folder),
        }
        self.rays: dict[int, subprocess.Popen[bytes]] = {}
        try:
            _ip("link", "add", f"{self.tag}br", "type", "bridge")
            _ip("link", "set", f"{self.tag}br", "up")
            for host in range(1, number + 1):
                _ip("netns", "add", self.name(host))
                _ip("link", "add", self.link(host), "type", "veth", "peer", "name", "eth0", "netns", self.name(host))
                _ip("link", "set", self.link(host), "master", f"{self.tag}br", "up")
                _ip("-n", self.name(host), "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                _ip("-n", self.name(host), "link", "set", "eth0", "up")
                _ip("-n", self.name(host), "link", "set", "lo", "up")
            self.start(1, "--head", "--port", "6379", "--num-cpus", "0", "--include-dashboard", "false")
            for host in range(2, number + 1):
                self.join(host)
        except BaseException:
            self.close()
            raise

    def name(self, host: int) -> str:
        return f"{self.tag}h{host}"

    def link(self, host: int) -> str:
        return f"{self.tag}v{host}"

    def address(self, host: int) -> str:
        return f"10.99.{os.getpid() % 250}.{host}"

    @property
    def cluster(self) -> str:
        return f"{self.address(1)}:6379"

    def command(self, host: int, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name(host), *words]

    def join(self, host: int) -> None:
        self.start(host, "--address", self.cluster, "--num-cpus", "1")

    def start(self, host: int, *arguments: str) -> None:
        """`ray start` on a host, and wait until it says that it runs."""
        log = self.folder / f"ray-{host}-{len(list(self.folder.glob('ray-*')))}.log"
        words = [str(RAY), "start", "--block", "--node-ip-address", self.address(host), "--num-gpus", "0", *arguments]
        with log.open("wb") as file:
            self.rays[host] = subprocess.Popen(
                self.command(host, *words, "--object-store-memory", str(128 << 20)),
                env=self.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline and self.rays[host].poll() is None, log.read_text()
            time.sleep(0.1)

    def cut(self, host: int) -> None:
        """Pull the plug of its network; everything on it goes on."""
        _ip("link", "set", self.link(host), "down")

    def mend(self, host: int) -> None:
        """Plug it in again and join the cluster anew."""
        self.kill(host)
        _ip("link", "set", self.link(host), "up")
        self.join(host)

    def kill(self, host: int) -> None:
        """End every process on a host, as when it loses its power."""
        pids = subprocess.run(
            ["ip", "netns", "pids", self.name(host)], capture_output=True, text=True, check=True
        ).stdout.split()
        for pid in map(int, pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if (ray := self.rays.pop(host, None)) is not None:
            ray.wait()
        wait_until_dead(*map(int, pids))

    def close(self) -> None:
        for host in range(1, self.number + 1):
            if (
                f"{self.name(host)}"
                in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout
            ):
                self.kill(host)
                subprocess.run(["ip", "netns", "del", self.name(host)], check=False)
        subprocess.run(["ip", "link", "del", f"{self.tag}br"], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
