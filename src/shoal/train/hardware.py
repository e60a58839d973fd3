"""What this worker computes on, as far as a recipe's defaults go by it."""

from dataclasses import asdict

import torch

from shoal.core.kernels import can_compile_kernels
from shoal.core.process import Process
from shoal.recipe.automatic import CPU, Hardware, with_numerics
from shoal.recipe.schema import Recipe


def hardware_of(device: torch.device) -> Hardware:
    """What `device` is and has."""
    if device.type != "cuda":
        return CPU
    has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0)  # before, it is emulated
    return Hardware(True, has_bf16, can_compile_kernels())


def for_workers(recipe: Recipe, process: Process) -> Recipe:
    """The recipe with its numerics as all workers can have them. Every worker must call this."""
    everybody = process.group.gather(asdict(hardware_of(process.device)))
    return with_numerics(recipe, Hardware.common([Hardware(**facts) for facts in everybody]))
