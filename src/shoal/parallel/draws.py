"""Random numbers where workers share a layer: the same for what all of them compute, others for each one's part."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shoal.core.rng import derive_seed


def draw_apart(module: nn.Module, rank: int) -> None:
    """Have what draws inside of `module` (as nn.Dropout, with a share `p`) draw other numbers on each worker.

    The generators themselves stay the same on all of them, who must have been seeded alike.
    """
    for part in module.modules():
        if getattr(part, "p", 0.0):
            part.forward = partial(_apart, part, part.forward, rank)


# Compiled, it would draw where the compiler pleases.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _apart(module: nn.Module, forward: Callable[..., torch.Tensor], rank: int, *inputs: torch.Tensor) -> Any:
    if not module.training:
        return forward(*inputs)
    # Drawn, rather than kept somewhere: recomputed activations and resumed runs come to the same seed by themselves.
    drawn = int(torch.randint(2**62, (), device="cpu"))
    generator = _generator(inputs[0].device)
    saved = generator.get_state()
    generator.manual_seed(derive_seed(drawn, rank) >> 1)
    try:
        return forward(*inputs)
    finally:
        generator.set_state(saved)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator
