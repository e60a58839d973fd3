"""The cluster of a measurement: its ports."""

import socket
from pathlib import Path

import pytest

from shoal.bench import cluster
from shoal.bench.cluster import free_ports
from shoal.core.errors import RunError


def test_ports_are_free_and_not_given_to_those_who_ask_for_any() -> None:
    lowest, highest = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = free_ports(20)
    assert len(set(found)) == 20
    assert not any(lowest <= port <= highest for port in found)
    for port in found:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_is_passed_over_and_no_free_one_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(cluster, "_FIRST_PORT", port)
        monkeypatch.setattr(cluster, "_LAST_PORT", port + 1)
        with pytest.raises(RunError, match="no 1 free ports"):
            free_ports(1)
