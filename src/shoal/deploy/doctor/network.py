"""Names, ports and interfaces of this machine."""

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.deploy.doctor.finding import Finding, in_list, passed

RAY_PORTS = {6379: "the head", 8265: "the dashboard", 10001: "Ray clients"}
_OF_RAY = ("gcs_server", "raylet", "ray::", "ray-", "dashboard")
_RESERVED = 0x0A
"""State of a socket that listens, in /proc/net/tcp."""


@dataclass(frozen=True)
class Port:
    """One that Ray wants."""

    number: int
    is_free: bool
    holder: str = ""
    """The command of the process that has it, as far as this user may see."""


def look_at_ports(ports: Mapping[int, str] = RAY_PORTS) -> list[Port]:
    """Which are free."""
    found = []
    for number in ports:
        is_free = _is_free(number)
        found.append(Port(number, is_free, "" if is_free else _holder(number)))
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - never listened at
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _holder(port: int) -> str:
    """Name and pid of whoever listens there."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in map(str.split, rows):
            if int(row[1].rpartition(":")[2], 16) == port and int(row[3], 16) == _RESERVED:
                inodes.add(f"socket:[{row[9]}]")
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            if any(str(file.readlink()) in inodes for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
                name = Path(words[0]).name if words else (process / "comm").read_text().strip()
                is_ray = any("/ray/" in word for word in words) and not name.startswith(_OF_RAY)
                return f"{'ray, ' if is_ray else ''}{name} (pid {process.name})"
        except OSError:  # another user's, or it has ended meanwhile
            continue
    return ""


def judge_ports(ports: list[Port]) -> Finding:
    """Whether a Ray could be started here, or is."""
    taken = [port for port in ports if not port.is_free]
    foreign = [port for port in taken if not port.holder.startswith((*_OF_RAY, "ray,"))]
    if foreign:
        words = in_list(f"{port.number} is held by {port.holder or 'a process of another user'}" for port in foreign)
        advice = (
            "a Ray head needs them: end it, or ray start --head with --port, --dashboard-port, --ray-client-server-port"
        )
        return Finding("ports", "warn", words, advice)
    if taken:
        return passed("ports", in_list(f"{port.number} is held by {port.holder}" for port in taken))
    return passed("ports", f"{', '.join(str(port.number) for port in ports)} are free")


def look_up(name: str) -> list[str]:
    """The addresses that a name stands for; none where it stands for nothing."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def is_own(address: str) -> bool:
    """Whether this machine has the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def judge_loopback(addresses: list[str]) -> Finding:
    """Whether `localhost` is this machine. Shoal goes by 127.0.0.1, so the worst is a warning."""
    if any(address.startswith("127.") or address == "::1" for address in addresses):
        return passed("loopback", f"localhost is {', '.join(addresses)}")
    found = f"localhost is {', '.join(addresses)}" if addresses else "localhost means nothing here"
    return Finding("loopback", "warn", found, "add to /etc/hosts: 127.0.0.1 localhost")


def judge_host_name(name: str, own: Mapping[str, bool]) -> Finding:
    """Whether the host's name stands for this machine, by which Gloo goes where nobody tells it an interface.

    Shoal tells it, so the worst is a warning.

    Args:
        name: The host's.
        own: The addresses that it stands for, and whether this machine has them.
    """
    advice = (
        f"Shoal does without, other programs do not: add '127.0.1.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    )
    if not own:
        return Finding("host name", "warn", f"{name} stands for no address", advice)
    if not any(own.values()):
        return Finding("host name", "warn", f"{name} is {', '.join(own)}, which this machine does not have", advice)
    return passed("host name", f"{name} is {', '.join(own)}")


def check_names() -> list[Finding]:
    """Loopback and host name."""
    name = socket.gethostname()
    own = {address: is_own(address) for address in look_up(name)}
    return [judge_loopback(look_up("localhost")), judge_host_name(name, own)]
