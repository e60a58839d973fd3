"""Alert rules: what is worth waking somebody for. None of them may speak of a run that is well, only starts, or has
ended; `rule_tests` holds each to that."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.observe.phases import STEPPING

RUNBOOK = "docs/prometheus.md"
STEP_PHASES = "|".join(STEPPING)
_ACTIVE = "and on (run) (max by (run) (shoal_run_active) == 1)"
"""Metrics may come by several ways at once and from one worker after another, so all goes by run, not by instance."""
_UNSAVED = (
    'time() - max by (run) ({__name__=~"shoal_checkpoint_last_timestamp_seconds|shoal_run_start_timestamp_seconds"})'
)


@dataclass(frozen=True)
class Alert:
    """One rule."""

    name: str
    expr: str
    lasting: str
    """How long it must hold."""
    severity: str
    summary: str
    description: str

    @property
    def anchor(self) -> str:
        """Where the docs say what to do."""
        return f"{RUNBOOK}#{self.name.lower()}"


def grown(counter: str, by: str, minutes: int) -> str:
    """How much a counter of the run has grown; also where it goes on in another process, which `increase` misses."""
    return f"max by ({by}) ({counter}) - min by ({by}) (min_over_time({counter}[{minutes}m]))"


def step_share(phase: str, window: str, selector: str = "") -> str:
    """Share of the workers' steps that goes to a phase."""
    own = f'shoal_phase_seconds_total{{phase="{phase}"{selector}}}'
    every = f'shoal_phase_seconds_total{{phase=~"{STEP_PHASES}"{selector}}}'
    return (
        f"sum by (run) (max by (run, rank) (rate({own}[{window}])))"
        f" / sum by (run) (max by (run, rank, phase) (rate({every}[{window}])))"
    )


ALERTS: Sequence[Alert] = (
    Alert(
        "ShoalNodeLost",
        grown('shoal_failures_total{kind="lost"}', "run", 15) + " > 0",
        "0m",
        "warning",
        "{{ $labels.run }} lost a machine",
        "A machine or its agent stopped answering. The run goes on from its last checkpoint by itself; look whether "
        "the machine comes back.",
    ),
    Alert(
        "ShoalNodeDown",
        'up{job=~"ray|dcgm"} == 0 and on (job) (count by (job) (up{job=~"ray|dcgm"} == 1) > 0)',
        "2m",
        "critical",
        "{{ $labels.instance }} does not answer, and others of {{ $labels.job }} do",
        "Prometheus cannot read the metrics of this machine, while it reads those of others of the same cluster.",
    ),
    Alert(
        "ShoalNoProgress",
        f"(time() - max by (run) (shoal_run_progress_timestamp_seconds) > 900 {_ACTIVE})"
        " or (time() - max by (run) (shoal_run_start_timestamp_seconds) > 1800"
        f" unless on (run) shoal_run_progress_timestamp_seconds {_ACTIVE})",
        "1m",
        "critical",
        "{{ $labels.run }} makes no progress",
        "No step, report or checkpoint for {{ $value | humanizeDuration }}, or no first step at all.",
    ),
    Alert(
        "ShoalGpuOutOfMemory",
        grown('shoal_failures_total{kind="out_of_memory"}', "run", 15) + " > 0",
        "0m",
        "critical",
        "{{ $labels.run }} ran out of memory",
        "A worker failed because a GPU, or its machine, had no memory left. This is not tried again: the recipe must "
        "ask for less.",
    ),
    Alert(
        "ShoalGpuMemoryNearlyFull",
        f"max by (run, rank) (shoal_gpu_memory_used_ratio) > 0.97 {_ACTIVE}",
        "5m",
        "info",
        "{{ $labels.run }}: the GPU of worker {{ $labels.rank }} is nearly full",
        "{{ $value | humanizePercentage }} of its memory is taken. A longer input or an evaluation may not fit.",
    ),
    Alert(
        "ShoalCheckpointFailing",
        f"({grown('shoal_checkpoint_failures_total', 'run', 15)} > 0) {_ACTIVE}",
        "0m",
        "critical",
        "{{ $labels.run }} cannot save checkpoints",
        "{{ $value }} saves failed within 15 minutes. The run stops after a few in a row, so that no more is lost.",
    ),
    Alert(
        "ShoalCheckpointStale",
        f"(({_UNSAVED} > 600 + 3 * max by (run) (shoal_checkpoint_interval_seconds))"
        f" or ({_UNSAVED} > 7200 unless on (run) shoal_checkpoint_interval_seconds)) {_ACTIVE}",
        "5m",
        "warning",
        "{{ $labels.run }} has not saved for {{ $value | humanizeDuration }}",
        "That is much longer than between its checkpoints before; all work since then would be lost with the workers.",
    ),
    Alert(
        "ShoalThroughputDrop",
        "max by (run) (avg_over_time(shoal_samples_per_second[5m]))"
        " < 0.7 * max by (run) (avg_over_time(shoal_samples_per_second[1h] offset 10m))"
        f" {_ACTIVE}",
        "5m",
        "warning",
        "{{ $labels.run }} trains more slowly than it did",
        "{{ $value | humanize }} samples a second, less than 70% of its own hour before.",
    ),
    Alert(
        "ShoalHighCommunication",
        f"({step_share('comm', '5m')}) > 0.4 {_ACTIVE}",
        "10m",
        "warning",
        "{{ $labels.run }} waits for the network",
        "{{ $value | humanizePercentage }} of a step is waiting for other workers.",
    ),
    Alert(
        "ShoalDataStarvation",
        f"({step_share('data', '5m')}) > 0.3 {_ACTIVE}",
        "10m",
        "warning",
        "{{ $labels.run }} waits for data",
        "{{ $value | humanizePercentage }} of a step is waiting for the next batch.",
    ),
)


def rules() -> dict[str, Any]:
    """As Prometheus reads them."""
    return {"groups": [{"name": "shoal", "rules": [_rule(alert) for alert in ALERTS]}]}


def _rule(alert: Alert) -> dict[str, Any]:
    annotations = {"summary": alert.summary, "description": alert.description, "runbook": alert.anchor}
    return {
        "alert": alert.name,
        "expr": alert.expr,
        "for": alert.lasting,
        "labels": {"severity": alert.severity},
        "annotations": annotations,
    }
