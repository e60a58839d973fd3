"""What a contender says of itself before it trains: by this it shows whether all train the same on the same."""

import copy
import platform
from typing import Any

import numpy as np
import torch
import xxhash
from torch import nn

from shoal.bench.step import Bench
from shoal.core.machine import cpu_model
from shoal.core.move import move

_PEAKS = {
    "B200": 2250e12,
    "H200": 989.5e12,
    "H100 NVL": 835.5e12,
    "H100 PCIe": 756e12,
    "H100": 989.5e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Products and sums a second in bf16 or fp16, without sparsity, as NVIDIA says; the first name that fits counts."""

_COUNTED = 2
"""Samples that a step is counted on: every sample takes as much, and all of a batch may not fit without autocast."""


def facts_of(bench: Bench) -> dict[str, Any]:
    """Of the model with its first weights, and of the machine."""
    device = bench.process.device
    is_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_gpu else cpu_model(),
        "is_gpu": is_gpu,
        "threads": torch.get_num_threads(),
        "items": bench.objective.items,
        "parameters": sum(parameter.numel() for parameter in bench.model.parameters()),
        "weights": hash_weights(bench.model),
        "has_dropout": has_dropout(bench.model),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def hash_weights(model: nn.Module) -> str:
    """Of all parameters and buffers, by name."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def has_dropout(model: nn.Module) -> bool:
    """Whether the model draws random numbers in a step, as far as its modules tell."""
    return any(
        (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or _drops_inside(module)
        for module in model.modules()
    )


def _drops_inside(module: nn.Module) -> bool:
    """Models that hand a probability to a function instead."""
    inside = getattr(module, "dropout", 0.0)
    return isinstance(inside, float) and inside > 0


def flops_of_step(bench: Bench) -> float | None:
    """Products and sums of one training step, as its operators tell; None where some do not."""
    from torch.utils.flop_counter import FlopCounterMode

    if any(isinstance(module, nn.RNNBase) for module in bench.model.modules()):
        return None  # torch does not count those
    device = bench.process.device
    batch = min(_COUNTED, len(bench.dataset))
    model = copy.deepcopy(bench.model).to(device)
    data = move(bench.dataset.batch(np.arange(batch), 0), device)
    with FlopCounterMode(display=False) as counter:
        loss = bench.objective.loss(model, data)
        (loss[0] if isinstance(loss, tuple) else loss).backward()  # type: ignore[no-untyped-call]
    del model, data, loss
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return float(counter.get_total_flops()) / batch * bench.recipe.train.global_batch


def peak_flops(device: str, precision: str) -> float | None:
    """What a device of this name can do in this precision; None where that is not known."""
    if precision not in ("bf16", "fp16"):
        return None
    return next((peak for name, peak in _PEAKS.items() if name in device), None)
