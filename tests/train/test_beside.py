"""That nothing which watches a run can stop it or hold it up: real runs with real trouble beside them."""

import contextlib
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.records import Report
from shoal.observe.runs import read_events
from tests.small_recipes import small

Train = Callable[..., dict[str, Any]]


def warnings(run_dir: Path) -> list[str]:
    return [event["message"] for event in read_events(run_dir) if event["event"] == "warning"]


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with taken_port() as port:
        return port


class Scraper(SilentConsole):
    """Reads the endpoint in the middle of a run, as Prometheus would, and leaves others hanging there."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.read = ""
        self.hanging: list[socket.socket] = []

    def report(self, report: Report) -> None:
        if report.step != 12:
            return
        for _ in range(20):  # who never ask, or never take the answer
            self.hanging.append(socket.create_connection(("127.0.0.1", self.port), timeout=5))
        thread = threading.Thread(target=self._read)
        thread.start()
        thread.join(30)

    def _read(self) -> None:
        deadline = time.monotonic() + 20
        while not self.read and time.monotonic() < deadline:
            url = f"http://127.0.0.1:{self.port}/metrics"
            with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=10) as answer:
                self.read = answer.read().decode()  # or turned away, as long as the others hang
            time.sleep(0.1)


def test_prometheus_reads_a_run_while_others_hang_at_the_endpoint(here: Path) -> None:
    scraper = Scraper(free_port())
    fields = small("digits", here / "d", 24) | {"observe.metrics_port": scraper.port, "observe.workers_every_s": 1e-3}
    summary = launch(prepare(["digits"], fields, run_dir=here / "run"), Launch(scraper))
    for connection in scraper.hanging:
        connection.close()
    assert summary["status"] == "done" and summary["step"] == 24
    assert 'shoal_steps_total{run="run"} 12.0' in scraper.read
    assert 'shoal_phase_seconds_total{phase="forward",rank="0",run="run"}' in scraper.read
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{scraper.port}/metrics", timeout=2)


def test_a_port_that_is_taken_is_told_and_the_run_goes_on(train_here: Train, here: Path) -> None:
    with taken_port() as port:
        fields = small("digits", here / "d", 8) | {"observe.metrics_port": port}
        assert train_here("digits", overrides=fields, run_dir="run")["status"] == "done"
    (message,) = [message for message in warnings(here / "run") if "metrics_port" in message]
    assert f"127.0.0.1:{port} (Address already in use); choose another port" in message


def test_a_page_that_cannot_be_written_is_told_and_the_run_is_done(train_here: Train, here: Path) -> None:
    class InTheWay(SilentConsole):
        def event(self, name: str, fields: dict[str, Any]) -> None:
            if name == "start":
                (here / "run" / "report.html").mkdir()

    prepared = prepare(["digits"], small("digits", here / "d", 8), run_dir=here / "run")
    assert launch(prepared, Launch(InTheWay()))["status"] == "done"
    (message,) = [message for message in warnings(here / "run") if "report" in message]
    assert message.startswith("report.html could not be written") and "shoal report" in message


def test_every_run_leaves_a_page_also_one_that_fails(train_here: Train, here: Path) -> None:
    (here / "bad.py").write_text(
        "import torch\n"
        "class Task:\n"
        "    def model(self): return torch.nn.Linear(2, 1)\n"
        "    def datasets(self): return {'train': torch.utils.data.TensorDataset(torch.rand(64, 2))}\n"
        "    def loss(self, model, batch):\n"
        "        Task.calls = getattr(Task, 'calls', 0) + 1\n"
        "        if Task.calls == 9: raise ZeroDivisionError('of my own')\n"
        "        return model(batch[0]).mean()\n"
    )
    with pytest.raises(ZeroDivisionError):
        train_here({"task": "bad:Task", "train": {"steps": 20, "global_batch": 4}}, run_dir="run")
    page = (here / "run" / "report.html").read_text()
    assert "of my own" in page and "failed" in page
