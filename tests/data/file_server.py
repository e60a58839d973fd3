"""A real HTTP server on loopback that serves bytes, well or badly, and counts what it is asked for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """Content by path; `half` paths send half of it, then wait for `resume` (up to a minute) and hang up."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.half: set[str] = set()
        self.hits: list[str] = []
        self.delay_s = 0.0
        self.resume = threading.Event()
        self.base = ""

    def url(self, path: str) -> str:
        return f"{self.base}/{path}"


@contextmanager
def serve() -> Iterator[FileServer]:
    state = FileServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.lstrip("/")
            state.hits.append(path)
            if state.delay_s:
                state.resume.wait(state.delay_s)
            if path not in state.files:
                self.send_error(404)
                return
            content = state.files[path]
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            try:
                if path in state.half:
                    self.wfile.write(content[: len(content) // 2])
                    self.wfile.flush()
                    state.resume.wait(60)
                else:
                    self.wfile.write(content)
            except (BrokenPipeError, ConnectionResetError):
                pass

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # so that closing waits for them
    state.base = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield state
    finally:
        state.resume.set()
        server.shutdown()
        server.server_close()
        thread.join()
