"""The full weights of a model by name, and the one hash that says whether two models are the same."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from shoal.core.parts import copy_own_part


def named_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name; a tensor with several names (tied weights) once, by its first."""
    seen: set[int] = set()
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            weights[name] = tensor.detach()
    return weights


def take_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy whole tensors into a model, by name: of one that is divided, what is here of it."""
    own = named_weights(model)
    for name in weights:
        if own[name].device.type != "meta":  # what is there is on another worker
            copy_own_part(own[name], weights, name)


def weights_sha256(weights: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """SHA-256 over name, type, shape and bytes of every tensor, in the order of the names; pairs come in that order."""
    digest = hashlib.sha256()
    for name, whole in sorted(weights.items()) if isinstance(weights, Mapping) else weights:
        tensor = whole.detach().cpu().contiguous()
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
