"""One gradient norm over a model that is divided among workers, and one loss scale."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import OptState

from shoal.core.parts import is_distributed


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """What this worker holds of a parameter's gradient; not a copy."""
    gradient = parameter.grad
    return gradient.to_local() if is_distributed(gradient) else gradient


def num_holders(tensor: torch.Tensor, world_size: int) -> int:
    """How many workers hold what this one holds of a tensor: all of a plain one, fewer of a DTensor."""
    if not is_distributed(tensor):
        return world_size
    from torch.distributed.tensor import Replicate

    mesh = tensor.device_mesh
    sides = [mesh.size(side) for side, placed in enumerate(tensor.placements) if not isinstance(placed, Replicate)]
    holders = world_size
    for size in sides:
        holders //= size
    return holders


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float, holders: Callable[[nn.Parameter], int]
) -> torch.Tensor:
    """Scale the gradients down to `max_norm`, the norm of the whole model's gradient; returns what it was.

    Every worker must call this; each element counts once, however many of them hold it.
    """
    local: list[torch.Tensor] = []
    weights: list[float] = []
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            local.append(gradient.to_local() if is_distributed(gradient) else gradient)
            weights.append(1.0 / holders(parameter))
    device = local[0].device if local else torch.device("cpu")
    # In double: what is added up over millions of elements and many workers keeps its last digits.
    total = torch.zeros((), dtype=torch.float64, device=device)
    if local:
        squares = torch.stack([norm.to(device, torch.float64) for norm in _norms(local)]).square()
        total = (squares * torch.tensor(weights, dtype=torch.float64, device=device)).sum()
    total = _over_workers(total, dist.ReduceOp.SUM)
    norm = total.sqrt().to(torch.float32)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for where in {gradient.device for gradient in local}:  # of offloaded ones two
        torch._foreach_mul_([gradient for gradient in local if gradient.device == where], factor.to(where))
    return norm


def _norms(gradients: list[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Of each one, in single precision at least."""
    doubles = any(gradient.dtype == torch.float64 for gradient in gradients)
    norms: Sequence[torch.Tensor] = torch._foreach_norm(
        gradients, 2.0, dtype=torch.float64 if doubles else torch.float32
    )
    return norms


def _over_workers(value: torch.Tensor, operation: Any) -> torch.Tensor:
    """Reduced over all workers, on the device that their backend takes."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    where = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    sent = value.to(where)
    dist.all_reduce(sent, op=operation)
    return sent.to(value.device)


class SharedScaler(torch.amp.GradScaler):
    """Loss scaling where each worker sees only its part of the gradients: what overflows on one counts on all."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide by the scale, and tell the others whether there was an infinity."""
        super().unscale_(optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        # Once, however many devices this one has gradients on: others may have fewer.
        anywhere = _over_workers(torch.stack([value.cpu() for value in found.values()]).max(), dist.ReduceOp.MAX)
        for device in found:
            found[device] = anywhere.to(device, copy=True)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step, unless there was an infinity anywhere; asked here, because fused optimizers cannot ask a DTensor."""
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not any(float(found) for found in state["found_inf_per_device"].values()):
            optimizer.step(*args, **kwargs)
        state["stage"] = OptState.STEPPED
        return None

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """As its parent does it, on the parts that are here."""
        groups: dict[torch.device, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    local = gradient.to_local() if is_distributed(gradient) else gradient
                    groups.setdefault(local.device, []).append(local)
        # One that has no gradient must have something to tell too.
        found: dict[torch.device, torch.Tensor] = {found_inf.device: found_inf} if not groups else {}
        for device, gradients in groups.items():
            found[device] = found_inf.to(device, copy=True)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], inv_scale.to(device))
        return found
