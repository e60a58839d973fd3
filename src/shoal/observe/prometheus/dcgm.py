"""NVIDIA's exporter of what GPUs do: which counters to read, and how to run it on every GPU machine of Kubernetes."""

from typing import Any

from shoal.observe.prometheus.scrape import DCGM_PORT

IMAGE = "nvcr.io/nvidia/k8s/dcgm-exporter:4.2.3-4.1.3-ubuntu22.04"
COUNTERS = (
    ("DCGM_FI_DEV_GPU_UTIL", "gauge", "Share of the time in which something ran (in %)."),
    ("DCGM_FI_DEV_MEM_COPY_UTIL", "gauge", "Share of the time in which memory was read or written (in %)."),
    ("DCGM_FI_DEV_FB_USED", "gauge", "Memory that is taken (in MiB)."),
    ("DCGM_FI_DEV_FB_FREE", "gauge", "Memory that is free (in MiB)."),
    ("DCGM_FI_DEV_GPU_TEMP", "gauge", "Temperature (in C)."),
    ("DCGM_FI_DEV_MEMORY_TEMP", "gauge", "Temperature of the memory (in C)."),
    ("DCGM_FI_DEV_POWER_USAGE", "gauge", "Power (in W)."),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy since the machine started (in mJ)."),
    ("DCGM_FI_DEV_SM_CLOCK", "gauge", "Clock of the multiprocessors (in MHz)."),
    ("DCGM_FI_DEV_MEM_CLOCK", "gauge", "Clock of the memory (in MHz)."),
    ("DCGM_FI_DEV_XID_ERRORS", "gauge", "Number of the last XID error; 0: none."),
    ("DCGM_FI_DEV_POWER_VIOLATION", "counter", "Time that it was slowed down by its limit of power (in us)."),
    ("DCGM_FI_DEV_THERMAL_VIOLATION", "counter", "Time that it was slowed down by heat (in us)."),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "counter", "Memory errors of two bits since the driver was loaded."),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "gauge", "1 if broken memory could not be replaced."),
    ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "counter", "PCIe packets that were sent again."),
    ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", "counter", "Data over all NVLinks (in KiB)."),
)
"""Of those that need no privileges. The ones called PROF need the capability SYS_ADMIN."""
_PROFILING = (
    ("DCGM_FI_PROF_SM_ACTIVE", "gauge", "Share of cycles in which a multiprocessor had work."),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "gauge", "Share of cycles in which the tensor cores worked."),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "gauge", "Share of cycles in which memory was transferred."),
)
_NAME = {"app.kubernetes.io/name": "dcgm-exporter"}
_FOLDER = "/etc/shoal"


def counters_csv() -> str:
    """As the exporter reads it: field, type, help."""
    lines = ["# DCGM field, Prometheus type, help", *(", ".join(counter) for counter in COUNTERS)]
    lines += ["# These need the capability SYS_ADMIN, which dcgm-exporter.yaml does not give:"]
    lines += ["# " + ", ".join(counter) for counter in _PROFILING]
    return "\n".join(lines) + "\n"


def manifests() -> list[dict[str, Any]]:
    """A DaemonSet with its counters, and a Service."""
    counters = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "dcgm-counters", "labels": _NAME},
        "data": {"dcgm-counters.csv": counters_csv()},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "dcgm-exporter", "labels": _NAME},
        # Without an address of its own, so that it stands for the machines one by one.
        "spec": {"clusterIP": "None", "selector": _NAME, "ports": [{"name": "metrics", "port": DCGM_PORT}]},
    }
    daemons = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "dcgm-exporter", "labels": _NAME},
        "spec": {
            "selector": {"matchLabels": _NAME},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": _NAME, "annotations": _annotations()}, "spec": _pod()},
        },
    }
    return [counters, daemons, service]


def _annotations() -> dict[str, str]:
    return {"prometheus.io/scrape": "true", "prometheus.io/port": str(DCGM_PORT)}


def _pod() -> dict[str, Any]:
    environment = {
        "DCGM_EXPORTER_LISTEN": f":{DCGM_PORT}",
        "DCGM_EXPORTER_KUBERNETES": "true",
        "DCGM_EXPORTER_COLLECTORS": f"{_FOLDER}/dcgm-counters.csv",
        "NVIDIA_VISIBLE_DEVICES": "all",  # without taking one from those who train
        "NVIDIA_DRIVER_CAPABILITIES": "utility",
        "NO_SETCAP": "1",
    }
    sockets = "/var/lib/kubelet/pod-resources"
    return {
        "automountServiceAccountToken": False,
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [
            {
                "name": "dcgm-exporter",
                "image": IMAGE,
                "env": [{"name": name, "value": value} for name, value in environment.items()],
                "ports": [{"name": "metrics", "containerPort": DCGM_PORT}],
                # As root, to whom alone the kubelet tells which pod has which GPU; but with no privilege besides.
                "securityContext": {
                    "runAsUser": 0,
                    "allowPrivilegeEscalation": False,
                    "privileged": False,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "resources": {
                    "requests": {"cpu": "50m", "memory": "128Mi"},
                    "limits": {"cpu": "500m", "memory": "512Mi"},
                },
                "readinessProbe": {
                    "httpGet": {"path": "/health", "port": "metrics"},
                    "initialDelaySeconds": 10,
                    "periodSeconds": 15,
                },
                "volumeMounts": [
                    {"name": "counters", "mountPath": _FOLDER, "readOnly": True},
                    {"name": "pod-resources", "mountPath": sockets, "readOnly": True},
                ],
            }
        ],
        "volumes": [
            {"name": "counters", "configMap": {"name": "dcgm-counters"}},
            {"name": "pod-resources", "hostPath": {"path": sockets, "type": "Directory"}},
        ],
    }
