"""The metrics of a run as values: a pure function of what is known of it."""

import functools
import statistics
import time
from collections.abc import Iterator, Mapping

from shoal.core.secrets import scrub
from shoal.observe.phases import COMPUTING
from shoal.observe.prometheus.names import RATES, SYSTEM, Sample
from shoal.observe.prometheus.state import RunState, added
from shoal.observe.records import Workers
from shoal.observe.verdict import BOTTLENECKS

_Values = Iterator[tuple[str, Mapping[str, str], float | None]]
"""Name, labels beside `run`, and value; None where that is not known."""


_shown = functools.lru_cache(4096)(scrub)
"""Labels are the same again and again."""


def samples_of(state: RunState, now: float | None = None) -> list[Sample]:
    """Every value that is known, without what must not be seen; nothing before the run has started."""
    if state.started is None:
        return []
    now = time.time() if now is None else now
    run = {"run": scrub(state.run)}
    found = [*_run(state, now), *_reported(state), *_steps(state), *_by_rank(state)]
    return [
        Sample(name, run | {key: _shown(text) for key, text in labels.items()}, float(value))
        for name, labels, value in found
        if isinstance(value, int | float)
    ]


def _run(state: RunState, now: float) -> _Values:
    yield "shoal_run_info", state.info, 1.0
    # Nothing before the first step: until then the run only gets ready.
    progress = None if state.ticked is None else max(state.ticked[1], state.told or 0.0)
    plain = {
        "shoal_run_active": float(state.is_active),
        "shoal_run_start_timestamp_seconds": state.started,
        "shoal_run_progress_timestamp_seconds": progress,
        "shoal_run_workers": state.world_size,
        "shoal_run_step": state.step,
        "shoal_run_planned_steps": state.planned_steps,
        "shoal_run_epochs": state.epochs,
        "shoal_steps_total": state.steps_total,
        "shoal_samples_total": state.samples_total,
        "shoal_tokens_total": state.tokens_total,
        "shoal_goodput_ratio": state.goodput_at(now),
        "shoal_restarts_total": state.restarts,
        "shoal_checkpoints_total": state.saved,
        "shoal_checkpoint_failures_total": state.save_failures,
        "shoal_checkpoint_stall_seconds_total": state.stall_s,
        **state.newest,
    }
    for name, value in plain.items():
        yield name, {}, value
    for kind, count in state.failures.items():
        yield "shoal_failures_total", {"kind": kind}, count


def _reported(state: RunState) -> _Values:
    for metric, value in state.metrics.items():
        yield "shoal_metric", {"metric": metric}, value
        if metric in RATES:
            yield RATES[metric], {}, value


def _steps(state: RunState) -> _Values:
    for phase, seconds in state.step_s.items():
        yield "shoal_step_seconds", {"phase": phase}, seconds
    if (total := sum(state.step_s.values())) > 0:
        yield "shoal_data_wait_ratio", {}, state.step_s.get("data", 0.0) / total
        yield "shoal_communication_ratio", {}, state.step_s.get("comm", 0.0) / total
    if state.workers is not None:
        for name in dict.fromkeys((*BOTTLENECKS, state.workers.bottleneck)):
            yield "shoal_bottleneck", {"bottleneck": name}, float(name == state.workers.bottleneck)


def _by_rank(state: RunState) -> _Values:
    for phase, seconds in state.by_phase.items():
        for rank, value in enumerate(seconds):
            yield "shoal_phase_seconds_total", {"rank": str(rank), "phase": phase}, value
    if state.workers is None:
        return
    for rank, excess in enumerate(_excess(state.workers)):
        yield "shoal_straggler_excess_ratio", {"rank": str(rank)}, excess
    for name, metric in SYSTEM.items():
        for rank, known in enumerate(state.workers.system.get(name, ())):
            yield metric, {"rank": str(rank)}, known


def _excess(workers: Workers) -> list[float]:
    """How much longer than the median each worker takes for its own part of a step."""
    own: tuple[float, ...] = ()
    for phase in ("data", *COMPUTING):
        own = added(own, workers.seconds.get(phase, ()))
    median = statistics.median(own) if own else 0.0
    return [value / median - 1.0 for value in own] if median > 0 else []
