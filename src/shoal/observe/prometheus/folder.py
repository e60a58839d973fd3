"""The metrics of a run from its folder, whether it runs or has ended long ago."""

from pathlib import Path
from typing import Any

from shoal.core.storage import read_json_lines
from shoal.observe.ledger import make_ledger
from shoal.observe.prometheus.names import Sample
from shoal.observe.prometheus.samples import samples_of
from shoal.observe.prometheus.state import Past, RunState, is_number
from shoal.observe.records import Report, Workers
from shoal.observe.runs import read_events, read_metrics, read_run


def folder_samples(run_dir: Path) -> list[Sample]:
    """Every value that the folder tells."""
    state, past = read_past(run_dir)
    state.past, state.is_all_past = past, True
    state.is_active = read_run(run_dir).status == "running"
    return samples_of(state)


def read_past(run_dir: Path) -> tuple[RunState, Past]:
    """All that has happened so far, and the worker-seconds that it took."""
    events, reports = read_events(run_dir), read_metrics(run_dir)
    lines = [*map(_from_event, events), *map(_from_report, reports), *map(_from_workers, _read_workers(run_dir))]
    state = RunState(run_dir.resolve().name)
    times = [when for when, _, _ in lines if when is not None]
    # Without a time, as old runs wrote them: after all events, so that the last values count.
    for when, what, content in sorted(lines, key=lambda line: max(times, default=0.0) if line[0] is None else line[0]):
        _replay(state, what, content, when or max(times, default=0.0))
    ledger = make_ledger(events, reports)
    past = Past(ledger.seconds["useful"], ledger.worker_s, state.asked, max(times, default=None))
    return state, past


_Line = tuple[float | None, str, Any]


def _from_event(record: dict[str, Any]) -> _Line:
    return record["time"], "event", record


def _from_report(record: dict[str, Any]) -> _Line:
    return _time(record), "report", record


def _from_workers(record: dict[str, Any]) -> _Line:
    return _time(record), "workers", record


def _time(record: dict[str, Any]) -> float | None:
    when = record.get("time")
    return float(when) if is_number(when) else None


def _replay(state: RunState, what: str, record: dict[str, Any], when: float) -> None:
    if what == "event":
        state.event(record["event"], record, when)
        if record["event"] == "forgotten":
            _add_forgotten(state, record)
    elif what == "workers":
        state.take_workers(
            Workers(
                over_s=record["over_s"] if is_number(record.get("over_s")) else 0.0,
                seconds=_lists(record.get("seconds")),
                system=_lists(record.get("system")),
                bottleneck=str(record.get("bottleneck") or "unknown"),
                verdict="",
            )
        )
    else:
        seconds, samples, epoch = record.get("seconds"), record.get("samples"), record.get("epoch")
        state.report(
            Report(
                step=record["step"],
                epoch=float(epoch) if is_number(epoch) else 0.0,
                metrics=record["metrics"],
                seconds=seconds if isinstance(seconds, dict) else {},
                samples=samples if isinstance(samples, int) else 0,
                time=when,
            )
        )


def _add_forgotten(state: RunState, record: dict[str, Any]) -> None:
    """Steps whose reports are no longer there were made all the same, and counted while they were."""
    first, last = record.get("after_step"), record.get("to_step")
    if isinstance(first, int) and isinstance(last, int) and last > state.step:
        state.ticked = (last, state.told or state.started or 0.0)
        state.samples_total += state.global_batch * (last - max(first, state.reported_step or state.start_step))


def _read_workers(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_json_lines(run_dir / "workers.jsonl") if isinstance(record.get("seconds"), dict)]


def _lists(value: Any) -> dict[str, list[Any]]:
    """name -> value of each worker, as far as it is that."""
    if not isinstance(value, dict):
        return {}
    return {str(name): values for name, values in value.items() if isinstance(values, list)}
