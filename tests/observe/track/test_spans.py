from pathlib import Path
from typing import Any

from shoal.observe.runs import read_events, read_metrics
from shoal.observe.track.spans import Span, make_spans, trace_id
from tests.made_run import BEGAN, RESTART_S, make_run


def spans_of(folder: Path, ended: bool = True) -> list[Span]:
    events = read_events(folder)
    return make_spans("key", events, read_metrics(folder), events[-1]["time"] if ended else None)


def named(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == f"shoal.{name}"]


def test_a_run_that_was_started_twice(tmp_path: Path) -> None:
    spans = spans_of(make_run(tmp_path / "run"))
    [run], starts, [restart] = named(spans, "run"), named(spans, "start"), named(spans, "restart")
    assert run.parent is None and run.start == BEGAN and run.attributes["restarts"] == 1
    assert [span.parent for span in (*starts, restart)] == [run.id] * 3
    assert [span.attributes["step"] for span in starts] == [0, 200]
    assert starts[0].failed == "the worker's process was killed by SIGKILL" and starts[1].failed is None
    assert abs(restart.end - restart.start - RESTART_S) < 0.01 and restart.attributes["because"] == "failure"
    assert (restart.attributes["from_step"], restart.attributes["lost_steps_to"]) == (200, 250)
    assert [span.parent for span in named(spans, "startup")] == [start.id for start in starts]
    assert [span.attributes["step"] for span in named(spans, "save")] == [100, 200, 300, 400]
    training = named(spans, "training")
    assert training[1].attributes["last_step"] == 400 and training[1].attributes["seconds.backward"] == 10.0
    assert len({span.id for span in spans}) == len(spans)
    assert all(span.end >= span.start for span in spans)
    for span in spans:  # each lies within the one that it is part of
        if outer := next((other for other in spans if other.id == span.parent), None):
            assert outer.start - 1e-6 <= span.start and span.end <= outer.end + 1e-6, span


def test_only_what_is_over_is_told_and_by_the_same_ids(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=None)
    running = spans_of(folder, ended=False)
    assert not named(running, "run") and len(named(running, "start")) == 1
    later = {span.id: span for span in spans_of(folder)}
    assert all(later[span.id] == span for span in running if span.name != "shoal.evaluate")
    assert trace_id("a") != trace_id("b") and len(trace_id("a")) == 32


def test_an_evaluation_takes_the_seconds_before_its_report() -> None:
    events: list[dict[str, Any]] = [{"time": 10.0, "event": "start"}, {"time": 11.0, "event": "first_step"}]
    report = {"time": 20.0, "step": 5, "metrics": {"val_loss": 0.5}, "seconds": {"evaluate": 2.0}}
    [found] = named(make_spans("key", events, [report], None), "evaluate")
    assert (found.start, found.end, found.attributes) == (18.0, 20.0, {"step": 5, "val_loss": 0.5})


def test_events_of_early_runs_and_nonsense_are_borne() -> None:
    assert make_spans("key", [], [], 5.0) == []
    events: list[dict[str, Any]] = [
        {"time": 1.0, "event": "start", "startup_s": 3, "asked": "x"},
        {"time": 2.0, "event": "save", "seconds": "x", "step": None},
        {"time": 3.0, "event": "failed"},
    ]
    spans = make_spans("key", events, [{"time": "x", "seconds": {"evaluate": "y"}, "metrics": 3}], 3.0)
    assert [span.failed for span in spans if span.name == "shoal.run"] == ["failed"]
