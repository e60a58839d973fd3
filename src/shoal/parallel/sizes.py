"""The sizes that memory is computed from: of a model's pieces, of a step through them, and of what a worker holds."""

from dataclasses import dataclass

from shoal.parallel.degrees import Degrees
from shoal.parallel.section import ParallelSection

ROOT = -1
"""Stands for what of a model is in none of its repeated blocks."""
LOSS = -2
"""Stands for what a task computes outside of the model."""


PARTS = ("weights", "gradients", "optimizer", "activations", "buffers")
"""What the memory of a device is divided into."""


@dataclass(frozen=True)
class Weight:
    """One weight of a model, which is divided by its rows."""

    rows: int
    row_bytes: int
    is_trained: bool


@dataclass(frozen=True)
class Piece:
    """A repeated block of a model, or all that is in none of them; in bytes as the weights are kept."""

    name: str
    parameters: int
    weights: int
    trained: int
    """Of the weights, those that have gradients."""
    buffers: int
    largest: int = 0
    """The largest single weight."""
    low_rank: int = 0
    """Rows and columns of its matrices together: what a gradient of rank one would have."""
    each: tuple["Weight", ...] = ()
    """Those that can be divided."""


@dataclass(frozen=True)
class Phase:
    """A stretch of a step of one process: the forward or the backward pass of one piece. Bytes, without weights."""

    piece: int
    """Number of the block, ROOT or LOSS."""
    is_backward: bool
    peak: int
    """Most that lives at once: activations, what a kernel needs for a moment, and gradients that were made here."""
    peak_gradients: int
    """Of `peak`, gradients."""
    peak_apart: int
    """The same, where a gradient goes elsewhere as soon as it is made: added to one that is there, put in a bucket."""
    kept: int
    """What still lives at the end, without gradients."""
    gradients: tuple[tuple[int, int], ...] = ()
    """(piece, bytes) of gradients that were made here for the first time in the step."""

    @property
    def made(self) -> int:
        """Bytes of those gradients."""
        return sum(size for _, size in self.gradients)


@dataclass(frozen=True)
class Profile:
    """One micro-batch through a model in one process, and the model's pieces."""

    micro_batch: int
    pieces: tuple[Piece, ...]
    """The blocks in order, then the rest: ROOT is the last one's number too."""
    phases: tuple[Phase, ...]
    batch: int
    """Bytes of the micro-batch itself."""
    between: int
    """Bytes that go from one block to the next; the largest."""
    has_own_blocks: bool = True
    """Whether there are blocks, and none of them shares a weight with what is outside of it."""
    ends: tuple[Piece, Piece] | None = None
    """What the first and the last stage of a pipeline have beside their blocks; None where the model cannot be cut."""
    sent: int = 0
    """Bytes that a worker sends to those that share the layers with it."""

    @property
    def parameters(self) -> int:
        """Numbers that are learned or fixed, tied ones once."""
        return sum(piece.parameters for piece in self.pieces)

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(piece.weights for piece in self.pieces)

    @property
    def trained(self) -> int:
        """Bytes of the weights that have gradients, and so of all gradients."""
        return sum(piece.trained for piece in self.pieces)

    @property
    def buffers(self) -> int:
        """Bytes of what is neither weight nor gradient: running statistics."""
        return sum(piece.buffers for piece in self.pieces)


@dataclass(frozen=True)
class Way:
    """How a step is carried out."""

    parallel: ParallelSection
    strategy: str
    """Never `auto`."""
    degrees: Degrees
    micro_batches: int
    """Of a step, on each worker."""
    moments: int
    """Numbers that the optimizer keeps for each weight: 2 for adam, 1 for sgd with momentum, else 0."""
    precision: str
    on_gpu: bool


@dataclass(frozen=True)
class Memory:
    """Bytes on a worker at one moment."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0
    """What a worker needs to talk to others, weights gathered for a moment, and the model's own buffers."""
    host: int = 0
    """Kept in the host's memory instead of the device's; no part of the total."""
    when: str = ""
    """Which moment it is."""

    @property
    def total(self) -> int:
        """On the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def phase_words(profile: Profile, phase: Phase) -> str:
    """`backward pass of blocks.3`"""
    if phase.piece == LOSS:
        name = "the loss"
    elif phase.piece == ROOT:
        name = "what surrounds the blocks" if len(profile.pieces) > 1 else "the model"
    else:
        name = profile.pieces[phase.piece].name
    return f"{'backward' if phase.is_backward else 'forward'} pass of {name}"


def step_batches(profile: Profile, way: Way) -> int:
    """Bytes of the micro-batches that a worker holds: on the CPU all of a step, on a GPU the present and the next."""
    return profile.batch * (min(way.micro_batches, 2) if way.on_gpu else way.micro_batches)
