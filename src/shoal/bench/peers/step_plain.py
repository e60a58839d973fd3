"""A training loop by hand, as one writes it who knows PyTorch: fused optimizer, pinned memory, nothing waited for."""

import contextlib
from typing import Any

import torch
from torch import nn

from shoal.bench.peers.step_setup import Setup, loss_function
from shoal.bench.step_turns import Turns

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def train(setup: Setup, turns: Turns) -> None:
    """Train until there are no more turns."""
    model, device, clip_norm = setup.model, setup.device, setup.bench.recipe.train.clip_norm
    optimizer = setup.optimizer()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scaler = torch.amp.GradScaler(device.type) if setup.precision == "fp16" else None
    step_loss = _step_loss(setup)
    batches = iter(setup.loader)
    turns.begin(setup.seed)
    total = torch.zeros((), device=device)
    step, is_wanted = 0, True
    while is_wanted:
        for group in optimizer.param_groups:
            group["lr"] = setup.lr(step)
        seen = None
        for _ in range(setup.accumulate):
            batch = setup.on_device(next(batches))
            loss = step_loss(batch)
            if setup.accumulate > 1:
                loss = loss / setup.accumulate
            (scaler.scale(loss) if scaler else loss).backward()
            seen = loss.detach() if seen is None else seen + loss.detach()
        if clip_norm is not None:
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip_norm)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert seen is not None
        total += seen
        step += 1
        is_wanted = turns.after_step(seen, setup.samples(batch))


def _step_loss(setup: Setup) -> Any:
    """The loss of a batch under autocast; compiled as one function, where that is wanted."""
    loss_of = loss_function(setup)
    device, dtype = setup.device, _AUTOCAST.get(setup.precision)

    def forward(batch: Any) -> torch.Tensor:
        with contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype):
            return loss_of(batch)

    return torch.compile(forward) if setup.compiles else forward
