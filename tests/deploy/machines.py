"""Machines to make a cluster of: network namespaces with processes, home, /tmp and sshd of their own.

Every machine has two networks: `eth0`, which the cluster is given, and `eth1`, on which it must not be found.
"""

import os
import pwd
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "deploy" / "scripts" / "cluster.sh"
BINARIES = Path(sys.executable).parent
RAY_OPTIONS = ["--", "--object-store-memory", str(100 << 20), "--num-gpus", "0"]
_NEEDED = ("ip", "ssh", "ssh-keygen", "unshare", "nsenter", "mount", "iptables")
_HOME = pwd.getpwuid(os.geteuid()).pw_dir
_SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
_INIT = """
set -e
hostname {name}
mount --make-rprivate /
for kept in {kept}; do
  for new in {home}:{home_of_user} {tmp}:/tmp; do
    case "$kept" in "${{new#*:}}"/*)
      mkdir -p "${{new%%:*}}${{kept#"${{new#*:}}"}}"
      mount --bind "$kept" "${{new%%:*}}${{kept#"${{new#*:}}"}}" ;;
    esac
  done
done
mount --rbind {home} {home_of_user}
mount --rbind {tmp} /tmp
mkdir -p /run/sshd
exec {sshd} -D -e -f {home_of_user}/.sshd/config
"""
_SSH_CONFIG = """
Host *
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
_SSHD_CONFIG = """
ListenAddress {address}
HostKey {home}/.sshd/host_key
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
AuthorizedKeysFile {home}/.ssh/id_ed25519.pub
MaxStartups 100
"""


def skip_unless_possible() -> None:
    """Skip the test, with the reason, where machines cannot be made."""
    missing = [name for name in _NEEDED if shutil.which(name) is None] + ([] if _SSHD else ["sshd"])
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    made = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], check=False)
    if made.returncode:
        pytest.skip("namespaces are not permitted here")


def _run(*words: str) -> str:
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{shlex.join(words)}: {result.stderr}"
    return result.stdout


class Machine:
    """One of them."""

    def __init__(self, network: "Network", number: int) -> None:
        self.network = network
        self.name = f"{network.tag}m{number}"
        self.address = f"10.98.{network.number}.{number}"
        self.other_address = f"10.97.{network.number}.{number}"
        self.folder = network.folder / f"m{number}"
        self.home = self.folder / "home"
        self.tmp = self.folder / "tmp"
        for folder in (self.folder, self.home, self.tmp):
            folder.mkdir()
        (self.home / ".ssh").mkdir(mode=0o700)
        (self.home / ".sshd").mkdir(mode=0o700)
        for name in ("id_ed25519", "id_ed25519.pub"):
            shutil.copy(network.folder / name, self.home / ".ssh" / name)
        (self.home / ".ssh" / "config").write_text(_SSH_CONFIG)
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.home / ".sshd" / "host_key"))
        config = _SSHD_CONFIG.format(address=self.address, home=_HOME)
        (self.home / ".sshd" / "config").write_text(config)
        _run("ip", "netns", "add", self.name)
        for device, bridge, address in (("eth0", "a", self.address), ("eth1", "b", self.other_address)):
            link = f"{self.name}{bridge}"
            _run("ip", "link", "add", link, "type", "veth", "peer", "name", device, "netns", self.name)
            _run("ip", "link", "set", link, "master", f"{network.tag}{bridge}", "up")
            _run("ip", "-n", self.name, "addr", "add", f"{address}/24", "dev", device)
            _run("ip", "-n", self.name, "link", "set", device, "up")
        _run("ip", "-n", self.name, "link", "set", "lo", "up")
        self._init: subprocess.Popen[bytes] | None = None
        self.boot()

    def boot(self) -> None:
        """Start it, with what is on its disk."""
        values = {
            "name": self.name,
            # What must be seen there although it lies below a folder of which the machine has its own.
            "kept": shlex.join(sorted({sys.base_prefix, sys.prefix, str(REPOSITORY), str(self.network.shared)})),
            "home": self.home,
            "tmp": self.tmp,
            "home_of_user": _HOME,
            "sshd": _SSHD,
        }
        # A number of its own for every process, so that Ray's look at the process table ends at the machine.
        alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--mount", "--uts"]
        with (self.folder / "sshd.log").open("ab") as log:
            self._init = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *alone, "bash", "-c", _INIT.format(**values)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + 10
        while "Server listening" not in (self.folder / "sshd.log").read_text():
            assert self._init.poll() is None and time.monotonic() < deadline, (self.folder / "sshd.log").read_text()
            time.sleep(0.02)
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
        self._pid = int(children[0])

    def power_off(self) -> None:
        """End every process on it at once."""
        assert self._init is not None
        os.kill(self._pid, 9)  # with the first process of a machine, all others are killed
        self._init.wait()
        self._init = None
        (self.folder / "sshd.log").write_text("")

    def command(self, *words: str, environment: dict[str, str] | None = None) -> list[str]:
        """What runs `words` there, in an activated environment."""
        values = {"HOME": _HOME, "PATH": f"{BINARIES}:{os.environ['PATH']}", "LANG": "C.UTF-8"} | (environment or {})
        # For the coverage of what runs there; all else of this process's environment stays here.
        values |= {name: value for name, value in os.environ.items() if name.startswith("COV")}
        settings = [f"{name}={value}" for name, value in values.items()]
        enter = ["nsenter", "--target", str(self._pid), "--net", "--pid", "--mount", "--uts"]
        return [*enter, f"--wd={self.network.shared}", "env", "-i", *settings, *words]

    def run(self, *words: str, **options: Any) -> "subprocess.CompletedProcess[str]":
        """Run a command there to its end."""
        environment = options.pop("environment", None)
        options = {"capture_output": True, "text": True, "check": False, "timeout": 120} | options
        return subprocess.run(self.command(*words, environment=environment), **options)

    def cluster(self, *words: str, status: int = 0, **options: Any) -> str:
        """Run `cluster.sh` there; what it says."""
        result = self.run(str(SCRIPT), *words, **options)
        assert result.returncode == status, f"status {result.returncode}: {result.stdout}{result.stderr}"
        return str(result.stdout + result.stderr)

    def processes(self) -> dict[int, str]:
        """What runs there beside sshd, by its number there."""
        lines = self.run("ps", "-eo", "pid=,args=").stdout.splitlines()
        rows = {int(line.split()[0]): line.split(maxsplit=1)[1] for line in lines if len(line.split()) > 1}
        passing = ("sshd", "ps -eo", "<defunct>")
        return {pid: text for pid, text in rows.items() if not any(word in text for word in passing)}

    def listening(self) -> dict[int, set[str]]:
        """The ports on which something listens, and at which addresses."""
        ports: dict[int, set[str]] = {}
        for line in self.run("ss", "-Hltn").stdout.splitlines():
            address, _, port = line.split()[3].rpartition(":")
            ports.setdefault(int(port), set()).add(address)
        return ports


class Network:
    """`number` machines on two networks."""

    def __init__(self, number: int) -> None:
        skip_unless_possible()
        self.number = os.getpid() % 250
        self.tag = f"d{os.getpid() % 10000}"
        self.folder = Path(tempfile.mkdtemp(prefix="sd-", dir="/tmp"))
        self.shared = self.folder / "shared"
        self.shared.mkdir()
        self.machines: list[Machine] = []
        try:
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "id_ed25519"))
            for bridge in "ab":
                _run("ip", "link", "add", f"{self.tag}{bridge}", "type", "bridge")
                _run("ip", "link", "set", f"{self.tag}{bridge}", "up")
            for machine in range(1, number + 1):
                self.machines.append(Machine(self, machine))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End everything on them, and them."""
        for machine in self.machines:
            if machine._init is not None:
                machine.power_off()
        for line in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=False).stdout.splitlines():
            if line.split()[0].startswith(f"{self.tag}m"):
                subprocess.run(["ip", "netns", "del", line.split()[0]], check=False)
        for bridge in "ab":
            subprocess.run(["ip", "link", "del", f"{self.tag}{bridge}"], capture_output=True, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)
