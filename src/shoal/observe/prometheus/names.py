"""Every metric that a run tells Prometheus, in one table, for its endpoint and for Ray's metrics agent alike."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

FAILURES = ("out_of_memory", "lost", "hung", "died", "network", "exception", "run", "user")
"""Kinds of failures, as the launcher tells them apart; what ran out of memory is one of its own here. All of them are
told from the start, as 0: Prometheus sees a growth only in what it has seen before."""


@dataclass(frozen=True)
class Metric:
    """One line of the table."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()
    """Beside `run`, which all have."""


SYSTEM = {
    "cpu_cores": "shoal_cpu_cores",
    "memory_bytes": "shoal_memory_bytes",
    "host_memory_used": "shoal_host_memory_used_ratio",
    "disk_read_bytes_per_s": "shoal_disk_read_bytes_per_second",
    "disk_written_bytes_per_s": "shoal_disk_written_bytes_per_second",
    "net_received_bytes_per_s": "shoal_network_received_bytes_per_second",
    "net_sent_bytes_per_s": "shoal_network_sent_bytes_per_second",
    "gpu_busy": "shoal_gpu_busy_ratio",
    "gpu_memory_bytes": "shoal_gpu_memory_bytes",
    "gpu_memory_used": "shoal_gpu_memory_used_ratio",
    "gpu_power_w": "shoal_gpu_power_watts",
    "gpu_celsius": "shoal_gpu_temperature_celsius",
}
"""What `observe.system` calls it -> the metric."""
RATES = {"samples_per_s": "shoal_samples_per_second", "tokens_per_s": "shoal_tokens_per_second"}
"""Metrics of a report that have a name of their own besides."""

_BY_RANK = ("rank",)
METRICS = (
    Metric(
        "shoal_run_info",
        "gauge",
        "What runs, in labels; always 1.",
        ("strategy", "device", "world_size", "version"),
    ),
    Metric("shoal_run_active", "gauge", "1 while the run goes on, 0 once it has ended."),
    Metric("shoal_run_start_timestamp_seconds", "gauge", "When the workers that train now started."),
    Metric("shoal_run_progress_timestamp_seconds", "gauge", "When something was last done: a step, a report, a save."),
    Metric("shoal_run_workers", "gauge", "Workers that train together."),
    Metric("shoal_run_step", "gauge", "The step that the run is at."),
    Metric("shoal_run_planned_steps", "gauge", "The step that the run will end at."),
    Metric("shoal_run_epochs", "gauge", "Passes over the data so far, with the fraction of the present one."),
    Metric("shoal_steps_total", "counter", "Steps made, those that are made again after a failure included."),
    Metric("shoal_samples_total", "counter", "Samples trained on, by all workers; again after a failure included."),
    Metric("shoal_tokens_total", "counter", "Tokens trained on, by all workers, where the loss counts tokens."),
    Metric("shoal_samples_per_second", "gauge", "Samples a second of training, in the last report."),
    Metric("shoal_tokens_per_second", "gauge", "Tokens a second of training, in the last report."),
    Metric("shoal_metric", "gauge", "The last value of each metric that the run reports.", ("metric",)),
    Metric("shoal_goodput_ratio", "gauge", "Share of the workers' time so far that went into steps which count."),
    Metric("shoal_restarts_total", "counter", "How often the workers were started again."),
    Metric("shoal_failures_total", "counter", "Failures of workers, by kind.", ("kind",)),
    Metric("shoal_bottleneck", "gauge", "1 for what holds the run up now, 0 for all else.", ("bottleneck",)),
    Metric("shoal_phase_seconds_total", "counter", "Seconds of each worker by what they went to.", ("rank", "phase")),
    Metric("shoal_step_seconds", "gauge", "Seconds of a step by phase: the mean over workers.", ("phase",)),
    Metric("shoal_data_wait_ratio", "gauge", "Share of a step that waits for data: the mean over workers."),
    Metric("shoal_communication_ratio", "gauge", "Share of a step that waits for other workers: the mean over them."),
    Metric(
        "shoal_straggler_excess_ratio", "gauge", "How much more than the median this worker takes for a step.", _BY_RANK
    ),
    Metric("shoal_checkpoints_total", "counter", "Checkpoints that were saved."),
    Metric("shoal_checkpoint_failures_total", "counter", "Checkpoints that could not be saved at the first attempt."),
    Metric("shoal_checkpoint_stall_seconds_total", "counter", "Seconds that steps have waited for saving."),
    Metric("shoal_checkpoint_last_timestamp_seconds", "gauge", "When the newest checkpoint was saved."),
    Metric("shoal_checkpoint_last_step", "gauge", "The step of the newest checkpoint."),
    Metric("shoal_checkpoint_last_duration_seconds", "gauge", "How long the newest checkpoint took to be safe."),
    Metric("shoal_checkpoint_last_stall_seconds", "gauge", "For how long steps waited for the newest checkpoint."),
    Metric("shoal_checkpoint_last_size_bytes", "gauge", "The size of the newest checkpoint."),
    Metric("shoal_checkpoint_interval_seconds", "gauge", "The time between the newest two checkpoints."),
    Metric(SYSTEM["cpu_cores"], "gauge", "CPU cores that the worker and its processes keep busy.", _BY_RANK),
    Metric(SYSTEM["memory_bytes"], "gauge", "Memory that the worker holds.", _BY_RANK),
    Metric(SYSTEM["host_memory_used"], "gauge", "Share of its machine's memory that is taken.", _BY_RANK),
    Metric(SYSTEM["disk_read_bytes_per_s"], "gauge", "What the worker reads from disk.", _BY_RANK),
    Metric(SYSTEM["disk_written_bytes_per_s"], "gauge", "What the worker writes to disk.", _BY_RANK),
    Metric(SYSTEM["net_received_bytes_per_s"], "gauge", "What its machine receives over the network.", _BY_RANK),
    Metric(SYSTEM["net_sent_bytes_per_s"], "gauge", "What its machine sends over the network.", _BY_RANK),
    Metric(SYSTEM["gpu_busy"], "gauge", "Share of the time in which something ran on its GPU.", _BY_RANK),
    Metric(SYSTEM["gpu_memory_bytes"], "gauge", "Memory of its GPU that is taken.", _BY_RANK),
    Metric(SYSTEM["gpu_memory_used"], "gauge", "Share of its GPU's memory that is taken.", _BY_RANK),
    Metric(SYSTEM["gpu_power_w"], "gauge", "Power that its GPU draws.", _BY_RANK),
    Metric(SYSTEM["gpu_celsius"], "gauge", "Temperature of its GPU.", _BY_RANK),
)
TABLE: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


@dataclass(frozen=True)
class Sample:
    """One value of one metric."""

    name: str
    labels: Mapping[str, str]
    """All of the metric's, `run` included."""
    value: float
