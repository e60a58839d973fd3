"""One connection between two machines, here both ends on loopback."""

import socket
import threading
from collections.abc import Iterator

import pytest

from shoal.deploy.doctor import transfer
from shoal.deploy.doctor.transfer import Listener, measure


@pytest.fixture
def listener() -> Iterator[Listener]:
    found = Listener("127.0.0.1")
    yield found
    found.close()


def test_latency_and_bandwidth(listener: Listener) -> None:
    found = measure("127.0.0.1", listener.port, listener.key, most_bytes=4 << 20)
    assert "error" not in found and found["connected"]
    assert 0 < found["latency_s"] < 0.1 and found["bytes_per_s"] > 1e6


def test_it_ends_in_time(listener: Listener) -> None:
    found = measure("127.0.0.1", listener.port, listener.key, most_bytes=1 << 50, longest_s=0.1)
    assert "error" not in found


def test_who_does_not_know_the_key_gets_nothing(listener: Listener) -> None:
    found = measure("127.0.0.1", listener.port, "0" * 32)
    assert found["connected"] and "error" in found and "bytes_per_s" not in found


def test_it_listens_where_it_was_told_and_no_longer_than_it_must() -> None:
    listener = Listener("127.0.0.1")
    assert listener._socket.getsockname()[0] == "127.0.0.1"
    listener.close()
    found = measure("127.0.0.1", listener.port, listener.key)
    assert found == {"error": "Connection refused"}
    assert not listener._thread.is_alive()


def test_a_connection_on_which_nothing_moves_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STALLED_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held: list[socket.socket] = []
        accepting = threading.Thread(target=lambda: held.append(silent.accept()[0]))
        accepting.start()
        found = measure("127.0.0.1", silent.getsockname()[1], "0" * 32)
        accepting.join()
        held[0].close()
    assert found == {"connected": True, "error": "no answer"}
