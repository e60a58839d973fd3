"""Looking at GPUs, torch and Ray in a process of its own."""

import json
import os
from pathlib import Path

import pytest

from shoal.deploy.doctor import devices as module
from shoal.deploy.doctor.devices import Devices, Gpu, devices_from, gpus_on_bus, look_at_devices


def test_a_record_comes_back_as_it_was() -> None:
    gpu = Gpu("H200", 100, 3, (9, 0), 0, slowed_by=("power brake",))
    devices = Devices(on_bus=2, driver_cuda=(12, 4), gpus=(gpu, gpu), torch_archs=("sm_90",), without_peer=((0, 1),))
    assert devices_from(json.loads(json.dumps(devices.to_record()))) == devices


def test_gpus_on_the_bus_are_counted(tmp_path: Path) -> None:
    kinds = [("0x10de", "0x030200"), ("0x10de", "0x040300"), ("0x1af4", "0x030000"), ("0x10de", "0x030000")]
    for number, (vendor, kind) in enumerate(kinds):
        folder = tmp_path / f"0000:0{number}:00.0"
        folder.mkdir()
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    (tmp_path / "hidden").mkdir()
    assert gpus_on_bus(tmp_path) == 2
    assert gpus_on_bus(tmp_path / "none") == 0


def test_this_machine() -> None:
    import torch

    found = look_at_devices()
    assert isinstance(found, Devices)
    assert (found.torch_error, found.ray_error) == ("", "")
    assert found.torch_cuda == torch.version.cuda
    assert found.torch_gpus == torch.cuda.device_count()


def test_a_process_that_hangs_or_dies_is_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)")
    variables = dict(os.environ) | {"PYTHONPATH": str(tmp_path)}
    found = look_at_devices(variables, timeout_s=0.5)
    assert isinstance(found, str) and "no answer within" in found
    (tmp_path / "sitecustomize.py").write_text("import os; os.kill(os.getpid(), 11)")
    found = look_at_devices(variables)
    assert isinstance(found, str) and "signal 11" in found


def test_a_torch_or_driver_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    for name in ("torch", "ray"):
        (tmp_path / f"{name}.py").write_text(f"raise OSError('lib{name}.so: cannot open shared object file')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])  # which may be where Shoal is
    found = look_at_devices(dict(os.environ) | {"PYTHONPATH": path})
    assert isinstance(found, Devices)
    assert found.torch_error == "OSError: libtorch.so: cannot open shared object file"
    assert "libray.so" in found.ray_error


class _Nvml:
    """The calls of NVML that are used, of a machine with one GPU that tells little."""

    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12040

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54"

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return type("Memory", (), {"total": 1000, "used": 30})

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetTotalEccErrors(self, *arguments: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetRemappedRows(self, handle: int) -> tuple[int, int, int, int]:
        return (0, 1, 1, 0)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return 0x40 | 0x4


def test_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())  # type: ignore[arg-type]
    facts = module._ask_driver()
    assert (facts["driver"], facts["driver_cuda"]) == ("550.54", (12, 4))
    assert facts["gpus"] == (Gpu("H200", 1000, 30, (9, 0), None, False, True, ("heat (hardware)",)),)


def test_a_python_that_cannot_be_run_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    assert look_at_devices() == "/no/such/python cannot be run: No such file or directory"
