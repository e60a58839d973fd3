"""What is said of GPUs."""

import pytest

from shoal.deploy.doctor.devices import Devices, Gpu
from shoal.deploy.doctor.finding import Finding
from shoal.deploy.doctor.gpus import (
    CHECKS,
    judge_build,
    judge_cuda,
    judge_devices,
    judge_gpu,
    judge_health,
    judge_imports,
    judge_memory,
    judge_nccl,
    judge_peers,
)

H200 = Gpu("H200", 140 << 30, 1 << 30, (9, 0), 0)
GOOD = Devices(
    on_bus=2,
    device_files=True,
    driver="550.54",
    driver_cuda=(12, 8),
    gpus=(H200, H200),
    torch_cuda="12.8",
    torch_archs=("sm_80", "sm_90", "compute_90"),
    torch_gpus=2,
    nccl="2.27.3",
)


def test_a_good_machine_passes_all() -> None:
    findings = judge_devices(GOOD)
    assert {finding.level for finding in findings} == {"pass"}, findings
    assert tuple(finding.check for finding in findings) == CHECKS


def test_no_gpu_is_no_fault() -> None:
    assert [(f.level, f.found) for f in judge_devices(Devices(driver_error="no library"))] == [("skip", "no GPU here")]


@pytest.mark.parametrize(
    ("devices", "level", "words"),
    [
        (Devices(gpus=(H200,), driver="1"), "fail", "built without CUDA"),
        (
            Devices(gpus=(H200,), torch_cuda="12.8", torch_gpu_error="CUDA driver too old"),
            "fail",
            "CUDA driver too old",
        ),
        (Devices(device_files=True, torch_cuda="12.8", driver_error="version mismatch"), "fail", "version mismatch"),
        (Devices(on_bus=1, driver_error="no library"), "warn", "none can be used"),
        (Devices(gpus=(H200,), hidden=True, torch_cuda="12.8"), "skip", "CUDA_VISIBLE_DEVICES"),
        (Devices(torch_gpus=1, torch_cuda="12.8", device_files=True), "pass", "1 x GPU"),
    ],
)
def test_a_gpu_that_torch_cannot_use(devices: Devices, level: str, words: str) -> None:
    finding = judge_gpu(devices)
    assert finding.level == level and words in finding.found
    assert bool(finding.advice) == (level in ("warn", "fail"))


@pytest.mark.parametrize(
    ("knows", "built", "level"),
    [((12, 8), "12.8", "pass"), ((13, 0), "12.8", "pass"), ((12, 4), "12.8", "warn"), ((11, 8), "12.8", "fail")],
)
def test_the_driver_must_know_torchs_cuda(knows: tuple[int, int], built: str, level: str) -> None:
    assert judge_cuda("550", knows, built).level == level
    assert judge_cuda(None, None, built).level == "skip"


@pytest.mark.parametrize(
    ("capability", "archs", "level"),
    [
        ((9, 0), ("sm_80", "sm_90"), "pass"),
        ((8, 9), ("sm_80", "sm_90"), "pass"),  # machine code of the same generation
        ((7, 0), ("sm_80", "sm_90"), "fail"),
        ((12, 0), ("sm_80", "sm_90"), "fail"),
        ((12, 0), ("sm_80", "compute_90"), "pass"),  # compiled at run time
        ((12, 0), ("sm_90a", "compute_90a"), "fail"),
        ((9, 0), ("sm_90a",), "pass"),
        ((12, 0), ("sm_100", "sm_120"), "pass"),
        ((9, 0), (), "skip"),
        ((9, 0), ("gfx90a", "sm_90"), "pass"),
    ],
)
def test_torch_must_have_code_for_the_gpu(capability: tuple[int, int], archs: tuple[str, ...], level: str) -> None:
    assert judge_build((Gpu("a GPU", 1, 0, capability),), archs).level == level


def test_memory_that_others_hold() -> None:
    finding = judge_memory((H200, Gpu("H200", 140 << 30, 90 << 30)))
    assert finding.level == "warn" and finding.found == "GPU 1: 90.0 GiB of 140.0 GiB taken"
    assert judge_memory((H200,)).found == "139.0 GiB free on each"


@pytest.mark.parametrize(
    ("gpu", "level", "words"),
    [
        (Gpu("a", 1, 0, ecc_errors=3), "fail", "3 uncorrected"),
        (Gpu("a", 1, 0, remap_failed=True), "fail", "could not be remapped"),
        (Gpu("a", 1, 0, slowed_by=("power brake",)), "warn", "power brake"),
        (Gpu("a", 1, 0, remap_pending=True), "warn", "wait to be remapped"),
        (Gpu("a", 1, 0), "pass", "ECC is off"),
        (Gpu("a", 1, 0, ecc_errors=0), "pass", "no ECC error"),
    ],
)
def test_health(gpu: Gpu, level: str, words: str) -> None:
    finding = judge_health((gpu,))
    assert finding.level == level and words in finding.found


def test_peers_and_nccl() -> None:
    assert judge_peers(1, ()).level == "skip"
    assert judge_peers(4, ()).level == "pass"
    assert judge_peers(4, ((0, 1), (2, 3))) == Finding(
        "gpu peers", "warn", "no direct access: 0-1, 2-3", judge_peers(2, ((0, 1),)).advice
    )
    assert judge_nccl(None).level == "fail" and judge_nccl("2.27.3").found == "2.27.3"


def test_imports_that_fail() -> None:
    assert judge_imports(Devices())[0].level == "pass"
    assert judge_imports("no answer within 90 s")[0].level == "fail"
    (finding,) = judge_imports(Devices(torch_error="OSError: libcudart", ray_error=""))
    assert finding.level == "fail" and "libcudart" in finding.found and "import torch" in finding.advice
    assert "import ray" in judge_imports(Devices(ray_error="ImportError: x"))[0].advice
    assert [f.level for f in judge_devices("hangs")] == ["skip"]
    assert [f.level for f in judge_devices(Devices(torch_error="x"))] == ["skip"]
