"""What kernels keep for the backward pass and take while they run, on the CPU and, without one, on a GPU."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten

_SOFTMAXES = frozenset(
    [F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.Tensor.softmax, torch.Tensor.log_softmax]
)
_IN_FULL = frozenset(
    [
        *(F.layer_norm, F.group_norm, F.cosine_similarity, F.cross_entropy, F.nll_loss, F.kl_div, F.mse_loss),
        *(F.l1_loss, F.smooth_l1_loss, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss),
        *(torch.exp, torch.log, torch.pow, torch.rsqrt, torch.cumsum, torch.logsumexp),
        *(torch.Tensor.exp, torch.Tensor.log, torch.Tensor.pow, torch.Tensor.rsqrt, torch.Tensor.cumsum),
    ]
)
"""What autocast computes in fp32 on a GPU, and in whatever comes on the CPU; softmaxes in one kernel."""

_HALF = (torch.bfloat16, torch.float16)
_ATTENTION_BACKWARD = (
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
)
_ATTENTION_ROWS = 128
"""Flash attention works on so many rows at once, and rounds up."""


def workspace_on_cpu(operation: Any, arguments: tuple[Any, ...], result: Any) -> int:
    """Convolutions copy what they read and write into a layout of their own; others work piece by piece."""
    if operation is aten.convolution.default:
        return _num_bytes(arguments[0], arguments[1], result)
    if operation is aten.convolution_backward.default:
        return _num_bytes(*arguments[:3])
    return 0


def workspace_on_gpu(operation: Any, arguments: tuple[Any, ...], result: Any) -> int:
    """Bytes beside arguments and results."""
    if operation in _ATTENTION_BACKWARD:
        query = arguments[1]
        batch, heads, length, width = query.shape
        rounded = -(-length // _ATTENTION_ROWS) * _ATTENTION_ROWS
        return int(4 * batch * heads * rounded * (width + 1))  # the query's gradient in fp32, and a number a row
    return 0


def _num_bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class AsOnGpu(TorchFunctionMode):
    """Replaces the functions that keep something else for the backward pass on a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As the CPU does it, but for a few."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if torch.is_autocast_enabled("cpu"):
            if func in _SOFTMAXES and args and args[0].dtype in _HALF:
                return _ToFull.apply(args[0])  # type: ignore[no-untyped-call]
            if func is F.cross_entropy and (loss := _cross_entropy(*args, **kwargs)) is not None:
                return loss
            if func in _IN_FULL:
                args, kwargs = tree_map(_in_full, (args, kwargs))
        return func(*args, **kwargs)


class _ToFull(torch.autograd.Function):
    """Sizes of a softmax that takes half precision and gives full, and of its backward pass; no numbers."""

    @staticmethod
    def forward(context: Any, half: torch.Tensor) -> torch.Tensor:
        full = torch.empty_like(half, dtype=torch.float32)
        context.save_for_backward(full)
        context.dtype = half.dtype
        return full

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(gradient, dtype=context.dtype)


def _cross_entropy(
    input: torch.Tensor,  # noqa: A002 - its name
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """Of half precision and class numbers: a softmax and what follows; None where it is as on the CPU."""
    if input.dtype not in _HALF or input.ndim < 2 or target.is_floating_point():
        return None
    logs: torch.Tensor = _ToFull.apply(input)  # type: ignore[no-untyped-call]
    loss = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    if label_smoothing:
        spread = logs.sum(1)
        loss = loss - label_smoothing * (spread if reduction == "none" else spread.sum())
    return loss


def _in_full(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:  # noqa: A002 - its name
    """A mask of a byte an element, where the CPU keeps numbers."""
    if not training or p in (0.0, 1.0):
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The fused kernels of a GPU, which never hold the attention weights: flash in half precision, else efficient."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (tensor.to(torch.get_autocast_dtype("cpu")) for tensor in (query, key, value))
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(groups, dim=-3) for tensor in (key, value))
    options = {"scale": scale}
    if query.dtype in _HALF and attn_mask is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        result: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, **options)[0]
        return result
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    result = efficient(query, key, value, attn_mask, True, dropout_p, is_causal, **options)[0]
    return result
