"""What there is of GPUs, and whether torch and Ray can be imported: looked at in a process of its own.

A broken driver or library may hang, crash or print, and a process that has used a GPU keeps some of its memory. So
`python -m shoal.deploy.doctor.devices` looks, prints one line of JSON and ends.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

LOOK_WITHIN_S = 90.0
"""torch's libraries may come from a slow disk."""
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_SLOWED = {
    "hardware slowdown": 0x8,
    "heat (software)": 0x20,
    "heat (hardware)": 0x40,
    "power brake": 0x80,
}
"""NVML's reasons for a lower clock that are not part of normal work."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver sees it."""

    name: str
    memory_bytes: int
    used_bytes: int
    """By whoever: looked at before this process used it."""
    capability: tuple[int, int] | None = None
    ecc_errors: int | None = None
    """Uncorrected ones since the driver was loaded; None: it does not count them."""
    remap_failed: bool = False
    remap_pending: bool = False
    slowed_by: tuple[str, ...] = ()


@dataclass(frozen=True)
class Devices:
    """GPUs, driver, torch."""

    on_bus: int = 0
    """NVIDIA's GPUs on the PCI bus, which a container sees also where it may not use them."""
    device_files: bool = False
    """Whether the driver's device files are here."""
    hidden: bool = False
    """CUDA_VISIBLE_DEVICES hides all GPUs."""
    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver knows."""
    driver_error: str = ""
    gpus: tuple[Gpu, ...] = ()
    torch_error: str = ""
    """Why torch cannot be imported."""
    ray_error: str = ""
    torch_cuda: str | None = None
    """What torch was built with; None: without CUDA."""
    torch_archs: tuple[str, ...] = ()
    torch_gpus: int = 0
    torch_gpu_error: str = ""
    nccl: str | None = None
    without_peer: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that cannot reach each other's memory directly."""

    def to_record(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def devices_from(record: Mapping[str, Any]) -> Devices:
    """Of what `to_record` gave, after its way through JSON."""
    tupled = {name: _tupled(value) for name, value in record.items() if name != "gpus"}
    gpus = tuple(Gpu(**{name: _tupled(value) for name, value in gpu.items()}) for gpu in record["gpus"])
    return Devices(**tupled, gpus=gpus)


def _tupled(value: Any) -> Any:
    return tuple(_tupled(item) for item in value) if isinstance(value, list) else value


def look_at_devices(variables: Mapping[str, str] | None = None, timeout_s: float = LOOK_WITHIN_S) -> Devices | str:
    """What there is, or why it could not be looked at."""
    command = [sys.executable, "-m", "shoal.deploy.doctor.devices"]
    environment = dict(os.environ if variables is None else variables)
    try:
        done = subprocess.run(  # noqa: S603 - ourselves
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s: the driver or a library hangs"
    except OSError as error:
        return f"{sys.executable} cannot be run: {error.strerror or error}"
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        words = done.stderr.strip().splitlines()[-1:] or ["no word about why"]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
        return f"the process that looks ended with {how}: {words[0]}"
    return devices_from(json.loads(lines[-1]))


def gpus_on_bus(root: Path = Path("/sys/bus/pci/devices")) -> int:
    """NVIDIA's GPUs, whether or not there is a driver."""

    def read(file: Path) -> str:
        try:
            return file.read_text().strip()
        except OSError:
            return ""

    devices = list(root.iterdir()) if root.is_dir() else []
    return sum(read(one / "vendor") == _NVIDIA and read(one / "class").startswith(_DISPLAY) for one in devices)


def _look_here() -> Devices:
    facts: dict[str, Any] = {
        "on_bus": gpus_on_bus(),
        "device_files": Path("/dev/nvidiactl").exists(),
        "hidden": os.environ.get("CUDA_VISIBLE_DEVICES", "unset").strip() in ("", "-1"),
    }
    facts |= _ask_driver()  # before torch takes memory
    facts |= _ask_torch()
    try:
        import ray  # noqa: F401
    except Exception as error:  # noqa: BLE001 - whatever an import may raise is what there is to tell
        facts["ray_error"] = _words(error)
    return Devices(**facts)


def _ask_driver() -> dict[str, Any]:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no library or no driver, which says why
        return {"driver_error": _words(error)}
    try:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {
            "driver": str(nvml.nvmlSystemGetDriverVersion()),
            "driver_cuda": (cuda // 1000, cuda % 1000 // 10),
            "gpus": tuple(_ask_gpu(nvml, handle) for handle in handles),
        }
    except nvml.NVMLError as error:
        return {"driver_error": _words(error)}
    finally:
        nvml.nvmlShutdown()


def _ask_gpu(nvml: Any, handle: Any) -> Gpu:
    def ask(question: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):  # not every GPU, nor every version, tells everything
            return otherwise

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    remapped = ask(lambda: nvml.nvmlDeviceGetRemappedRows(handle), (0, 0, 0, 0))
    reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return Gpu(
        name=str(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        used_bytes=int(memory.used),
        capability=ask(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)), None),
        ecc_errors=ask(
            lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, nvml.NVML_VOLATILE_ECC)), None
        ),
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        slowed_by=tuple(name for name, bit in _SLOWED.items() if reasons & bit),
    )


def _ask_torch() -> dict[str, Any]:
    try:
        import torch
        import torch.distributed
    except Exception as error:  # noqa: BLE001 - whatever an import may raise is what there is to tell
        return {"torch_error": _words(error)}
    facts: dict[str, Any] = {"torch_cuda": torch.version.cuda}
    if torch.version.cuda is None:
        return facts
    if torch.distributed.is_nccl_available():
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
        for index in range(count):
            torch.ones(1, device=f"cuda:{index}").add_(1).item()
    except Exception as error:  # noqa: BLE001 - the driver's own words
        return facts | {"torch_gpu_error": _words(error)}
    pairs = [(one, other) for one in range(count) for other in range(count) if one < other]
    alone = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    return facts | {"torch_gpus": count, "torch_archs": tuple(torch.cuda.get_arch_list()), "without_peer": tuple(alone)}


def _words(error: BaseException) -> str:
    """An error in one line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


if __name__ == "__main__":
    print(json.dumps(_look_here().to_record()))
