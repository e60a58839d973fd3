"""Judging GPUs, driver, CUDA and NCCL."""

import re

from shoal.deploy.doctor.devices import Devices, Gpu
from shoal.deploy.doctor.finding import Finding, in_bytes, in_list, passed, skipped

USED_SHARE = 0.1
"""More of a GPU's memory than this, taken before a run starts, is missing there."""
_TORCH = "install a torch with CUDA that the driver knows; the selector at pytorch.org tells the command"
CHECKS = ("gpu", "cuda", "gpu build", "gpu memory", "gpu health", "gpu peers", "nccl")


def judge_imports(devices: Devices | str) -> list[Finding]:
    """Of torch and Ray, where they fail: that they are installed is another check's."""
    if isinstance(devices, str):
        advice = "try python -c 'import torch', and nvidia-smi where there is a GPU"
        return [Finding("imports", "fail", devices, advice)]
    wrong = [words for words in (devices.torch_error, devices.ray_error) if words]
    if wrong:
        name = "torch" if devices.torch_error else "ray"
        advice = f"try python -c 'import {name}'; a mix of builds is mended by installing {name} anew"
        return [Finding("imports", "fail", "; ".join(wrong), advice)]
    return [passed("imports", "torch and ray")]


def judge_devices(devices: Devices | str) -> list[Finding]:
    """All that there is to say of GPUs; one line where there are none."""
    if isinstance(devices, str) or devices.torch_error:
        return [skipped("gpu", "torch could not be looked at")]
    gpu = judge_gpu(devices)
    if not devices.gpus or gpu.level == "skip":
        return [gpu]
    return [
        gpu,
        judge_cuda(devices.driver, devices.driver_cuda, devices.torch_cuda),
        judge_build(devices.gpus, devices.torch_archs),
        judge_memory(devices.gpus),
        judge_health(devices.gpus),
        judge_peers(len(devices.gpus), devices.without_peer),
        judge_nccl(devices.nccl),
    ]


def judge_gpu(devices: Devices) -> Finding:
    """Whether torch can use what is in the machine."""
    if devices.hidden and (devices.gpus or devices.device_files):
        return skipped("gpu", "CUDA_VISIBLE_DEVICES hides the GPUs of this machine")
    if devices.torch_gpus:
        names = {gpu.name for gpu in devices.gpus} or {"GPU"}
        return passed("gpu", f"torch uses {devices.torch_gpus} x {' and '.join(sorted(names))}")
    there = len(devices.gpus)
    if there or devices.device_files:
        found = f"{there or 'some'} here, and torch uses none"
        if there and devices.torch_cuda is None:
            return Finding("gpu", "fail", f"{found}: this torch is built without CUDA", _TORCH)
        why = devices.torch_gpu_error or devices.driver_error or "it does not say why"
        return Finding("gpu", "fail", f"{found}: {why}", "look at nvidia-smi; driver and torch's CUDA must go together")
    if devices.on_bus:
        found = f"{devices.on_bus} of NVIDIA on the bus, and none can be used ({devices.driver_error})"
        advice = "install NVIDIA's driver; in a container, hand the GPUs over: --gpus all, or nvidia.com/gpu in limits"
        return Finding("gpu", "warn", found, advice)
    return skipped("gpu", "no GPU here")


def judge_cuda(driver: str | None, knows: tuple[int, int] | None, built: str | None) -> Finding:
    """Whether the driver is new enough for the CUDA that torch was built with."""
    if driver is None or knows is None or built is None:
        return skipped("cuda", f"driver {driver or 'unknown'}, torch's CUDA {built or 'none'}")
    needs = tuple(int(part) for part in built.split(".")[:2])
    found = f"driver {driver} for CUDA up to {knows[0]}.{knows[1]}, torch built with {built}"
    if knows[0] < needs[0]:
        advice = f"install a driver for CUDA {built}, or a torch built with CUDA {knows[0]}"
        return Finding("cuda", "fail", found, advice)
    if knows < needs:
        return Finding("cuda", "warn", found, f"a driver for CUDA {built} lets torch use all that it was built with")
    return passed("cuda", found)


