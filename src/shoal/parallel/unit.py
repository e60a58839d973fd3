"""The seam between the loop and a strategy: one training step, and the state behind it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import nn

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.objective import Count, Measured
from shoal.core.parts import Held
from shoal.parallel.section import OptimSection

Lap = Callable[[str], None]


def untimed(phase: str) -> None:
    """The lap of a unit whose steps nobody times."""


@dataclass(frozen=True)
class StepSettings:
    """How a step computes; the same for every strategy."""

    optim: OptimSection
    precision: str = "fp32"
    compile: bool = False
    cuda_graphs: bool | Literal["auto"] = False
    """`auto`: where memory allows."""
    channels_last: bool = False
    fp8: bool = False
    clip_norm: float | None = None
    activation_checkpointing: bool = False
    global_batch: int = 1
    """Samples of the largest step that there will be, over all workers."""
    micro_batch: int = 1
    """Samples of the largest micro-batch."""


@dataclass(slots=True)
class StepLoss:
    """This worker's part of a step's loss, still on the device: terms to add up, each with its weight, and their count.

    Kept as terms, because whoever adds them up can weight and add in one operation. Where several workers compute the
    loss of the same samples, one of them has it and the others have none.
    """

    terms: list[tuple[torch.Tensor, int]]
    count: Count


@dataclass
class UnitState:
    """Everything a strategy must get back to go on: tensors by name, and small values that JSON can hold."""

    tensors: Mapping[str, Held]
    """A plain tensor is the same on every worker; a DTensor or a `FlatPart` is what this one holds of it. To load from,
    they are whole, and may be in a file still: take what is needed with `shoal.core.parts.copy_own_part`."""
    values: dict[str, Any] = field(default_factory=dict)
    of_first: frozenset[str] = frozenset()
    """Tensors that may differ between workers that hold the same weights; rank 0's are the ones that count."""


class TrainUnit(Protocol):
    """A model, its optimizer and the way a step runs. The loop knows nothing else of a strategy."""

    model: nn.Module
    """With the names that it has in one process; what of it is on another worker is on the meta device here."""
    device: torch.device
    data_rank: int
    """Which share of every step's samples this worker trains on; those that hold a copy of the model between them, but
    for the state that is divided by data, take the same one."""
    data_size: int
    """How many shares there are."""
    random_rank: int
    """The first of the workers that must draw the same random numbers as this one; itself where there are none."""
    lap: Lap
    """Told what has just been done, as a phase of a step; whoever times steps puts it here."""
    whole_every: int
    """Steps between two points at which all workers hold the same state: what may be saved or evaluated."""

    def forward_backward(self, step: StepBatch) -> StepLoss:
        """Gradients of the mean loss over the step's items, summed over its micro-batches."""
        ...

    def optimizer_step(self, lr: float) -> None:
        """Clip, update the weights, and clear the gradients."""
        ...

    def evaluate(self, batch: MicroBatch) -> Measured:
        """The task's metrics on one batch, without gradients; {} where another worker has those of the same samples."""
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

    def take_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Take over some weights, whole and each read when it is asked for, by their names; the others stay."""
        ...

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight as a whole, in the order of their names, one at a time. Every worker must go through all of
        them; rank 0 gets what is told."""
        ...
