"""The optimizer of a recipe, and its state by parameter name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.parts import copy_own_part, shape_of
from shoal.parallel.section import OptimSection


def build_optimizer(model: nn.Module, section: OptimSection) -> torch.optim.Optimizer:
    """The optimizer over the parameters that train; norms and biases without decay unless asked for."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise UserError("model: has no parameter that trains; nothing would be learned")
    trained = [parameter for parameter in trained if not parameter.is_meta]  # those are another worker's
    if section.weight_decay and not section.decay_norms_and_biases:
        decayed = [parameter for parameter in trained if parameter.ndim >= 2]
        plain = [parameter for parameter in trained if parameter.ndim < 2]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]] or [{"params": []}]
    else:
        groups = [{"params": trained}]
    options: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay, "fused": _can_fuse(trained)}
    if section.name == "sgd":
        return torch.optim.SGD(groups, momentum=section.momentum or 0.0, nesterov=section.nesterov, **options)
    options["betas"] = tuple(section.betas or (0.9, 0.999))
    options["eps"] = section.eps or 1e-8
    kind = torch.optim.AdamW if section.name == "adamw" else torch.optim.Adam
    return kind(groups, **options)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """For the next update; into the memory where a recorded one looks for it, if there is any.

    There it is a single-precision number, so on a GPU it always is: a step is the same, recorded or not.
    """
    if optimizer.param_groups[0]["params"] and optimizer.param_groups[0]["params"][0].is_cuda:
        lr = float(np.float32(lr))
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def add_missing_momentum(optimizer: torch.optim.Optimizer) -> None:
    """For weights whose first gradient comes later than that of others: PyTorch's fused SGD takes all or none.

    A momentum of zeros is what the first step makes of none.
    """
    if not isinstance(optimizer, torch.optim.SGD) or not optimizer.state:
        return
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and "momentum_buffer" not in optimizer.state.get(parameter, {}):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)


def _can_fuse(parameters: list[nn.Parameter]) -> bool:
    return all(parameter.is_floating_point() and parameter.device.type in ("cpu", "cuda") for parameter in parameters)


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> dict[str, torch.Tensor]:
    """`NAME.exp_avg` and the like for every parameter that has state."""
    tensors: dict[str, torch.Tensor] = {}
    for parameter, values in optimizer.state.items():
        assert isinstance(parameter, nn.Parameter)
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{names[parameter]}.{key}"] = value
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    names: dict[nn.Parameter, str],
    tensors: Mapping[str, torch.Tensor],
    prefix: str = "",
) -> None:
    """Put back what `optimizer_tensors` took, whole under `prefix` and its names; torch decides device and type."""
    numbers = {
        parameter: number
        for number, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"])
    }
    by_name = {names[parameter]: number for parameter, number in numbers.items()}
    parameters = {names[parameter]: parameter for parameter in numbers}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for full_name in tensors:
        if full_name.startswith(prefix):
            name, _, key = full_name.removeprefix(prefix).rpartition(".")
            if name in by_name:  # what is not is another worker's
                state.setdefault(by_name[name], {})[key] = _laid_out_like(parameters[name], tensors, full_name)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _laid_out_like(parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A copy with the parameter's strides: fused optimizers walk both in memory order (channels-last weights, say).

    Of a parameter that is divided among workers, the same part.
    """
    if shape_of(tensors, name) != tuple(parameter.shape):
        return tensors[name].clone()
    moment = torch.empty_like(parameter, requires_grad=False)
    copy_own_part(moment, tensors, name)
    return moment
