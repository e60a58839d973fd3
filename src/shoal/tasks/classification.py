"""Classification of images or texts: cross-entropy and accuracy."""

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.objective import Measured
from shoal.tasks.section import Classification


class ClassificationTask:
    """A batch is (inputs, labels); the model gives one logit per class.

    Labels are classes, int64 [B], or class probabilities, [B, number of classes], as mixing samples makes them.
    """

    def __init__(self, section: Classification) -> None:
        self.label_smoothing = section.label_smoothing

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Mean cross-entropy over the batch."""
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels, label_smoothing=self.label_smoothing)

    def metrics(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Measured:
        """Plain cross-entropy and the share of right answers, from one forward pass.

        Of class probabilities the likeliest is the right answer.
        """
        inputs, labels = batch
        logits = model(inputs)
        classes = labels.argmax(dim=-1) if labels.is_floating_point() else labels
        correct = (logits.argmax(dim=-1) == classes).sum()
        return {
            "loss": (F.cross_entropy(logits.float(), labels, reduction="sum"), len(labels)),
            "accuracy": (correct, len(labels)),
        }
