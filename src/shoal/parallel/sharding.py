"""Dividing a model by FSDP2: block by block, each worker a part of every tensor."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from shoal.core.errors import UserError
from shoal.core.parts import copy_own_part, is_distributed
from shoal.models.blocks import repeated_blocks
from shoal.parallel.section import FsdpSection
from shoal.parallel.unit import StepSettings

_DTYPES = {"fp32": None, "tf32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def shard_model(
    model: nn.Module, mesh: DeviceMesh, section: FsdpSection, settings: StepSettings, device: torch.device
) -> None:
    """Divide every parameter over `mesh`, of one side or of two (copies, shards); on the device or on meta.

    Each repeated block is gathered by itself, and the rest of the model with the first. All but `undivided` ones: every
    worker holds them, and somebody must sum their gradients.
    """
    types = {parameter.dtype: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if len(types) > 1:
        found = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for dtype, name in types.items())
        raise UserError(f"model: fsdp takes weights of one type, and {found}; convert them, or use strategy ddp")
    for parameter in model.parameters():
        if not is_distributed(parameter) and not parameter.is_contiguous():  # which FSDP does not take
            parameter.data = parameter.data.contiguous()
    precision = settings.precision if section.param_dtype == "auto" else section.param_dtype
    param_dtype, reduce_dtype = _DTYPES[precision], _DTYPES[section.reduce_dtype] or torch.float32
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": section.reshard_after_forward,
        "ignored_params": set(undivided(model)),
    }
    if section.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    if param_dtype is not None:
        whole_precision = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        for module in model.modules():
            # Whose weights must be of its statistics' type.
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                fully_shard(module, mp_policy=whole_precision, **options)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    for block in _own_blocks(model):
        if not isinstance(block, FSDPModule):  # a batch norm that is among them
            fully_shard(block, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)


def undivided(model: nn.Module) -> list[nn.Parameter]:
    """Parameters without a dimension to be divided along."""
    return [parameter for parameter in model.parameters() if parameter.ndim == 0]


def _own_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, without those that share a weight with another or the rest: these are gathered at once."""
    blocks = [block for _, block in repeated_blocks(model)]
    owners: dict[nn.Parameter, set[int]] = {}
    for number, block in enumerate(blocks):
        for parameter in block.parameters():
            owners.setdefault(parameter, set()).add(number)
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        if module not in inside:
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, set()).add(-1)
    shared = {number for parameter, found in owners.items() if parameter.ndim and len(found) > 1 for number in found}
    return [block for number, block in enumerate(blocks) if number not in shared]


def fill(model: nn.Module, initial: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Give a model on the meta device memory for its parts on `device`, and the weights; none of them is kept whole."""
    _give_memory(model, device)
    own = dict([*model.named_parameters(), *model.named_buffers()])
    with torch.no_grad():
        for name, whole in initial:
            copy_own_part(own.pop(name), {name: whole}, name)
            del whole  # or it would still be there while the next one is made
    assert not own, f"no initial weights for {sorted(own)}"


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """`to_empty` takes one place of a tensor after the other; what was the same in several is the same again."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    model.to_empty(device=device)
    for (first, name), *others in places.values():
        for held, other in others:
            held[other] = first[name]


@contextlib.contextmanager
def without_reduction(model: nn.Module) -> Iterator[None]:
    """Gradients stay on each worker, whole, until a backward pass outside of this."""
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