def judge_build(gpus: tuple[Gpu, ...], archs: tuple[str, ...]) -> Finding:
    """Whether torch has code for these GPUs."""
    capabilities = sorted({gpu.capability for gpu in gpus if gpu.capability is not None})
    if not archs or not capabilities:
        return skipped("gpu build", "torch does not say what it was built for")
    without = [f"{major}.{minor}" for major, minor in capabilities if not _has_code((major, minor), archs)]
    of = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    if without:
        found = f"capability {', '.join(without)} is none of torch's: {' '.join(archs)}"
        return Finding("gpu build", "fail", found, "install a torch built for these GPUs: an older or a newer one")
    return passed("gpu build", f"torch has code for capability {of}")


def _has_code(capability: tuple[int, int], archs: tuple[str, ...]) -> bool:
    for arch in archs:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if not found:
            continue
        built = (int(found[2]), int(found[3]))
        if found[4] == "a" and built != capability:
            continue
        # Machine code runs on later ones of the same generation; what is compiled at run time, on all later ones.
        if built <= capability and (found[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def judge_memory(gpus: tuple[Gpu, ...]) -> Finding:
    """Whether others have taken GPU memory."""
    taken = [
        f"GPU {index}: {in_bytes(gpu.used_bytes)} of {in_bytes(gpu.memory_bytes)} taken"
        for index, gpu in enumerate(gpus)
        if gpu.used_bytes > USED_SHARE * gpu.memory_bytes
    ]
    if taken:
        advice = "see nvidia-smi for whose it is; a run that shares a GPU can be told so: cluster.gpu_memory_fraction"
        return Finding("gpu memory", "warn", in_list(taken), advice)
    return passed("gpu memory", f"{in_bytes(min(gpu.memory_bytes - gpu.used_bytes for gpu in gpus))} free on each")


def judge_health(gpus: tuple[Gpu, ...]) -> Finding:
    """Memory errors, and clocks that are held down."""
    broken = [f"GPU {index}: rows could not be remapped" for index, gpu in enumerate(gpus) if gpu.remap_failed]
    broken += [
        f"GPU {index}: {gpu.ecc_errors} uncorrected ECC errors" for index, gpu in enumerate(gpus) if gpu.ecc_errors
    ]
    if broken:
        advice = "drain the machine and reset the GPU (nvidia-smi --gpu-reset), or replace it; results may be wrong"
        return Finding("gpu health", "fail", in_list(broken), advice)
    slowed = [
        f"GPU {index}: slowed by {' and '.join(gpu.slowed_by)}" for index, gpu in enumerate(gpus) if gpu.slowed_by
    ]
    if slowed:
        return Finding("gpu health", "warn", in_list(slowed), "look at nvidia-smi -q -d PERFORMANCE, fans and power")
    pending = [f"GPU {index}: rows wait to be remapped" for index, gpu in enumerate(gpus) if gpu.remap_pending]
    if pending:
        return Finding(
            "gpu health", "warn", in_list(pending), "reset the GPU when nothing runs: nvidia-smi --gpu-reset"
        )
    counts = any(gpu.ecc_errors is not None for gpu in gpus)
    return passed("gpu health", "no ECC error, not slowed down" if counts else "not slowed down; ECC is off")


def judge_peers(count: int, without: tuple[tuple[int, int], ...]) -> Finding:
    """Whether GPUs reach each other's memory."""
    if count < 2:
        return skipped("gpu peers", "one GPU")
    if without:
        pairs = in_list(f"{one}-{other}" for one, other in without)
        advice = "NCCL goes through the host's memory there; see nvidia-smi topo -m, and turn ACS off in the BIOS"
        return Finding("gpu peers", "warn", f"no direct access: {pairs}", advice)
    return passed("gpu peers", f"all {count} GPUs reach each other's memory")


def judge_nccl(version: str | None) -> Finding:
    """Whether torch has NCCL."""
    if version is None:
        return Finding("nccl", "fail", "this torch has none", _TORCH)
    return passed("nccl", version)
