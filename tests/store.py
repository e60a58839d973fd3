"""A real S3 server on loopback, and a proxy in front of it that fails as stores do."""

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = str
"""ok, error (500), late error (500 after it was done), reset, half (an answer cut off), silence, slow."""


class Proxy:
    """Passes requests on to an S3 server, or does what `draw` says for each."""

    def __init__(self, port: int, silence_s: float = 3.0) -> None:
        self.draw: Callable[[], Fault] = lambda: "ok"
        self.silence_s = silence_s
        self.done: Counter[str] = Counter()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                fault = proxy.draw()
                proxy.done[fault] += 1
                length = int(self.headers.get("Content-Length") or 0)
                if self.headers.get("Expect") == "100-continue":
                    self.send_response_only(100)
                    self.end_headers()
                body = self.rfile.read(length)
                if fault == "silence":
                    time.sleep(proxy.silence_s)
                if fault in ("reset", "silence"):
                    return self.reset()
                if fault == "slow":
                    time.sleep(0.2)
                if fault == "error":
                    return self.reply(500, [], b"<Error><Code>InternalError</Code></Error>")
                status, headers, content = self.ask(body)
                if fault == "late error":
                    return self.reply(503, [], b"<Error><Code>SlowDown</Code></Error>")
                if fault == "half" and len(content) > 1:
                    self.reply(status, headers, content, len(content) // 2)
                    return self.reset()
                return self.reply(status, headers, content)

            def ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                with contextlib.closing(connection):
                    kept = {k: v for k, v in self.headers.items() if k.lower() not in ("connection", "expect")}
                    connection.request(self.command, self.path, body, kept)
                    answer = connection.getresponse()
                    return answer.status, answer.getheaders(), answer.read()

            def reply(
                self, status: int, headers: list[tuple[str, str]], content: bytes, cut: int | None = None
            ) -> None:
                self.send_response_only(status)
                names = {name.lower() for name, _ in headers}
                for name, value in headers:
                    if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                        self.send_header(name, value)
                length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", length or str(len(content)))
                if "date" not in names:
                    self.send_header("Date", self.date_time_string())
                self.end_headers()
                self.wfile.write(content[:cut])

            def reset(self) -> None:
                """End the connection without a word."""
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815 - as the base class wants it

            def log_message(self, *arguments: Any) -> None:
                """Nothing."""

            def handle(self) -> None:
                with contextlib.suppress(OSError, ValueError):  # the caller may be gone, or its connection closed
                    super().handle()

            def finish(self) -> None:
                with contextlib.suppress(OSError, ValueError):
                    super().finish()

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *arguments: Any) -> None:
                """Nothing."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Its port."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        yield port
    finally:
        server.stop()
