"""What `cluster.sh` asks of Ray: who is drained, and for how long one waits."""

import socket
import time
from types import SimpleNamespace

import pytest

from shoal.deploy import nodes
from shoal.deploy.nodes import Node, drain, latest, main, nodes_of, to_drain

HEAD = Node("aa", "10.0.0.1", True, True)
FIRST = Node("bb", "10.0.0.2", True, False)
GONE = Node("cc", "10.0.0.3", False, False)


class NodeId(str):
    """As Ray's, which tells itself in hexadecimal."""

    def hex(self) -> str:
        return str(self)


class Gcs:
    """Answers as Ray's client does; machines that are drained end after some answers."""

    def __init__(self, *known: Node, ends_after: int = 0) -> None:
        self.known = known
        self.ends_after = ends_after
        self.drained: list[bytes] = []

    def get_all_node_info(self, timeout: float) -> dict[NodeId, SimpleNamespace]:
        self.ends_after -= bool(self.drained)
        return {NodeId(node.node_id): self._info(node) for node in self.known}

    def _info(self, node: Node) -> SimpleNamespace:
        has_ended = node.node_id.encode() in self.drained and self.ends_after < 0
        return SimpleNamespace(
            node_manager_address=node.address,
            state=0 if node.is_alive and not has_ended else 1,
            resources_total={"node:__internal_head__": 1.0} if node.is_head else {"CPU": 1.0},
        )

    def drain_node(self, node_id: bytes, reason: int, message: bytes, deadline_ms: int, timeout: float) -> None:
        assert reason == 2 and deadline_ms > (time.time() - 1.0) * 1000
        self.drained.append(node_id)


def test_of_several_lives_at_an_address_the_one_that_goes_on_counts() -> None:
    before, after = Node("dd", "10.0.0.2", False, False), FIRST
    assert latest([before, after]) == latest([after, before]) == {"10.0.0.2": after}


def test_only_machines_that_run_are_drained_and_never_the_head() -> None:
    assert to_drain([HEAD, FIRST, GONE], ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]) == [FIRST]


def test_what_ray_tells_is_read() -> None:
    assert nodes_of(Gcs(HEAD, FIRST, GONE)) == [HEAD, FIRST, GONE]


def test_a_drained_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_LOOK_EVERY_S", 0.001)
    gcs = Gcs(HEAD, FIRST, GONE, ends_after=3)
    assert drain(gcs, ["10.0.0.1", "10.0.0.2", "10.0.0.3"], 5.0) == []
    assert gcs.drained == [b"bb"] and gcs.ends_after == -1


def test_one_that_stays_busy_is_told_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_LOOK_EVERY_S", 0.001)
    assert drain(Gcs(HEAD, FIRST, ends_after=10**6), ["10.0.0.2"], 0.05) == ["10.0.0.2"]


def test_the_command_tells_in_lines_that_a_script_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nodes, "_client", lambda address: Gcs(GONE, FIRST, HEAD))
    assert main(["list", "10.0.0.1:6379"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "10.0.0.1 alive head",
        "10.0.0.2 alive worker",
        "10.0.0.3 dead worker",
    ]
    monkeypatch.setattr(nodes, "_client", lambda address: Gcs(FIRST, ends_after=10**6))
    assert main(["drain", "10.0.0.1:6379", "10.0.0.2", "--grace", "0"]) == 0
    assert capsys.readouterr().out == "10.0.0.2: still busy after 0 s\n"


def test_a_cluster_that_does_not_answer_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    assert main(["list", f"127.0.0.1:{port}"]) == 1
    assert time.monotonic() - began < 2.0
    assert capsys.readouterr().err == f"error: nothing answers at 127.0.0.1:{port}: Connection refused\n"
    assert main(["list", "somewhere"]) == 2
    assert "'somewhere' should be HOST:PORT" in capsys.readouterr().err
    assert main(["stop-jobs", f"http://127.0.0.1:{port}"]) == 2
    assert "nothing answers" in capsys.readouterr().err
