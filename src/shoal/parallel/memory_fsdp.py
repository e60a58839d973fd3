"""The memory of a step under FSDP2, moment by moment: what is gathered, computed and sent while another block waits."""

from collections.abc import Iterator
from dataclasses import replace

from shoal.parallel.section import FsdpSection
from shoal.parallel.sizes import LOSS, ROOT, Memory, Phase, Piece, Profile, Way, phase_words, step_batches

RATIO = {"fp32": 1.0, "tf32": 1.0, "bf16": 0.5, "fp16": 0.5}
"""Bytes of a number over those of one in full precision."""


def gathered_as(section: FsdpSection, precision: str) -> str:
    """What weights are gathered in."""
    return precision if section.param_dtype == "auto" else section.param_dtype


def fsdp_moments(profile: Profile, way: Way) -> Iterator[Memory]:
    """What a worker holds, from the first gathering to the optimizer's step."""
    walk = _Walk(profile, way)
    for phase in profile.phases:
        yield from walk.backward(phase) if phase.is_backward else walk.forward(phase)
    yield from walk.end()


class _Walk:
    """Goes through a step as PyTorch does it.

    In the forward pass the buffer that a block was gathered into stays until the next one's is there. In the backward
    pass the next block is gathered before one is computed, and what a block's gradients are sent from stays until the
    next one's are sent.
    """

    def __init__(self, profile: Profile, way: Way) -> None:
        section = way.parallel.fsdp
        self.profile = profile
        self.section = section
        self.gathered = RATIO[gathered_as(section, way.precision)]
        self.reduced = RATIO[section.reduce_dtype]
        self.shards = way.degrees.shards
        self.copies_more = 0 if way.on_gpu or self.shards == 1 else 1
        """Gloo gathers into a buffer of its own, and sums in one."""
        self.sums_later = not section.reduce_every_micro_batch and way.micro_batches > 1
        own, trained = self._part(profile.weights), self._part(profile.trained)
        self.held = Memory(
            weights=own,
            gradients=trained if way.micro_batches > 1 and not self.sums_later else 0,
            optimizer=way.moments * trained,
            activations=step_batches(profile, way),
            buffers=profile.buffers,
        )
        if self.sums_later:
            self.held = replace(self.held, gradients=int(profile.trained * self.reduced))
        self.adds_up = self.held.gradients > 0
        self.offloads = section.cpu_offload and way.on_gpu
        if self.offloads:
            # A micro-batch's gradients come beside the sum of those before: `HostSums`.
            copies = 2 if way.micro_batches > 1 and not self.sums_later else 1
            host = self._pinned() + copies * self._pinned(of_gradients=True) + way.moments * trained
            gradients = self.held.gradients if self.sums_later else 0
            self.held = replace(self.held, weights=0, gradients=gradients, optimizer=0, host=host)
        self.open: dict[int, int] = {}
        """Pieces that are gathered, in bytes."""
        self.waiting = 0
        """The buffer of the piece that was gathered last, or that is gathered for later."""
        self.sending = 0
        self.of_root = 0
        """Gradients of the rest of the model, which are whole until the end."""
        self.alive = 0
        self.is_backward = False

    def _part(self, size: int) -> int:
        return -(-size // self.shards)

    def _pinned(self, of_gradients: bool = False) -> int:
        """Bytes of pinned memory for the weights, or their gradients: PyTorch takes a power of two for each."""
        each = [one for piece in self.profile.pieces for one in piece.each if one.is_trained or not of_gradients]
        sizes = [self._part(one.rows) * one.row_bytes for one in each]
        return sum(1 << (size - 1).bit_length() for size in sizes if size)

    def _piece(self, number: int) -> int:
        """All of a model is one piece where its blocks cannot be gathered by themselves."""
        return number if self.profile.has_own_blocks else ROOT

    def _pieces(self, number: int) -> tuple[Piece, ...]:
        return (self.profile.pieces[number],) if self.profile.has_own_blocks else self.profile.pieces

    def _size(self, number: int) -> int:
        return int(sum(piece.weights for piece in self._pieces(number)) * self.gathered)

    def _moment(self, activations: int, gradients: int, buffers: int, when: str) -> Memory:
        held = self.held
        return replace(
            held,
            gradients=held.gradients + gradients,
            activations=held.activations + activations,
            buffers=held.buffers + sum(self.open.values()) + self.waiting + self.sending + self.of_root + buffers,
            when=when,
        )

    def _gather(self, number: int) -> Iterator[Memory]:
        """Into a buffer, which then waits."""
        size = self._size(number)
        yield self._moment(self.alive, 0, size * (1 + self.copies_more), "gathering")
        self.waiting = size

    def _open(self, number: int) -> Iterator[Memory]:
        """Have a piece gathered; in the backward pass, it may wait already."""
        if number not in self.open:
            if not self.is_backward or not self.waiting:
                yield from self._gather(number)
            self.open[number] = self._size(number)
            yield self._moment(self.alive, 0, 0, "unpacking what was gathered")
            if self.is_backward:
                self.waiting = 0

    def _compute(self, phase: Phase) -> Iterator[Memory]:
        own, activations = phase.peak_gradients, phase.peak - phase.peak_gradients
        if self.sums_later:  # they are added to those of earlier micro-batches
            own, activations = 0, phase.peak_apart
        yield self._moment(activations, 0, own, phase_words(self.profile, phase))
        self.alive = phase.kept

    def forward(self, phase: Phase) -> Iterator[Memory]:
        """Of one piece."""
        if phase.piece == LOSS:
            self.waiting = 0
            if self.section.reshard_after_forward:
                self.open.clear()
            yield from self._compute(phase)
            return
        number = self._piece(phase.piece)
        yield from self._open(ROOT)
        yield from self._open(number)
        yield from self._compute(phase)
        if number != ROOT and self.section.reshard_after_forward:
            del self.open[number]

    def backward(self, phase: Phase) -> Iterator[Memory]:
        """Of one piece."""
        if phase.piece == LOSS:
            yield from self._compute(phase)
            return
        self.is_backward = True
        number = self._piece(phase.piece)
        yield from self._open(ROOT)
        yield from self._open(number)
        if not self.waiting and (following := self._following(number)) is not None:
            yield from self._gather(following)
        yield from self._compute(phase)
        if number == ROOT:
            self.of_root += phase.made
        else:
            yield from self._send(number, phase.made)

    def _following(self, number: int) -> int | None:
        """The block that comes after one in the backward pass, unless it is gathered already."""
        if not self.profile.has_own_blocks or not self.section.reshard_after_forward:
            return None
        following = (len(self.profile.pieces) - 1 if number == ROOT else number) - 1
        return following if following >= 0 and not (number == ROOT and self.sending) else None

    def _send(self, number: int, made: int) -> Iterator[Memory]:
        """Sum a piece's gradients over the workers; each keeps its part."""
        self.open.pop(number, None)
        trained = sum(piece.trained for piece in self._pieces(number))
        self.sending = int(trained * self.reduced)
        part = self._part(trained)
        yield self._moment(self.alive, part, made + self.sending * self.copies_more, "sending gradients")
        if not self.adds_up and not self.offloads:
            self.held = replace(self.held, gradients=self.held.gradients + part)

    def end(self) -> Iterator[Memory]:
        """The rest of the model is sent last, then comes the optimizer."""
        self.alive = 0
        made, self.of_root = self.of_root, 0
        yield from self._send(ROOT, made)
        self.sending = 0
        yield self._moment(0, 0, 0, "optimizer")
