"""The same training by Lightning, in its own way: a module, and a trainer that calls it."""

from typing import Any

import torch
from torch import nn

from shoal.bench.peers.step_setup import Setup, loss_function
from shoal.bench.step_turns import Turns

_PRECISION = {"bf16": "bf16-mixed", "fp16": "16-mixed"}


def train(setup: Setup, turns: Turns) -> None:
    """Train until there are no more turns."""
    try:
        import pytorch_lightning as lightning
    except ImportError:
        import lightning.pytorch as lightning
    recipe = setup.bench.recipe
    trainer = lightning.Trainer(
        accelerator="gpu" if setup.device.type == "cuda" else "cpu",
        devices=1,
        precision=_PRECISION.get(setup.precision, "32-true"),
        max_epochs=-1,
        accumulate_grad_batches=setup.accumulate,
        gradient_clip_val=recipe.train.clip_norm,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        benchmark=setup.device.type == "cuda" and not recipe.train.deterministic,
        deterministic=recipe.train.deterministic,
    )
    trainer.fit(make_module(lightning, setup, turns), setup.loader)


def make_module(lightning: Any, setup: Setup, turns: Turns) -> Any:
    """The module that the trainer takes."""
    version = lightning.__version__
    loss_of = loss_function(setup)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        """A model, its loss and its optimizer."""

        def __init__(self) -> None:
            super().__init__()
            self.model = setup.model
            self.loss_of = torch.compile(loss_of) if setup.compiles else loss_of
            self.seen: torch.Tensor | None = None

        def configure_optimizers(self) -> Any:
            optimizer = setup.optimizer()
            scheduler = setup.scheduler(optimizer)
            if scheduler is None:
                return optimizer
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def configure_gradient_clipping(
            self,
            optimizer: torch.optim.Optimizer,
            gradient_clip_val: float | None = None,
            gradient_clip_algorithm: str | None = None,
        ) -> None:
            # Lightning itself refuses fused optimizers here, whether or not there is a scale to take off.
            if gradient_clip_val is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), gradient_clip_val)

        def on_train_start(self) -> None:
            turns.begin(setup.seed, lightning=version)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.loss_of(setup.laid_out(batch))
            share = loss.detach() / setup.accumulate if setup.accumulate > 1 else loss.detach()
            self.seen = share if self.seen is None else self.seen + share
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if (batch_idx + 1) % setup.accumulate == 0:
                seen, self.seen = self.seen, None
                if not turns.after_step(seen, setup.samples(batch)):
                    self.trainer.should_stop = True

    return Module()
