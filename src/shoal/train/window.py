"""The loss between two reports."""

import torch

from shoal.core.objective import Count
from shoal.parallel.unit import StepLoss


class LossWindow:
    """Loss since the last report, added up on the device in double; reading it waits for the device."""

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self.total: torch.Tensor | float = total
        self.count: Count = count

    def add(self, loss: StepLoss) -> None:
        """Add a step's."""
        if not isinstance(self.total, torch.Tensor):
            self.total = torch.tensor(self.total, dtype=torch.float64, device=loss.terms[0][0].device)
        for value, weight in loss.terms:
            self.total.add_(value, alpha=weight)
        self.count = self.count + loss.count

    def read(self) -> tuple[float, int]:
        """Sum and count as plain numbers."""
        return float(self.total), int(self.count)
