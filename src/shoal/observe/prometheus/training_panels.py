"""Panels on training: metrics and steps, communication, checkpoints."""

from shoal.observe.prometheus.panels import (
    ANY,
    BY_RANK,
    OF_RANK,
    OF_RUN,
    WINDOW,
    Query,
    Shown,
    by_run,
    gpu_panel,
    rank_panel,
    share,
)

TRAINING = (
    Shown(
        "Loss",
        "Training and validation.",
        (Query('max by (run, metric) (shoal_metric{run=~"$run", metric=~".*loss"})', "{{run}}: {{metric}}"),),
        "none",
        lowest=None,
    ),
    Shown(
        "Other metrics",
        "Whatever the run reports besides loss, rates and the learning rate.",
        (
            Query(
                'max by (run, metric) (shoal_metric{run=~"$run", metric!~".*loss|lr|.*_per_s"})',
                "{{run}}: {{metric}}",
            ),
        ),
        "none",
        lowest=None,
    ),
    Shown(
        "Learning rate",
        "As the schedule gives it.",
        (Query('max by (run) (shoal_metric{run=~"$run", metric="lr"})'),),
        "sci",
    ),
    Shown("Samples a second", "By all workers, while training.", (Query(by_run("shoal_samples_per_second")),), "none"),
    Shown("Tokens a second", "By all workers, while training.", (Query(by_run("shoal_tokens_per_second")),), "none"),
    Shown("Step", "Where the run is.", (Query(by_run("shoal_run_step")),), "none", decimals=0),
    Shown(
        "A step, by what it spends its time on",
        "Mean over the workers, in the last report.",
        (Query(f"max by (run, phase) (shoal_step_seconds{OF_RUN})", "{{run}}: {{phase}}"),),
        "s",
        kind="stacked",
        width=12,
    ),
    Shown(
        "Where the workers' seconds go",
        "Each second of each worker, saving, evaluating and reporting included; 1 a worker.",
        (
            Query(
                f"sum by (run, phase) (max by (run, rank, phase) (rate(shoal_phase_seconds_total{OF_RANK}[{WINDOW}])))",
                "{{run}}: {{phase}}",
            ),
        ),
        "none",
        kind="stacked",
        width=12,
    ),
    Shown(
        "Waiting for data",
        "Share of a step.",
        (Query(share("data")),),
        "percentunit",
        highest=1.0,
        thresholds=((0.1, "yellow"), (0.3, "red")),
    ),
    rank_panel(
        "Slower than the others",
        "How much more than the median a worker takes for its own part of a step. All others wait for the slowest.",
        "shoal_straggler_excess_ratio",
        "percentunit",
        thresholds=((0.15, "yellow"), (0.5, "red")),
        lowest=None,
    ),
    Shown(
        "Goodput over time", "Of the time so far.", (Query(by_run("shoal_goodput_ratio")),), "percentunit", highest=1.0
    ),
)
COMMUNICATION = (
    Shown(
        "Waiting for other workers",
        "Share of a step that nothing hides.",
        (Query(share("comm")),),
        "percentunit",
        highest=1.0,
        thresholds=((0.2, "yellow"), (0.4, "red")),
    ),
    Shown(
        "Waiting, by worker",
        "The one that waits least is the one that others wait for.",
        (
            Query(
                'max by (run, rank) (rate(shoal_phase_seconds_total{run=~"$run", rank=~"$rank", phase="comm"}'
                f"[{WINDOW}]))",
                BY_RANK,
            ),
        ),
        "percentunit",
    ),
    Shown(
        "Communication in the last report",
        "Share of a step: the mean over workers.",
        (Query(by_run("shoal_communication_ratio")),),
        "percentunit",
        highest=1.0,
    ),
    rank_panel("Network, sent", "By the worker's machine.", "shoal_network_sent_bytes_per_second", "Bps"),
    rank_panel("Network, received", "By the worker's machine.", "shoal_network_received_bytes_per_second", "Bps"),
    gpu_panel(
        "NVLink",
        "Data over all links of a GPU, by NVIDIA's exporter.",
        f"max by (Hostname, gpu) (rate(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL[{WINDOW}])) * 1024",
        "Bps",
    ),
)
CHECKPOINTS = (
    Shown(
        "Unsaved",
        "Time since the newest checkpoint: what would be lost now.",
        (Query(f"clamp_min(time() - {by_run('shoal_checkpoint_last_timestamp_seconds')}, 0)"),),
        "s",
        kind="number",
        width=6,
    ),
    Shown(
        "Unsaved steps",
        "Steps since the newest checkpoint.",
        (Query(f"{by_run('shoal_run_step')} - {by_run('shoal_checkpoint_last_step')}"),),
        "none",
        kind="number",
        width=6,
        decimals=0,
    ),
    Shown(
        "Saved",
        "Checkpoints since the run began.",
        (Query(by_run("shoal_checkpoints_total")),),
        "none",
        kind="number",
        width=6,
        decimals=0,
    ),
    Shown(
        "Failed saves",
        "Saves that did not succeed at once; they are tried again.",
        (Query(by_run("shoal_checkpoint_failures_total")),),
        "none",
        kind="number",
        width=6,
        thresholds=ANY,
        decimals=0,
    ),
    Shown(
        "How long saving takes",
        "Until a checkpoint is safe, and for how long steps wait for it.",
        (
            Query(by_run("shoal_checkpoint_last_duration_seconds"), "{{run}}: until it is safe"),
            Query(by_run("shoal_checkpoint_last_stall_seconds"), "{{run}}: steps wait"),
        ),
        "s",
    ),
    Shown(
        "Time lost to saving",
        "Share of the time in which steps waited for it.",
        (Query(f"max by (run) (rate(shoal_checkpoint_stall_seconds_total{OF_RUN}[{WINDOW}]))"),),
        "percentunit",
        thresholds=((0.05, "yellow"), (0.2, "red")),
    ),
    Shown(
        "Size",
        "Bytes of a checkpoint.",
        (Query(by_run("shoal_checkpoint_last_size_bytes")),),
        "bytes",
    ),
)
