"""A run's metrics through Ray's own metrics agent, which every machine of a cluster has: `ray_shoal_...` there."""

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ray.util.metrics import Gauge

from shoal.launch.environment import QUIET_RAY
from shoal.observe.prometheus.exposition import Exposition
from shoal.observe.prometheus.names import METRICS
from shoal.observe.records import Report

_EVERY_S = 5.0
"""Ray sends what it is told every ten seconds, and forgets a value that it was not told again since."""
_LOG = logging.getLogger(__name__)


def ray_collects_metrics() -> bool:
    """Whether this Ray has somebody to tell: one that was started for a run alone has not."""
    name = "RAY_enable_metrics_collection"
    return os.environ.get(name) != QUIET_RAY[name]


class RayMetrics:
    """Sees what rank 0 tells its agent, and tells Ray again and again; lives in the actor of that agent.

    Everything is a gauge to Ray, counters too: its own counters cannot be 0, nor go on from where another actor was.
    """

    def __init__(self) -> None:
        self.exposition = Exposition()
        self._gauges = {
            metric.name: Gauge(metric.name, metric.help, tag_keys=("run", *metric.labels)) for metric in METRICS
        }
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, run_dir: str) -> None:
        """Another start of the run's workers is about to be."""
        try:
            self.exposition.begin(Path(run_dir))
        except Exception as error:  # noqa: BLE001 - whatever it is, the run goes on
            _LOG.warning("metrics of earlier starts are left out: %s", error)
        if self._thread is None:
            self._thread = threading.Thread(target=self._tell_ray, name="metrics", daemon=True)
            self._thread.start()

    def see(self, messages: Iterable[Mapping[str, Any]]) -> None:
        """What rank 0 has told its agent; what is not for observers is passed over."""
        for message in messages:
            try:
                self._see(message)
            except Exception as error:  # noqa: BLE001 - whatever it is, the launcher must get its answer
                _LOG.warning("a message is left out of the metrics: %s", error)

    def _see(self, message: Mapping[str, Any]) -> None:
        what = message["what"]
        if what == "report":
            self.exposition.report(Report.from_message({"workers": None, **message["report"]}))
        elif what == "event":
            self.exposition.event(message["name"], message["fields"])
        elif what == "tick":
            self.exposition.tick(message["step"])

    def close(self) -> None:
        """Tell nothing any more."""
        self._closed.set()

    def _tell_ray(self) -> None:
        while not self._closed.wait(_EVERY_S):
            try:
                for sample in self.exposition.samples():
                    self._gauges[sample.name].set(sample.value, dict(sample.labels))
            except Exception as error:  # noqa: BLE001 - the next time may be better
                _LOG.warning("metrics could not be told to Ray: %s", error)
