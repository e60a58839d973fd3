"""The loss between two reports."""

import torch

from shoal.core.group import Group
from shoal.core.objective import Count
from shoal.parallel.unit import StepLoss


class LossWindow:
    """This worker's loss since the last report, added up on the device in double; reading it waits for the device."""

    def __init__(self, total: float = 0.0, count: int = 0) -> None:
        self.total: torch.Tensor | float = total
        self.count: Count = count

    def add(self, loss: StepLoss) -> None:
        """Add a step's."""
        if not isinstance(self.total, torch.Tensor) and loss.terms:
            self.total = torch.tensor(self.total, dtype=torch.float64, device=loss.terms[0][0].device)
        for value, weight in loss.terms:
            assert isinstance(self.total, torch.Tensor)
            self.total.add_(value, alpha=weight)
        self.count = self.count + loss.count

    def read(self) -> tuple[float, int]:
        """This worker's sum and count as plain numbers."""
        return float(self.total), int(self.count)

    def read_all(self, group: Group) -> tuple[float, int]:
        """Sum and count over all workers; every worker must ask."""
        total, count = group.sum(*self.read())
        return total, int(count)
