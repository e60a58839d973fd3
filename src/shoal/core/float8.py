"""Tensors in 8-bit floats, which PyTorch has no arithmetic for but products: scaled into their range, and back."""

import torch


def pack(
    tensor: torch.Tensor, dtype: torch.dtype, every: int = 1, to_spare: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor in an 8-bit type, and by what to scale back.

    Args:
        tensor: Of any other type.
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        every: Of so many rows, one is looked at to find the scale; what is beyond the range then is cut off.
        to_spare: How much larger a value may be than any that was looked at.
    """
    most = torch.finfo(dtype).max
    scale = scale_for(tensor[::every], dtype, to_spare)
    return (tensor.float() * scale).clamp(-most, most).to(dtype), scale.reciprocal()


def scale_for(seen: torch.Tensor, dtype: torch.dtype, to_spare: float = 1.0) -> torch.Tensor:
    """By what to multiply, so that what was seen reaches the end of the type's range, or remains below by a factor."""
    return torch.finfo(dtype).max / to_spare / seen.abs().amax().float().clamp(min=1e-12)
