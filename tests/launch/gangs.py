"""Runs of several workers on this machine that a test breaks while it watches them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal.launch.crew import LocalCrew
from shoal.launch.gang import Gang
from shoal.launch.policy import Size
from shoal.launch.run import Launch, Prepared
from shoal.observe.records import Report
from shoal.observe.runs import read_events

Breaker = Callable[["Watch"], None]


class Watch:
    """A console that keeps what it is shown and does, once, what a test asks for when something is seen."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.reports: list[Report] = []
        self.stop_reason: str | None = None
        self._waiting: list[tuple[Callable[[str, dict[str, Any]], bool], Breaker]] = []
        self._always: list[Callable[[str, dict[str, Any]], None]] = []

    def when(self, is_seen: Callable[[str, dict[str, Any]], bool], do: Breaker) -> None:
        self._waiting.append((is_seen, do))

    def always(self, do: Callable[[str, dict[str, Any]], None]) -> None:
        """Not only once."""
        self._always.append(do)

    def when_step(self, step: int, do: Breaker) -> None:
        self.when(lambda name, fields: name == "report" and fields["step"] >= step, do)

    def when_printed(self, text: str, do: Breaker) -> None:
        self.when(lambda name, fields: name == "print" and text in fields["line"], do)

    def report(self, report: Report) -> None:
        self.reports.append(report)
        self._see("report", {"step": report.step})

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))
        self._see(name, fields)

    def tick(self, step: int) -> None:
        self._see("tick", {"step": step})

    def stop(self) -> str | None:
        return self.stop_reason

    def pids(self) -> list[int]:
        """Of the workers as they were last started, as outside tools would find them."""
        workers = [event["workers"] for event in read_events(self.run_dir) if event["event"] == "workers"][-1]
        return [worker["pid"] for worker in workers]

    def names(self) -> list[str]:
        """The events of the run's folder, by name."""
        return [event["event"] for event in read_events(self.run_dir)]

    def printed(self) -> list[tuple[int, str]]:
        return [(fields["rank"], fields["line"]) for name, fields in self.events if name == "print"]

    def _see(self, name: str, fields: dict[str, Any]) -> None:
        for do in self._always:
            do(name, fields)
        for waiting in list(self._waiting):
            if waiting[0](name, fields):
                self._waiting.remove(waiting)
                waiting[1](self)


@contextmanager
def warm_crew(workers: int) -> Iterator[LocalCrew]:
    """For many runs. Its threads are there from the start, so that no test is blamed for them."""
    crew = LocalCrew(workers)
    together = threading.Barrier(4 * workers)
    for future in [crew._executor.submit(together.wait) for _ in range(4 * workers)]:
        future.result()
    try:
        yield crew
    finally:
        crew.close()


def run_gang(crew: LocalCrew, prepared: Prepared, watch: Watch) -> dict[str, Any]:
    workers = prepared.loaded.recipe.cluster.workers
    return Gang(prepared, Launch(watch, watch.stop), crew, Size(workers, workers), threads=1).run()
