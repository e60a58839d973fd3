"""Language modelling: the next token, by cross-entropy over every token."""

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.objective import Count, Measured
from shoal.tasks.section import LanguageModelling


class LanguageModellingTask:
    """A batch is (tokens, next tokens); targets of -100 are not counted."""

    items = "tokens"

    def __init__(self, section: LanguageModelling) -> None:
        self.label_smoothing = section.label_smoothing

    def count(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Count:
        """Targets that count."""
        return (batch[1] != -100).sum()

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, Count]:
        """Cross-entropy summed over the targets, and their number."""
        inputs, targets = batch
        if self.label_smoothing == 0 and getattr(model, "sums_loss", False):
            return model(inputs, targets), self.count(batch)
        logits = model(inputs)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum", label_smoothing=self.label_smoothing
        )
        return loss, self.count(batch)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Measured:
        """Plain cross-entropy; perplexity follows from it."""
        inputs, targets = batch
        if getattr(model, "sums_loss", False):
            return {"loss": (model(inputs, targets), self.count(batch))}
        logits = model(inputs)
        return {
            "loss": (
                F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"),
                self.count(batch),
            )
        }
