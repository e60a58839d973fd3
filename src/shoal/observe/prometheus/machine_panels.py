"""Panels on machines: the cluster, its GPUs, what workers use of them."""

from shoal.observe.prometheus.panels import ANY, HIGH, OF_RUN, WINDOW, Query, Shown, by_run, gpu_panel, rank_panel

CLUSTER = (
    Shown(
        "Runs",
        "Runs that train now.",
        (Query(f"sum({by_run('shoal_run_active')})", "runs"),),
        kind="number",
        width=3,
    ),
    Shown(
        "Workers", "Workers of these runs.", (Query(f"sum({by_run('shoal_run_workers')})", ""),), kind="number", width=3
    ),
    Shown(
        "Machines",
        "Machines of the Ray cluster whose metrics can be read.",
        (Query('sum(up{job="ray"})', "machines"),),
        kind="number",
        width=3,
    ),
    Shown(
        "Alerts",
        "Alerts of Shoal that fire now.",
        (Query('count(ALERTS{alertname=~"Shoal.+", alertstate="firing"}) or vector(0)', "alerts"),),
        kind="number",
        width=3,
        thresholds=ANY,
    ),
    Shown(
        "Goodput",
        "Share of the workers' time since the run was asked for that went into steps which count.",
        (Query(by_run("shoal_goodput_ratio")),),
        "percentunit",
        kind="number",
        width=6,
        highest=1.0,
        decimals=0,
    ),
    Shown(
        "Progress",
        "Steps made of those planned.",
        (Query(f"{by_run('shoal_run_step')} / {by_run('shoal_run_planned_steps')}"),),
        "percentunit",
        kind="number",
        width=6,
        highest=1.0,
        decimals=1,
    ),
    Shown(
        "What holds it up",
        "The bottleneck that was found over the last seconds.",
        (Query(f"max by (run, bottleneck) (shoal_bottleneck{OF_RUN}) == 1", "{{run}}: {{bottleneck}}"),),
        kind="states",
        width=12,
    ),
    Shown(
        "Failures and restarts",
        "Since the run began, by kind.",
        (
            Query(f"max by (run, kind) (shoal_failures_total{OF_RUN})", "{{run}}: {{kind}}"),
            Query(by_run("shoal_restarts_total"), "{{run}}: restarts"),
        ),
        width=12,
        decimals=0,
    ),
    Shown(
        "Time left",
        "At the pace of the last minutes.",
        (
            Query(
                f"({by_run('shoal_run_planned_steps')} - {by_run('shoal_run_step')})"
                f" / (max by (run) (rate(shoal_steps_total{OF_RUN}[{WINDOW}])) > 0)"
            ),
        ),
        "s",
    ),
    Shown(
        "CPU of the machines",
        "As Ray's agents tell it.",
        (Query("max by (instance) (ray_node_cpu_utilization) / 100", "{{instance}}"),),
        "percentunit",
        highest=1.0,
    ),
    Shown(
        "Memory of the machines",
        "Share that is taken, as Ray's agents tell it.",
        (
            Query(
                "max by (instance) (ray_node_mem_used) / max by (instance) (ray_node_mem_total)",
                "{{instance}}",
            ),
        ),
        "percentunit",
        highest=1.0,
        thresholds=HIGH,
    ),
)
GPU = (
    rank_panel(
        "GPU busy", "Share of the time in which something ran.", "shoal_gpu_busy_ratio", "percentunit", highest=1.0
    ),
    rank_panel(
        "GPU memory",
        "Share that is taken. Near 1, a longer input may not fit.",
        "shoal_gpu_memory_used_ratio",
        "percentunit",
        highest=1.0,
        thresholds=HIGH,
    ),
    rank_panel("GPU memory taken", "By everything on that GPU.", "shoal_gpu_memory_bytes", "bytes"),
    rank_panel("GPU power", "What it draws.", "shoal_gpu_power_watts", "watt"),
    rank_panel(
        "GPU temperature",
        "Above some 85 °C most GPUs slow down.",
        "shoal_gpu_temperature_celsius",
        "celsius",
        thresholds=((80.0, "yellow"), (90.0, "red")),
    ),
    gpu_panel(
        "Utilisation of all GPUs",
        "Of those that do not train as well, by NVIDIA's exporter.",
        "max by (Hostname, gpu) (DCGM_FI_DEV_GPU_UTIL) / 100",
        "percentunit",
        highest=1.0,
    ),
    gpu_panel(
        "Memory of all GPUs",
        "Share that is taken, by NVIDIA's exporter.",
        "max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED)"
        " / (max by (Hostname, gpu) (DCGM_FI_DEV_FB_USED) + max by (Hostname, gpu) (DCGM_FI_DEV_FB_FREE))",
        "percentunit",
        highest=1.0,
        thresholds=HIGH,
    ),
    gpu_panel(
        "SM clock", "It falls when a GPU is hot.", "max by (Hostname, gpu) (DCGM_FI_DEV_SM_CLOCK) * 1e6", "hertz"
    ),
    gpu_panel(
        "Slowed down",
        "Share of the time in which power or heat held a GPU back.",
        f"max by (Hostname, gpu) (rate(DCGM_FI_DEV_POWER_VIOLATION[{WINDOW}])"
        f" + rate(DCGM_FI_DEV_THERMAL_VIOLATION[{WINDOW}])) / 1e6",
        "percentunit",
        highest=1.0,
        thresholds=((0.05, "yellow"), (0.25, "red")),
    ),
    gpu_panel(
        "XID errors",
        "The number of the last error that the driver told of; 0 is none. NVIDIA lists what they mean.",
        "max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS)",
        "none",
        thresholds=ANY,
        decimals=0,
    ),
    gpu_panel(
        "Memory errors",
        "Errors of two bits, which cannot be corrected, since the driver was loaded.",
        "max by (Hostname, gpu) (DCGM_FI_DEV_ECC_DBE_VOL_TOTAL)",
        "none",
        thresholds=ANY,
        decimals=0,
    ),
    gpu_panel(
        "Power of all GPUs",
        "What they draw, by NVIDIA's exporter.",
        "max by (Hostname, gpu) (DCGM_FI_DEV_POWER_USAGE)",
        "watt",
    ),
)
SYSTEM = (
    rank_panel("CPU", "Cores that a worker and its processes keep busy.", "shoal_cpu_cores", "none"),
    rank_panel("Memory", "What a worker holds.", "shoal_memory_bytes", "bytes"),
    rank_panel(
        "Memory of its machine",
        "Share that is taken.",
        "shoal_host_memory_used_ratio",
        "percentunit",
        highest=1.0,
        thresholds=HIGH,
    ),
    rank_panel("Disk, read", "By the worker.", "shoal_disk_read_bytes_per_second", "Bps"),
    rank_panel("Disk, written", "By the worker.", "shoal_disk_written_bytes_per_second", "Bps"),
    Shown(
        "What Prometheus can read",
        "1 where the last attempt succeeded. The endpoint of a run goes with the run.",
        (Query("min by (job, instance) (up)", "{{job}} {{instance}}"),),
        "none",
        highest=1.0,
    ),
)
