"""Names and ports."""

import os
import socket

import pytest

from shoal.deploy.doctor.network import (
    Port,
    check_names,
    is_own,
    judge_host_name,
    judge_loopback,
    judge_ports,
    look_at_ports,
    look_up,
)


@pytest.mark.parametrize(
    ("port", "level"),
    [
        (Port(6379, True), "pass"),
        (Port(6379, False, "gcs_server (pid 7)"), "pass"),
        (Port(8265, False, "ray, python3 (pid 8)"), "pass"),
        (Port(6379, False, "redis-server (pid 9)"), "warn"),
        (Port(6379, False), "warn"),
    ],
)
def test_who_has_a_port_of_ray(port: Port, level: str) -> None:
    finding = judge_ports([Port(10001, True), port])
    assert finding.level == level
    if level == "warn":
        assert port.holder or "another user" in finding.found


def test_a_port_that_somebody_has_is_told_with_the_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        (found,) = look_at_ports({number: "a test"})
        assert not found.is_free and f"(pid {os.getpid()})" in found.holder
    assert look_at_ports({number: "a test"}) == [Port(number, True)]


@pytest.mark.parametrize(
    ("addresses", "level"), [(["127.0.0.1"], "pass"), (["::1"], "pass"), ([], "warn"), (["10.0.0.1"], "warn")]
)
def test_loopback(addresses: list[str], level: str) -> None:
    assert judge_loopback(addresses).level == level


@pytest.mark.parametrize(
    ("own", "level", "words"),
    [
        ({"10.0.0.5": True}, "pass", "10.0.0.5"),
        ({"127.0.1.1": True, "10.9.9.9": False}, "pass", "127.0.1.1"),
        ({"10.9.9.9": False}, "warn", "does not have"),
        ({}, "warn", "no address"),
    ],
)
def test_the_hosts_name(own: dict[str, bool], level: str, words: str) -> None:
    finding = judge_host_name("box", own)
    assert finding.level == level and words in finding.found


def test_this_machine() -> None:
    assert is_own("127.0.0.1") and not is_own("192.0.2.1")  # the second is for documents
    assert look_up("no-such-host.invalid") == []
    assert [finding.check for finding in check_names()] == ["loopback", "host name"]
