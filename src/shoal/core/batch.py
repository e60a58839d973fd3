"""What one optimizer step consumes, as it goes from the loader to the strategy."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class MicroBatch:
    """What one worker computes at once."""

    data: Any
    num_samples: int
    count: int | None = None
    """What the task counts in it, where that was counted while the data was still on the host."""


@dataclass(slots=True)
class StepBatch:
    """This worker's share of one optimizer step."""

    microbatches: list[MicroBatch]
    num_samples: int
    """Samples of the whole step, over all workers: what gradients are scaled by."""
