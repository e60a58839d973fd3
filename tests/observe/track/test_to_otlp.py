import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.track.build import make_followers
from shoal.observe.track.facts import read_facts
from shoal.observe.track.progress import Progress
from shoal.observe.track.section import OtlpSection, TrackSection
from shoal.observe.track.to_otlp import OtlpSink, otlp_endpoint
from tests.made_run import make_run

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


class Collector:
    """A server that takes traces as OTLP over HTTP says, and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.status == 200 and self.path == "/v1/traces":
                    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                        facts = {item.key: item.value.string_value for item in resource.resource.attributes}
                        collector.resources.append(facts)
                        collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                    collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.send_response(collector.status if self.path == "/v1/traces" else 404)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("ENDPOINT", "TRACES_ENDPOINT", "HEADERS", "TRACES_HEADERS"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    found = Collector()
    yield found
    found.close()


def test_a_collector_gets_the_spans_of_a_run(tmp_path: Path, collector: Collector) -> None:
    folder = make_run(tmp_path / "run")
    section = TrackSection(otlp=OtlpSection(endpoint=collector.url, headers={"x-team": "vision"}))
    [follower] = make_followers(folder, section, print, str)
    assert follower.sync(is_at_work=False), follower.progress.problem
    follower.close()
    by_name: dict[str, list[Any]] = {}
    for span in collector.spans:
        by_name.setdefault(span.name, []).append(span)
    assert {name: len(spans) for name, spans in by_name.items()} == {
        "shoal.run": 1,
        "shoal.start": 2,
        "shoal.startup": 2,
        "shoal.training": 2,
        "shoal.save": 4,
        "shoal.restart": 1,
    }
    [run] = by_name["shoal.run"]
    assert len({span.trace_id for span in collector.spans}) == 1 and not run.parent_span_id
    assert {span.parent_span_id for span in by_name["shoal.start"]} == {run.span_id}
    assert run.start_time_unix_nano < run.end_time_unix_nano
    failed = by_name["shoal.start"][0].status
    assert (failed.code, failed.message) == (2, "the worker's process was killed by SIGKILL")
    assert collector.resources[0]["service.name"] == "shoal" and collector.resources[0]["shoal.run"] == "run"
    assert collector.headers[0]["x-team"] == "vision"


def test_what_was_sent_is_not_sent_again_and_has_the_same_ids(tmp_path: Path) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    folder, exporter = make_run(tmp_path / "run", ended=None), InMemorySpanExporter()

    def send(progress: Progress, is_at_work: bool) -> list[int]:
        exporter.clear()
        sink = OtlpSink(OtlpSection(), folder, progress, exporter)
        sink.tell(read_facts(folder, is_at_work))
        return [span.get_span_context().span_id for span in exporter.get_finished_spans()]

    progress = Progress(folder / "track" / "otlp.json", "x")
    first = send(progress, is_at_work=True)
    assert len(first) == 9 and send(progress, is_at_work=True) == []
    kept = Progress(progress.path, "x", ids=json.loads(json.dumps(progress.ids)))
    rest = send(kept, is_at_work=False)
    assert {span.name for span in exporter.get_finished_spans()} == {"shoal.run", "shoal.start", "shoal.training"}
    assert not set(first) & set(rest)
    assert set(send(Progress(progress.path, "x"), is_at_work=False)) == {*first, *rest}


def test_a_collector_that_refuses_is_tried_again(tmp_path: Path, collector: Collector) -> None:
    folder = make_run(tmp_path / "run")
    [follower] = make_followers(folder, TrackSection(otlp=OtlpSection(endpoint=collector.url)), print, str)
    collector.status = 400
    assert not follower.sync(is_at_work=False)
    assert follower.progress.problem == f"{collector.url}/v1/traces: 400 Bad Request"
    collector.status = 200
    assert follower.sync(is_at_work=False) and len(collector.spans) == 12


def test_a_collector_that_is_not_there_is_named_with_the_reason_and_once(tmp_path: Path, collector: Collector) -> None:
    collector.server.server_close()
    said: list[str] = []
    section = TrackSection(otlp=OtlpSection(endpoint=collector.url))
    [follower] = make_followers(make_run(tmp_path / "run"), section, said.append, str)
    assert not follower.sync(is_at_work=False) and not follower.sync(is_at_work=False)
    assert said == [f"otlp: not sent, will try again: {collector.url}/v1/traces: Connection refused"]


def test_where_traces_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENDPOINT", "TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{name}", raising=False)
    assert otlp_endpoint(OtlpSection()) == "http://127.0.0.1:4318/v1/traces"
    assert otlp_endpoint(OtlpSection(endpoint="https://host/own/path")) == "https://host/own/path"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://host:1/base/")
    assert otlp_endpoint(OtlpSection()) == "http://host:1/base/v1/traces"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://host:2/t")
    assert otlp_endpoint(OtlpSection()) == "http://host:2/t"
    assert otlp_endpoint(OtlpSection(endpoint="http://host:3/")) == "http://host:3/v1/traces"
