"""Dividing a model by FSDP2: block by block, each worker a part of every tensor."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from shoal.core.parts import copy_own_part
from shoal.models.blocks import repeated_blocks
from shoal.parallel.section import FsdpSection
from shoal.parallel.unit import StepSettings

_DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard_model(
    model: nn.Module, mesh: DeviceMesh, section: FsdpSection, settings: StepSettings, device: torch.device
) -> list[nn.Parameter]:
    """Divide every parameter over `mesh`, of one side or of two (copies, shards); on the device or on meta.

    Each repeated block is gathered by itself, and the rest of the model with the first. Returns the parameters that
    have no dimension to be divided along: every worker holds them, and somebody must sum their gradients.
    """
    kept = [parameter for parameter in model.parameters() if parameter.ndim == 0]
    precision = settings.precision if section.param_dtype == "auto" else section.param_dtype
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": section.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[precision], reduce_dtype=_DTYPES[section.reduce_dtype] or torch.float32
        ),
        "ignored_params": set(kept),
    }
    if section.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for block in _own_blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)
    return kept


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, if none of them shares a weight with what is outside of it: that must be gathered at once."""
    blocks = [block for _, block in repeated_blocks(model)]
    owners: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(number)
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(-1)
    shared = any(len(found) > 1 for found in owners.values())
    return [] if shared else blocks


def fill(model: nn.Module, initial: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Give a model on the meta device memory for its parts on `device`, and the weights; none of them is kept whole."""
    model.to_empty(device=device)
    own = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, whole in initial:
            copy_own_part(own.pop(name), {name: whole}, name)
    assert not own, f"no initial weights for {sorted(own)}"


@contextlib.contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Gradients stay on each worker, whole, until a backward pass outside of this."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
