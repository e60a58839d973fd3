"""Writing down how a run ended: the last line of its workers, the summary, the last event."""

import time
from typing import Any

from shoal.core.process import Process
from shoal.observe.run_folder import RunFolder, event_record
from shoal.train.summary import Origin, summarise
from shoal.train.training import Training


def end_run(
    run: Training,
    folder: RunFolder,
    process: Process,
    origin: Origin,
    status: str,
    ended_by: str,
    sha256: str | None = None,
) -> dict[str, Any]:
    """Write down how the run ended; the others return only that."""
    if not process.is_first:
        return {"status": status, "ended_by": ended_by}
    tell_of_workers(run, folder)
    end = end_event(run, status)
    summary = summarise(run, origin, end, sha256) | {"ended_by": ended_by}
    folder.write_summary(summary)
    run.observer.event(status, end)
    return summary


def tell_of_workers(run: Training, folder: RunFolder) -> None:
    """What each worker did, in a run that was too short for a line of workers.jsonl: one comes every few seconds."""
    if (line := run.vitals.last_line()) is not None:
        folder.add_workers(run.state.step, line, time.time())


def end_event(run: Training, status: str) -> dict[str, Any]:
    """The last event, with what the seconds since the last report went to. The summary counts until its time, so that
    what others make of the events is the same."""
    run.clock.finish()
    return event_record(status, {"step": run.state.step, "seconds": run.clock.since_report()})
