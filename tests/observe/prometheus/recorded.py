"""What NVIDIA's exporter and Ray's metrics agent tell, in the form in which they do."""

from shoal.observe.prometheus.dcgm import COUNTERS

_VALUES = {
    "DCGM_FI_DEV_GPU_UTIL": "97",
    "DCGM_FI_DEV_FB_USED": "71240",
    "DCGM_FI_DEV_FB_FREE": "71922",
    "DCGM_FI_DEV_GPU_TEMP": "58",
    "DCGM_FI_DEV_POWER_USAGE": "612.417000",
    "DCGM_FI_DEV_SM_CLOCK": "1980",
    "DCGM_FI_DEV_XID_ERRORS": "0",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": "184467440",
}
_GPU = (
    'gpu="{gpu}",UUID="GPU-4f{gpu}0b2c1-7d2e-4b1a-9d52-0c6b8f2f7a1{gpu}",pci_bus_id="00000000:{gpu}B:00.0",'
    'device="nvidia{gpu}",modelName="NVIDIA H200",Hostname="gpu-node-1",DCGM_FI_DRIVER_VERSION="570.86.15"'
)


def dcgm() -> str:
    """Two GPUs."""
    lines = []
    for name, kind, words in COUNTERS:
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{_GPU.format(gpu=gpu)}}} {_VALUES.get(name, '0')}" for gpu in range(2)]
    return "\n".join(lines) + "\n"


_SCOPE = (
    'otel_scope_name="ray._private.telemetry.open_telemetry_metric_recorder",otel_scope_schema_url="",'
    'otel_scope_version=""'
)
_SESSION = 'SessionName="session_2026-11-16_18-34-44_187297_30359",Version="2.60.0"'
_NODE = f'IsHeadNode="true",RayNodeType="head",{_SESSION},ip="192.0.2.2",{_SCOPE}'
_WORKER = f'Component="core_worker",NodeAddress="192.0.2.2",{_SESSION},WorkerId="66b45650",{_SCOPE}'


def ray() -> str:
    """A machine of Ray 2.60 with rank 0 of a run."""
    nodes = {"cpu_utilization": "43.5", "mem_used": "3.850145792e+09", "mem_total": "2.5274793984e+10"}
    lines = []
    for name, value in nodes.items():
        lines += [f"# HELP ray_node_{name} {name}", f"# TYPE ray_node_{name} gauge"]
        lines += [f"ray_node_{name}{{{_NODE}}} {value}"]
    lines += ["# HELP ray_shoal_run_step The step that the run is at.", "# TYPE ray_shoal_run_step gauge"]
    lines += [f'ray_shoal_run_step{{{_WORKER},run="run-on-ray"}} 120.0']
    return "\n".join(lines) + "\n"
