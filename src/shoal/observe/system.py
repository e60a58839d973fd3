"""What a worker uses of its machine: cores, memory, disk, network, and its GPU. Linux's own counters and NVIDIA's."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = (
    "cpu_cores",
    "memory_bytes",
    "host_memory_used",
    "disk_read_bytes_per_s",
    "disk_written_bytes_per_s",
    "net_received_bytes_per_s",
    "net_sent_bytes_per_s",
    "gpu_busy",
    "gpu_memory_bytes",
    "gpu_memory_used",
    "gpu_power_w",
    "gpu_celsius",
)
"""Cores that the worker and the processes it has started keep busy; memory that it holds itself, and the share of the
machine's that is taken; its own reads and writes; the machine's network; its GPU: share of the time that something ran,
memory and its share of all, power, temperature. In that order in what workers tell each other."""


class SystemWatch:
    """Asked every so often; what is a rate is one since it was asked before."""

    def __init__(self, gpu: int | None = None) -> None:
        """`gpu`: as PyTorch counts them in this process."""
        self._gpu = _Gpu(gpu) if gpu is not None else None
        self._asked = time.monotonic()
        self._before = _counters()
        self._page_bytes = os.sysconf("SC_PAGE_SIZE")

    def ask(self) -> dict[str, float]:
        """name -> value, of those that can be known here."""
        now, counters = time.monotonic(), _counters()
        passed_s = max(now - self._asked, 1e-3)
        rates = {
            name: max(value - self._before[name], 0.0) / passed_s
            for name, value in counters.items()
            if name in self._before
        }
        self._asked, self._before = now, counters
        found = {"memory_bytes": float(_read("/proc/self/statm").split()[1]) * self._page_bytes}
        return found | _host_memory_used() | rates | (self._gpu.ask() if self._gpu is not None else {})


def _read(path: str) -> str:
    return Path(path).read_text(encoding="ascii", errors="replace")


def _counters() -> dict[str, float]:
    """What only grows, since the machine or the process started; without what this system does not tell."""
    times = os.times()
    found = {"cpu_cores": times.user + times.system + times.children_user + times.children_system}
    found["cpu_cores"] += _children_cpu_s()
    try:
        io = dict(line.split(": ") for line in _read("/proc/self/io").splitlines())
        found |= {
            "disk_read_bytes_per_s": float(io["read_bytes"]),
            "disk_written_bytes_per_s": float(io["write_bytes"]),
        }
    except (OSError, KeyError, ValueError):  # some containers hide it
        pass
    try:
        rows = [line.partition(":") for line in _read("/proc/net/dev").splitlines()[2:]]
        columns = [row[2].split() for row in rows if row[0].strip() != "lo"]
        found |= {
            "net_received_bytes_per_s": float(sum(int(column[0]) for column in columns)),
            "net_sent_bytes_per_s": float(sum(int(column[8]) for column in columns)),
        }
    except (OSError, IndexError, ValueError):
        pass
    return found


def _children_cpu_s() -> float:
    """Of processes that it has started and that still run: those that load data."""
    ticks = 0
    try:
        pids = _read(f"/proc/self/task/{os.getpid()}/children").split()
    except OSError:
        return 0.0
    for pid in pids:
        try:
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _host_memory_used() -> dict[str, float]:
    rows = dict(line.split(":") for line in _read("/proc/meminfo").splitlines()[:5])
    if not {"MemTotal", "MemAvailable"} <= rows.keys():
        return {}
    total, free = (float(rows[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return {"host_memory_used": 1.0 - free / total}


class _Gpu:
    """One GPU, by NVIDIA's management library; where that is missing, nothing is known."""

    def __init__(self, index: int) -> None:
        self._library: Any = None
        self._handle: Any = None
        try:
            import pynvml
            import torch

            pynvml.nvmlInit()
            # By what it is: PyTorch counts those that it may see, the library counts all.
            uuid = str(torch.cuda.get_device_properties(index).uuid)
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            self._library = pynvml
        except Exception:  # noqa: BLE001 - no library, no driver, a GPU that is divided: whatever it is, training goes on
            self._library = None

    def ask(self) -> dict[str, float]:
        if self._library is None:
            return {}
        questions: dict[str, Callable[[Any], float]] = {
            "gpu_busy": lambda nvml: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100,
            "gpu_memory_bytes": lambda nvml: float(nvml.nvmlDeviceGetMemoryInfo(self._handle).used),
            "gpu_memory_used": lambda nvml: _share(nvml.nvmlDeviceGetMemoryInfo(self._handle)),
            "gpu_power_w": lambda nvml: nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000,
            "gpu_celsius": lambda nvml: float(nvml.nvmlDeviceGetTemperature(self._handle, 0)),
        }
        found = {}
        for name, ask in questions.items():
            try:
                found[name] = ask(self._library)
            except self._library.NVMLError:  # not every GPU tells everything
                continue
        return found


def _share(memory: Any) -> float:
    return float(memory.used / memory.total) if memory.total else 0.0
