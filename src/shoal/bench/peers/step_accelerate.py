"""The same training by Accelerate, in its own way: a loop whose parts it has prepared."""

from typing import Any

import torch

from shoal.bench.peers.step_setup import Setup, loss_function
from shoal.bench.step_turns import Turns

_PRECISION = {"bf16": "bf16", "fp16": "fp16"}


def train(setup: Setup, turns: Turns) -> None:
    """Train until there are no more turns."""
    import accelerate
    from accelerate.utils import DataLoaderConfiguration

    recipe = setup.bench.recipe
    accelerator = accelerate.Accelerator(
        mixed_precision=_PRECISION.get(setup.precision, "no"),
        gradient_accumulation_steps=setup.accumulate,
        cpu=setup.device.type == "cpu",
        dataloader_config=DataLoaderConfiguration(non_blocking=True),
    )
    optimizer = setup.optimizer()
    scheduler = setup.scheduler(optimizer)
    model, optimizer, loader = accelerator.prepare(setup.model, optimizer, setup.loader)
    if scheduler is not None:
        scheduler = accelerator.prepare(scheduler)
    loss_of = loss_function(setup, model)
    step_loss: Any = torch.compile(loss_of) if setup.compiles else loss_of
    turns.begin(setup.seed, accelerate=accelerate.__version__)
    seen: torch.Tensor | None = None
    for batch in loader:
        with accelerator.accumulate(model):
            loss = step_loss(setup.laid_out(batch))
            accelerator.backward(loss)
            if accelerator.sync_gradients and recipe.train.clip_norm is not None:
                accelerator.clip_grad_norm_(model.parameters(), recipe.train.clip_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
        share = loss.detach() / setup.accumulate if setup.accumulate > 1 else loss.detach()
        seen = share if seen is None else seen + share
        if accelerator.sync_gradients:
            if not turns.after_step(seen, setup.samples(batch)):
                return
            seen = None
