"""What a worker computes in a step and what of its model crosses the network: values that a simulation begins with."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOT = -1
"""Stands for what of a model is in none of its blocks."""
_RATIO = 2
"""PowerSGD leaves alone what it would not make smaller by more than this."""


@dataclass(frozen=True)
class Weight:
    """One trained parameter."""

    block: int
    """Number of the block that it is in, or ROOT."""
    rows: int
    columns: int
    """All other dimensions together; a vector has one."""

    @property
    def numel(self) -> int:
        """How many numbers."""
        return self.rows * self.columns

    def low_rank(self, rank: int) -> tuple[int, int] | None:
        """Numbers in the two factors that PowerSGD sends in its place; None where it sends the gradient itself."""
        rank = min(self.rows, self.columns, rank)
        if (self.rows + self.columns) * rank * _RATIO >= self.numel:
            return None
        return self.rows * rank, self.columns * rank


@dataclass(frozen=True)
class Phases:
    """Seconds of a step of one worker that sends nothing."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s

    @classmethod
    def of(cls, values: Iterable[float]) -> "Phases":
        """From three numbers."""
        forward, backward, optimizer = values
        return cls(forward, backward, optimizer)


@dataclass(frozen=True)
class Shape:
    """A model, and which shares of a pass its parts take."""

    weights: tuple[Weight, ...]
    """As the model registers them."""
    forward: tuple[float, ...]
    """Shares of the forward pass: before the first block, every block, after the last."""
    backward: tuple[float, ...]
    """Of the backward pass, in the same order, which is not the one in which they come."""
    ready: tuple[float, ...]
    """For every weight, the share of the backward pass that is over when its gradient is there."""
    buffers: int = 0
    """Bytes that the first worker sends to all others at the beginning of a step."""

    @property
    def num_blocks(self) -> int:
        """Blocks that FSDP gathers by themselves."""
        return len(self.forward) - 2

    @property
    def numel(self) -> int:
        """Trained numbers."""
        return sum(weight.numel for weight in self.weights)

    def numel_of(self, block: int) -> int:
        """Trained numbers in a block, or in the rest."""
        return sum(weight.numel for weight in self.weights if weight.block == block)


@dataclass(frozen=True)
class Bucket:
    """Gradients that DistributedDataParallel sends together."""

    weights: tuple[Weight, ...]
    ready: float
    """Share of the backward pass after which all of them, and of the buckets before it, are there."""

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return sum(weight.numel for weight in self.weights)


def buckets(shape: Shape, limit_bytes: float, element: int = 4) -> list[Bucket]:
    """Gradients as they are put into buckets: from the last weight on, a bucket is full when it reaches the limit.

    Shoal says how large a bucket is, so that PyTorch takes no smaller one for the first.
    """
    found: list[Bucket] = []
    waiting: list[Weight] = []
    ready = 0.0
    for weight, its_share in reversed(list(zip(shape.weights, shape.ready, strict=True))):
        waiting.append(weight)
        ready = max(ready, its_share)
        if element * sum(each.numel for each in waiting) >= limit_bytes:
            found.append(Bucket(tuple(waiting), ready))
            waiting = []
    return [*found, Bucket(tuple(waiting), ready)] if waiting else found


def from_record(record: Mapping[str, Any]) -> Shape:
    """The shape that a worker has measured: the backward pass of a block is over when its last gradient is there."""
    weights = tuple(Weight(*numbers) for numbers in record["weights"])
    ready, whole = tuple(record["ready"]), sum(record["forward"])
    forward = tuple(share / whole for share in record["forward"])  # medians, which need not add up to 1
    ends: list[float] = []
    for block in reversed(range(len(forward) - 2)):
        own = [share for weight, share in zip(weights, ready, strict=True) if weight.block == block]
        ends.append(max([*own, *ends[-1:]], default=0.0))
    first = ends[0] if ends else 1.0
    # What is ready before the last block has ended lies behind it.
    own = [share for weight, share in zip(weights, ready, strict=True) if weight.block == ROOT and share < first]
    head = max(own, default=0.0) if ends else 0.0
    points = [0.0, head, *(max(head, end) for end in ends), 1.0]
    backward = [later - sooner for sooner, later in itertools.pairwise(points)]
    return Shape(weights, forward, tuple(reversed(backward)), ready, int(record["buffers"]))


def by_weights(weights: Sequence[Weight], flops: Sequence[float] | None = None, buffers: int = 0) -> Shape:
    """A shape whose parts take as long as their flops say, or where these are not known their weights; a gradient is
    there when its part's share of the backward pass is over.

    `flops`: before the first block, of every block, after the last.
    """
    count = 1 + max((weight.block for weight in weights), default=ROOT)
    if flops is None or not sum(flops):
        sizes = [sum(weight.numel for weight in weights if weight.block == block) for block in range(count)]
        flops = [0.0, *sizes, sum(weight.numel for weight in weights if weight.block == ROOT)]
    shares = tuple(flop / sum(flops) for flop in flops)
    return Shape(tuple(weights), shares, shares, _ready(weights, shares), buffers)


def _ready(weights: Sequence[Weight], shares: Sequence[float]) -> tuple[float, ...]:
    """Of those outside of the blocks, the ones that are registered after a block are taken for used after it."""
    last_block = max((index for index, weight in enumerate(weights) if weight.block != ROOT), default=-1)
    ready = []
    for index, weight in enumerate(weights):
        if weight.block != ROOT:
            ready.append(sum(shares[weight.block + 1 :]))
        elif index > last_block >= 0:
            ready.append(shares[-1])
        else:
            ready.append(1.0)
    return tuple(min(1.0, share) for share in ready)
