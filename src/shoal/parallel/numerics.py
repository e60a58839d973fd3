"""Precision, process-wide torch settings and recomputation: what a step's arithmetic depends on."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import UserError
from shoal.models.blocks import repeated_blocks

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """The context in which a model computes under `precision`."""
    if precision in _AUTOCAST:
        return torch.autocast(device.type, dtype=_AUTOCAST[precision])
    return contextlib.nullcontext()


def build_scaler(
    precision: str, device: torch.device, kind: type[torch.amp.GradScaler] = torch.amp.GradScaler
) -> torch.amp.GradScaler | None:
    """Dynamic loss scaling, which fp16 needs."""
    return kind(device.type) if precision == "fp16" else None


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse what the device cannot do, before anything is built."""
    if precision == "tf32" and device.type != "cuda":
        raise UserError("train.precision: tf32 needs an NVIDIA GPU and this worker has none; use fp32 or bf16")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise UserError("train.precision: this GPU has no bf16; use fp16 or fp32")


@contextlib.contextmanager
def torch_settings(
    *,
    precision: str = "fp32",
    deterministic: bool = False,
    threads: int | None = None,
    device: torch.device | None = None,
    gpu_memory_fraction: float | None = None,
    gpu_allocator: str | None = None,
) -> Iterator[None]:
    """Set what torch keeps per process, and put it back: other code in this process must not notice a run."""
    saved_threads = torch.get_num_threads()
    saved_matmul = torch.get_float32_matmul_precision()
    saved_deterministic = torch.are_deterministic_algorithms_enabled()
    saved_benchmark = torch.backends.cudnn.benchmark
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if deterministic:
        # cuBLAS reads this when it is first used in the process.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if device is not None and device.type == "cuda":
        if gpu_allocator is not None:
            _set_allocator(gpu_allocator)
        if gpu_memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(gpu_memory_fraction, device)
    try:
        yield
    finally:
        torch.set_num_threads(saved_threads)
        torch.set_float32_matmul_precision(saved_matmul)
        torch.use_deterministic_algorithms(saved_deterministic)
        torch.backends.cudnn.benchmark = saved_benchmark
        if device is not None and device.type == "cuda" and gpu_memory_fraction is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def _set_allocator(settings: str) -> None:
    # The newer name has been there since 2.9; the older one warns.
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)
    try:
        apply(settings)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cluster.gpu_allocator: PyTorch refuses {settings!r}: {str(error).splitlines()[0]}") from error


def recompute_activations(model: nn.Module) -> None:
    """Make each repeated block recompute its activations in the backward pass; names of parameters stay the same."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise UserError(
            "train.activation_checkpointing: this model has no repeated blocks to recompute; turn it off, "
            "or keep its blocks in one nn.ModuleList"
        )
    for _, block in blocks:
        norms = [module for module in block.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        options: dict[str, Any] = {"context_fn": partial(_recompute_contexts, norms)} if norms else {}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def _recompute_contexts(
    norms: list[nn.modules.batchnorm._BatchNorm],
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What surrounds the forward pass and its repetition: the repetition must not count the batch a second time."""
    return contextlib.nullcontext(), _without_statistics(norms)


@contextlib.contextmanager
def _without_statistics(norms: list[nn.modules.batchnorm._BatchNorm]) -> Iterator[None]:
    saved = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        for norm, (momentum, num_batches) in zip(norms, saved, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, num_batches
