"""What Prometheus is told of a run, kept in memory while it trains and written out when it asks."""

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.observe.prometheus.folder import read_past
from shoal.observe.prometheus.names import METRICS, Sample
from shoal.observe.prometheus.samples import samples_of
from shoal.observe.prometheus.state import RunState
from shoal.observe.records import Report

_MOST_OFTEN = 20
_MOST_READ_BYTES = 50_000_000
"""Of earlier reports, which take some seconds to read."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Exposition:
    """An observer that keeps the newest values. Telling it costs next to nothing, whoever reads it meanwhile."""

    def __init__(self, run: str = "") -> None:
        self._state = RunState(run)
        self._lock = threading.Lock()
        self._rendering = threading.Lock()
        self._rendered = ""
        self._stale_at = 0.0

    def begin(self, run_dir: Path) -> None:
        """Take over what the run's folder tells of earlier starts: failures and restarts happen between two of them.
        For before workers start; nothing is read of a run that is new."""
        metrics = run_dir / "metrics.jsonl"
        if metrics.is_file() and metrics.stat().st_size > _MOST_READ_BYTES:
            return  # it would hold up the start: counters begin anew, as Prometheus knows them to
        if (run_dir / "events.jsonl").is_file():
            before, past = read_past(run_dir)
            with self._lock:
                self._state.remember(before, past)

    def report(self, report: Report) -> None:
        """New metrics."""
        with self._lock:
            self._state.report(report)

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Something happened."""
        with self._lock:
            self._state.event(name, fields, time.time())

    def tick(self, step: int) -> None:
        """A step is done; without the lock, which a reader might hold."""
        self._state.ticked = (step, time.time())

    def samples(self) -> list[Sample]:
        """Every value that is known now."""
        with self._lock:
            state = self._state.copy()
        return samples_of(state)

    def text(self) -> str:
        """The same as Prometheus reads it. With very many workers that takes a while, in which they are held up: so
        whoever asks again soon gets the same, and it is made for a twentieth of the time at most."""
        with self._rendering:
            began = time.monotonic()
            if began >= self._stale_at:
                self._rendered = render(self.samples())
                self._stale_at = began + _MOST_OFTEN * (time.monotonic() - began)
            return self._rendered


def render(samples: Sequence[Sample]) -> str:
    """Samples in Prometheus's text format."""
    from prometheus_client.exposition import generate_latest

    return generate_latest(_Collected(samples)).decode()


class _Collected:
    """Samples as a registry of prometheus_client."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        by_name: dict[str, list[Sample]] = {}
        for sample in self._samples:
            by_name.setdefault(sample.name, []).append(sample)
        for metric in METRICS:
            labels = ("run", *metric.labels)
            family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=labels
            )
            for sample in by_name.get(metric.name, ()):
                family.add_metric([sample.labels[label] for label in labels], sample.value)
            if family.samples:
                yield family
