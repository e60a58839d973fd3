"""The seam between the loop and a strategy: one training step, and the state behind it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.objective import Count, Measured
from shoal.parallel.section import OptimSection


@dataclass(frozen=True)
class StepSettings:
    """How a step computes; the same for every strategy."""

    optim: OptimSection
    precision: str = "fp32"
    compile: bool = False
    clip_norm: float | None = None
    activation_checkpointing: bool = False


@dataclass(slots=True)
class StepLoss:
    """This worker's part of a step's loss, still on the device: terms to add up, each with its weight, and their count.

    Kept as terms, because whoever adds them up can weight and add in one operation.
    """

    terms: list[tuple[torch.Tensor, int]]
    count: Count


@dataclass
class UnitState:
    """Everything a strategy must get back to go on: tensors by name, and small values that JSON can hold."""

    tensors: Mapping[str, torch.Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    of_first: frozenset[str] = frozenset()
    """Tensors that may differ between workers that hold the same weights; rank 0's are the ones that count."""


class TrainUnit(Protocol):
    """A model, its optimizer and the way a step runs. The loop knows nothing else of a strategy."""

    model: nn.Module
    device: torch.device
    whole_every: int
    """Steps between two points at which all workers hold the same state: what may be saved or evaluated."""

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the step's items, summed over its micro-batches."""
        ...

    def optimizer_step(self, lr: float) -> None:
        """Clip, update the weights, and clear the gradients."""
        ...

    def evaluate(self, batch: MicroBatch) -> Measured:
        """The task's metrics on one batch, without gradients."""
        ...

    def report(self) -> dict[str, float]:
        """What the strategy itself has to say at a report: gradient norm, loss scale."""
        ...

    def state(self) -> UnitState:
        """What `load` needs to go on from here; keyed by parameter name, the same under every strategy."""
        ...

    def load(self, state: UnitState) -> None:
        """Take over a state."""
        ...
