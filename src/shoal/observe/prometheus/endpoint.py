"""An HTTP endpoint where Prometheus reads a run's metrics, in threads of its own beside the training."""

import errno
import functools
import os
import socket
import socketserver
import threading
import time
import weakref
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shoal.observe.prometheus.exposition import CONTENT_TYPE, Exposition
from shoal.observe.records import Observer

_ANSWER_WITHIN_S = 5.0
"""A client that does not say what it wants, or does not take the answer, is left after so long."""
_MOST_CLIENTS = 8
"""At a time; others are turned away, so that clients that hang cannot take a thread each without end."""
_NOTICE_S = 0.1
_PORT_WAIT_S = 30.0
"""How long a port may be taken: the process that had the run before may still be dying."""
_TRY_EVERY_S = 0.5
_PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>shoal</title>
<p>A training run by Shoal. Its metrics, as Prometheus reads them: <a href="/metrics">/metrics</a></p></html>
"""


class Server:
    """An endpoint that answers."""

    def __init__(self, http: "_Http") -> None:
        self._http = http
        self.port: int = http.server_address[1]
        self._thread = threading.Thread(target=http.serve_forever, args=(_NOTICE_S,), name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; whoever is being answered gets it or not."""
        self._http.shutdown()
        self._http.server_close()


def serve(exposition: Exposition, host: str, port: int) -> Server:
    """Answer at http://host:port/metrics from now on; port 0 is any that is free. OSError where that cannot be."""
    http = _Http(exposition, host, port)
    _watch_forks()
    _OPEN.add(http)
    return Server(http)


_OPEN: "weakref.WeakSet[_Http]" = weakref.WeakSet()


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    """Processes that read data are forked: one that lives a moment longer than the run would keep its port."""
    for http in list(_OPEN):
        http.socket.close()
    _OPEN.clear()


class Endpoint:
    """The same for a run: what stands against it is told as a warning, and is no reason not to train. A port that is
    taken is tried for a while, by a thread of its own."""

    def __init__(self, exposition: Exposition, host: str, port: int, observer: Observer) -> None:
        self._serve = functools.partial(serve, exposition, host, port)
        self._host, self._port = host, port
        self._observer = observer
        self.server: Server | None = None
        """Once it answers."""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if (error := self._attempt()) is None:
            return
        if getattr(error, "errno", None) == errno.EADDRINUSE and port != 0:
            self._thread = threading.Thread(target=self._try_again, args=(error,), name="metrics port", daemon=True)
            self._thread.start()
        else:
            self._warn(error)

    def _attempt(self) -> Exception | None:
        try:
            self.server = self._serve()
        except (OSError, OverflowError) as error:
            return error
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._observer.event("metrics", {"url": f"http://{host}:{self.server.port}/metrics"})
        return None

    def _try_again(self, error: Exception) -> None:
        deadline = time.monotonic() + _PORT_WAIT_S
        found: Exception | None = error
        while time.monotonic() < deadline and not self._closed.wait(_TRY_EVERY_S):
            if (found := self._attempt()) is None:
                return
        assert found is not None
        self._warn(found)

    def _warn(self, error: Exception) -> None:
        where, reason = f"{self._host}:{self._port}", getattr(error, "strerror", None) or error
        words = f"observe.metrics_port: no metrics at {where} ({reason}); choose another port, or 0 for a free one"
        self._observer.event("warning", {"message": words})

    def close(self) -> None:
        """Stop listening, or trying to; what was not told yet is told now, while there is somebody to tell."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        if self.server is not None:
            self.server.close()
            self.server = None


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, exposition: Exposition, host: str, port: int) -> None:
        self.exposition = exposition
        self.clients = threading.BoundedSemaphore(_MOST_CLIENTS)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Without asking what the host is called, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread, if there are not too many."""
        if self.clients.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.clients.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or hangs is no news."""


class _Handler(BaseHTTPRequestHandler):
    timeout = _ANSWER_WITHIN_S
    server_version = "shoal"
    sys_version = ""
    server: _Http

    def do_GET(self) -> None:
        """The metrics; and for people, where they are."""
        path = self.path.partition("?")[0]
        if path not in ("/", "/metrics"):
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics")
            return
        content = _PAGE if path == "/" else self.server.exposition.text().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/html; charset=utf-8" if path == "/" else CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 - http.server's own name
        """Nothing."""
