"""The endpoint answers, stays on loopback, and cannot be made to hold up a run."""

import contextlib
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.cluster import free_ports
from shoal.observe.prometheus import endpoint
from shoal.observe.prometheus.endpoint import Endpoint, Server, serve
from shoal.observe.prometheus.exposition import CONTENT_TYPE, Exposition
from shoal.observe.prometheus.names import Sample
from shoal.observe.records import Report
from shoal.observe.runs import read_events
from tests.observe.prometheus.servers import train_on_gpus


class Told:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def report(self, report: Report) -> None: ...

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))

    def tick(self, step: int) -> None: ...


@pytest.fixture
def exposition() -> Exposition:
    found = Exposition()
    train_on_gpus(found)
    return found


@pytest.fixture
def server(exposition: Exposition) -> Iterator[Server]:
    found = serve(exposition, "127.0.0.1", 0)
    yield found
    found.close()


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def get(port: int, path: str = "/metrics") -> tuple[str, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_it_answers_with_the_newest_values(server: Server, exposition: Exposition) -> None:
    text, kind = get(server.port)
    assert kind == CONTENT_TYPE and 'shoal_run_step{run="gpt2-on-gpus"} 50.0' in text
    exposition.tick(51)
    deadline = time.monotonic() + 20
    while 'shoal_run_step{run="gpt2-on-gpus"} 51.0' not in get(server.port, "/metrics?x=1")[0]:
        assert time.monotonic() < deadline, "it is made anew every so often"


def test_whoever_asks_without_end_takes_little_time_of_the_training(exposition: Exposition) -> None:
    made = 0

    def counted() -> list[Sample]:
        nonlocal made
        made += 1
        time.sleep(0.02)  # as with very many workers
        return []

    exposition.samples = counted  # type: ignore[method-assign]
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        exposition.text()
    assert 1 <= made <= 4


def test_it_has_nothing_else(server: Server) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server.port, "/../etc/passwd")


def test_who_opens_it_in_a_browser_is_shown_the_way(server: Server) -> None:
    for path in ("/", "/?x"):
        text, kind = get(server.port, path)
        assert kind == "text/html; charset=utf-8" and '<a href="/metrics">/metrics</a>' in text


def test_a_port_that_stays_taken_is_a_warning(
    server: Server, exposition: Exposition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "_PORT_WAIT_S", 0.3)
    monkeypatch.setattr(endpoint, "_TRY_EVERY_S", 0.05)
    told = Told()
    began = time.monotonic()
    found = Endpoint(exposition, "127.0.0.1", server.port, told)
    assert time.monotonic() - began < 0.2 and told.events == [], "nobody waits for it"
    wait_for(lambda: told.events)
    found.close()
    ((name, fields),) = told.events
    assert name == "warning" and fields["message"].startswith("observe.metrics_port: ")
    assert str(server.port) in fields["message"] and "choose another" in fields["message"]


def test_a_run_that_ends_before_the_port_is_free_says_so_and_does_not_wait(
    server: Server, exposition: Exposition
) -> None:
    told = Told()
    found = Endpoint(exposition, "127.0.0.1", server.port, told)
    began = time.monotonic()
    found.close()
    assert time.monotonic() - began < 1.0 and [name for name, _ in told.events] == ["warning"]
    found.close()
    assert len(told.events) == 1


def test_a_port_that_the_one_before_still_holds_is_taken_when_it_is_free(exposition: Exposition) -> None:
    before, told = serve(exposition, "127.0.0.1", 0), Told()
    found = Endpoint(exposition, "127.0.0.1", before.port, told)
    try:
        before.close()
        wait_for(lambda: told.events)
        assert told.events == [("metrics", {"url": f"http://127.0.0.1:{before.port}/metrics"})]
        assert "shoal_run_step" in get(before.port)[0]
    finally:
        found.close()
    with pytest.raises(OSError):
        get(before.port)


def test_a_host_that_is_none_is_a_warning(exposition: Exposition) -> None:
    told = Told()
    found = Endpoint(exposition, "no-such-host.invalid", 0, told)
    assert found.server is None and [name for name, _ in told.events] == ["warning"]


def test_where_it_is_is_told(exposition: Exposition) -> None:
    told = Told()
    found = Endpoint(exposition, "127.0.0.1", 0, told)
    assert found.server is not None
    port = found.server.port
    found.close()
    assert told.events == [("metrics", {"url": f"http://127.0.0.1:{port}/metrics"})]


def test_its_port_is_free_when_it_is_closed(exposition: Exposition) -> None:
    first = serve(exposition, "127.0.0.1", 0)
    get(first.port)
    began = time.monotonic()
    first.close()
    assert time.monotonic() - began < 2
    second = serve(exposition, "127.0.0.1", first.port)
    get(second.port)
    second.close()


@pytest.mark.slow
def test_a_forked_process_does_not_keep_the_port(exposition: Exposition) -> None:
    first = serve(exposition, "127.0.0.1", 0)
    pid = os.fork()
    if pid == 0:
        time.sleep(30)
        os._exit(0)
    try:
        time.sleep(0.2)
        first.close()
        serve(exposition, "127.0.0.1", first.port).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_clients_that_hang_hold_up_nobody(server: Server, exposition: Exposition) -> None:
    hanging = []
    try:
        for number in range(30):
            client = socket.create_connection(("127.0.0.1", server.port), timeout=5)
            # Some say nothing, some half of what they want, some ask and never take the answer.
            client.sendall([b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\n\r\n"][number % 3])
            hanging.append(client)
        report = Report(60, 1.0, {"train_loss": 1.0}, {"data": 0.1})
        began = time.perf_counter()
        for step in range(2000):
            exposition.tick(step)
            exposition.report(report)
        took_s = time.perf_counter() - began
        assert took_s / 2000 < 1e-3
    finally:
        for client in hanging:
            client.close()
    deadline = time.monotonic() + 20
    while True:
        try:
            assert "shoal_run_step" in get(server.port)[0]
            return
        except (urllib.error.URLError, ConnectionError, OSError):
            assert time.monotonic() < deadline, "it answers nobody any more"
            time.sleep(0.2)


def test_a_run_serves_its_metrics_while_it_trains_and_no_longer(train_here: Callable[..., dict[str, Any]]) -> None:
    (port,) = free_ports(1)
    seen: list[str] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                seen.append(get(port)[0])
            time.sleep(0.1)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        summary = train_here(
            "digits", overrides={"train.steps": 150, "observe.metrics_port": port, "observe.workers_every_s": 0.2}
        )
    finally:
        ended.set()
        looking.join()
    assert summary["status"] == "done"
    run = Path(summary["run_dir"]).name
    assert any(f'shoal_metric{{metric="train_loss",run="{run}"}}' in text for text in seen)
    assert any("shoal_cpu_cores" in text for text in seen)
    with pytest.raises(OSError):
        get(port)
    urls = [event["url"] for event in read_events(Path(summary["run_dir"])) if event["event"] == "metrics"]
    assert urls == [f"http://127.0.0.1:{port}/metrics"]


def test_a_run_whose_port_is_taken_trains_all_the_same(
    train_here: Callable[..., dict[str, Any]], server: Server
) -> None:
    summary = train_here("digits", overrides={"train.steps": 20, "observe.metrics_port": server.port})
    assert summary["status"] == "done"
    warnings = [event["message"] for event in read_events(Path(summary["run_dir"])) if event["event"] == "warning"]
    assert any(str(server.port) in message for message in warnings)
