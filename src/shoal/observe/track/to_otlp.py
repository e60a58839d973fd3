"""A run's phases as a trace, by OTLP over HTTP."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shoal.core.secrets import scrub
from shoal.core.version import VERSION
from shoal.observe.runs import read_metrics
from shoal.observe.track.facts import Facts
from shoal.observe.track.points import Point
from shoal.observe.track.progress import Progress
from shoal.observe.track.reasons import short_reason
from shoal.observe.track.section import OtlpSection
from shoal.observe.track.spans import Span, make_spans, trace_id

_TIMEOUT_S = 5.0
_AT_ONCE = 500
_DEFAULT = "http://127.0.0.1:4318"


def otlp_endpoint(section: OtlpSection) -> str:
    """The address that traces are posted to."""
    if whole := os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "") if section.endpoint is None else "":
        return whole
    base = section.endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT
    if section.endpoint is not None and urlsplit(base).path not in ("", "/"):
        return base
    return f"{base.rstrip('/')}/v1/traces"


class OtlpSink:
    """Sends each span once it is over; by ids that depend on the run alone, so that one sent twice is the same."""

    keeps_at_once = True

    def __init__(self, section: OtlpSection, run_dir: Path, progress: Progress, exporter: Any = None) -> None:
        self._run_dir = run_dir
        self._progress = progress
        self._why = lambda: ""
        """What stood against the last attempt, in words."""
        if exporter is None:
            exporter, self._why = _exporter(section)
        self._exporter = exporter

    def tell(self, facts: Facts) -> None:
        """New spans: whenever something has happened."""
        sent: dict[str, float] = self._progress.ids.setdefault("spans", {})

        def unsent(reports: list[dict[str, Any]]) -> list[Span]:
            made = make_spans(facts.key, facts.events, reports, facts.ended)
            return [span for span in made if sent.get(span.id) != span.end]

        new = unsent([])
        if any(span.name == "shoal.training" for span in new):  # only then, because a long run has very many reports
            new = unsent(read_metrics(self._run_dir))
        for first in range(0, len(new), _AT_ONCE):
            some = new[first : first + _AT_ONCE]
            _export(self._exporter, [_readable(span, facts) for span in some], self._why)
            sent |= {span.id: span.end for span in some}

    def log(self, points: list[Point]) -> None:
        """Metrics are no part of a trace."""

    def end(self, facts: Facts) -> None:
        """`tell` has sent the last spans."""

    def close(self) -> None:
        """Let go of the connection."""
        self._exporter.shutdown()


def _exporter(section: OtlpSection) -> tuple[Any, Callable[[], str]]:
    """What sends spans; and why it could not, which it tells nobody but its log."""
    import requests
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    problem = ""

    class Remembering(requests.Session):
        def send(self, request: requests.PreparedRequest, **settings: Any) -> requests.Response:
            nonlocal problem
            try:
                answer = super().send(request, **settings)
            except requests.RequestException as error:
                problem = short_reason(error)
                raise
            problem = "" if answer.ok else f"{answer.status_code} {answer.reason}"
            return answer

    exporter = OTLPSpanExporter(
        endpoint=otlp_endpoint(section),
        headers=dict(section.headers) or None,
        timeout=int(_TIMEOUT_S),
        session=Remembering(),
    )
    return exporter, lambda: problem


def _export(exporter: Any, spans: list[Any], why: Callable[[], str]) -> None:
    from opentelemetry.sdk.trace.export import SpanExportResult

    if exporter.export(spans) is not SpanExportResult.SUCCESS:
        raise ConnectionError(why() or "the collector did not take the spans")


def _readable(span: Span, facts: Facts) -> Any:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    def context(span_id: str) -> Any:
        return SpanContext(
            int(trace_id(facts.key), 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )

    clean = {name: scrub(value) if isinstance(value, str) else value for name, value in span.attributes.items()}
    status = Status(StatusCode.OK) if span.failed is None else Status(StatusCode.ERROR, scrub(span.failed))
    return ReadableSpan(
        name=span.name,
        context=context(span.id),
        parent=context(span.parent) if span.parent is not None else None,
        resource=Resource({"service.name": "shoal", "service.version": VERSION, "shoal.run": facts.name}),
        attributes=clean,
        status=status,
        start_time=round(span.start * 1e9),
        end_time=round(span.end * 1e9),
        instrumentation_scope=InstrumentationScope("shoal", VERSION),
    )
