"""One TCP connection between two machines: whether it comes about, how long a message takes, how much goes through.

The same kind of path that Gloo and NCCL's sockets take: an address of the machine, any free port.
"""

import contextlib
import hmac
import secrets
import socket
import statistics
import threading
import time
from typing import Any

CONNECT_WITHIN_S = 5.0
STALLED_S = 10.0
"""A connection on which nothing moves for so long is given up."""
PINGS = 20
MOST_BYTES = 64 << 20
LONGEST_S = 1.0
_CHUNK = 1 << 18
_PING = 8
_KEY_BYTES = 16


class Listener:
    """Answers those who know the key, until it is closed."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_hex(_KEY_BYTES)
        self._socket = socket.create_server((host, 0), backlog=128)
        self.port = int(self._socket.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="doctor-listener", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(connection,), name="doctor-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:  # whoever asked sees for itself that it broke
            connection.settimeout(STALLED_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_receive(connection, _KEY_BYTES), bytes.fromhex(self.key)):
                return
            for _ in range(PINGS):
                connection.sendall(_receive(connection, _PING))
            buffer, received = bytearray(_CHUNK), 0
            while count := connection.recv_into(buffer):
                received += count
            connection.sendall(received.to_bytes(_PING, "big"))

    def close(self) -> None:
        """Stop listening."""
        with contextlib.suppress(OSError):  # Linux wakes the thread that accepts
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(timeout=CONNECT_WITHIN_S)


def measure(
    host: str, port: int, key: str, most_bytes: int = MOST_BYTES, longest_s: float = LONGEST_S
) -> dict[str, Any]:
    """Latency in seconds (half a round trip) and bytes per second to a listener, or an `error`."""
    facts: dict[str, Any] = {}
    try:
        with socket.create_connection((host, port), timeout=CONNECT_WITHIN_S) as connection:
            facts["connected"] = True
            connection.settimeout(STALLED_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(bytes.fromhex(key))
            facts["latency_s"] = _ping(connection)
            facts["bytes_per_s"] = _push(connection, most_bytes, longest_s)
    except OSError as error:
        facts["error"] = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
    return facts


def _ping(connection: socket.socket) -> float:
    trips = []
    for _ in range(PINGS):
        began = time.perf_counter()
        connection.sendall(bytes(_PING))
        _receive(connection, _PING)
        trips.append(time.perf_counter() - began)
    return statistics.median(trips) / 2


def _push(connection: socket.socket, most_bytes: int, longest_s: float) -> float:
    chunk, sent, began = bytes(_CHUNK), 0, time.perf_counter()
    while sent < most_bytes and time.perf_counter() - began < longest_s:
        connection.sendall(chunk)
        sent += len(chunk)
    connection.shutdown(socket.SHUT_WR)
    arrived = int.from_bytes(_receive(connection, _PING), "big")
    if arrived != sent:
        raise ConnectionError(f"{sent} bytes were sent and {arrived} arrived")
    return sent / (time.perf_counter() - began)


def _receive(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError("the other side has closed the connection")
        found += part
    return bytes(found)
