"""What watches a run besides its folder and its terminal. Nothing of it can stop the run, or hold it up."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.observe.records import Observer
from shoal.recipe.schema import Recipe
from shoal.train.track import Tracking, start_tracking

if TYPE_CHECKING:
    from shoal.observe.prometheus.endpoint import Endpoint


_LOOK_EVERY_S = 0.1
_PAGE_S = 300.0
"""How long a page may take: seconds, even for a run of a million reports, unless the disk hangs."""


class Beside:
    """On rank 0 an endpoint for Prometheus, a process that tells trackers, at the end a page; elsewhere nothing."""

    def __init__(self, recipe: Recipe, run_dir: Path, is_first: bool) -> None:
        self.is_first = is_first
        self.recipe = recipe
        self.run_dir = run_dir
        self.observers: tuple[Observer, ...] = ()
        """What must see the run from the start."""
        self._tracking: Tracking | None = None
        self._endpoint: Endpoint | None = None
        if is_first and recipe.observe.metrics_port is not None:
            from shoal.observe.prometheus.exposition import Exposition

            self._exposition = Exposition(run_dir.name)
            self.observers = (self._exposition,)

    def open(self, observer: Observer) -> None:
        """Before the first word of a start."""
        host, port = self.recipe.observe.metrics_host, self.recipe.observe.metrics_port
        if self.is_first and port is not None:
            from shoal.observe.prometheus.endpoint import Endpoint

            try:
                self._exposition.begin(self.run_dir)
            except Exception as error:  # noqa: BLE001 - counters begin anew, and the run goes on
                observer.event("warning", {"message": f"metrics of earlier starts could not be read: {error}"})
            self._endpoint = Endpoint(self._exposition, host, port, observer)

    def follow(self, observer: Observer) -> None:
        """Once the run's folder tells what it is."""

        def warn(message: str) -> None:
            observer.event("warning", {"message": message})

        if self.is_first:
            self._tracking = start_tracking(self.run_dir, self.recipe.track, warn)

    def conclude(self, observer: Observer, stop: Callable[[], str | None]) -> None:
        """The run is over, and its folder says so. `stop` is asked again and again: this may take a while, a launcher
        must not take it for a hang, and whoever asks to stop now does not want to wait."""
        if not self.is_first:
            return
        words: list[str] = []
        before = stop()
        concluding = threading.Thread(target=self._conclude, args=(words,), name="conclude", daemon=True)
        concluding.start()
        deadline = time.monotonic() + _PAGE_S + self.recipe.track.wait_s
        while concluding.is_alive():
            concluding.join(_LOOK_EVERY_S)
            if stop() != before or time.monotonic() > deadline:
                words.append(f"not waited for; shoal report {self.run_dir} and shoal track {self.run_dir} do the rest")
                break
        for message in words:
            observer.event("warning", {"message": message})

    def _conclude(self, words: list[str]) -> None:
        from shoal.observe.report import write_report

        try:
            write_report(self.run_dir)
        except Exception as error:  # noqa: BLE001 - a page less, and the run is what it is
            words.append(f"report.html could not be written: {error}; shoal report {self.run_dir} tries again")
        if self._tracking is not None:
            words += self._tracking.finish()
            self._tracking = None

    def close(self) -> None:
        """However the run ends; a process that tells trackers, and was not told that it is over, sees for itself."""
        if self._tracking is not None:
            self._tracking.leave()
            self._tracking = None
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None
