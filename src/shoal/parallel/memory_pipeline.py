"""The memory of a step in a pipeline: some blocks on each worker, and activations of micro-batches on their way."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.parallel.sizes import ROOT, Memory, Phase, Piece, Profile, Way, phase_words, step_batches


@dataclass(frozen=True)
class _Stage:
    """What one stage holds and computes; bytes."""

    pieces: tuple[Piece, ...]
    phases: tuple[Phase, ...]
    before: int
    """What lives of earlier stages, where one process computes all of them."""
    kept: int
    """What a micro-batch leaves behind between its forward and its backward pass."""

    @property
    def weights(self) -> int:
        return sum(piece.weights for piece in self.pieces)

    @property
    def trained(self) -> int:
        return sum(piece.trained for piece in self.pieces)


def pipeline_moments(profile: Profile, way: Way) -> Iterator[Memory]:
    """What each worker of a pipeline holds, the worst moments of all of them.

    The blocks of `profile` must be all that the stages are cut from. A `UserError` where they are too few.
    """
    from shoal.parallel.stages import check_blocks  # which loads torch

    section, workers = way.parallel.pipeline, way.degrees.stages
    per_worker = section.stages_per_worker if section.schedule == "interleaved" else 1
    check_blocks(len(profile.pieces) - 1, workers, per_worker, workers * way.degrees.copies)
    stages = _cut(profile, workers * per_worker)
    for worker in range(workers):
        own = stages[worker::workers]
        held = _held(profile, way, own, worker, workers)
        suffix = f", worker {worker} of the pipeline"
        for load in _loads(section.schedule, worker, workers, way.micro_batches, own):
            for moment in _computing(profile, own[load.stage], held, load):
                yield replace(moment, when=moment.when + suffix)
        sent = _summed(profile, way, own, worker, workers)
        yield replace(held, buffers=held.buffers + sent, when="summing gradients" + suffix)


def _computing(profile: Profile, stage: _Stage, held: Memory, load: "_Load") -> Iterator[Memory]:
    """A micro-batch in one stage, while others wait."""
    waiting, made = held.activations + load.waiting - stage.before, 0
    for phase in stage.phases:
        if load.is_first_backward:
            gradients = made + phase.peak_gradients
            moment = replace(held, gradients=gradients, activations=waiting + phase.peak - phase.peak_gradients)
        else:
            moment = replace(held, activations=waiting + phase.peak_apart)
        yield replace(moment, when=phase_words(profile, phase))
        made += phase.made


def _cut(profile: Profile, num_stages: int) -> list[_Stage]:
    """As `stages.cut` does it."""
    from shoal.parallel.stages import divide  # which loads torch

    assert profile.ends is not None
    blocks = profile.pieces[:-1]
    sizes = [piece.weights + piece.buffers + 1 for piece in blocks]
    for place, end in zip((0, -1), profile.ends, strict=True):
        sizes[place] += end.weights + end.buffers
    places = _places(profile)
    stages = []
    for number, found in enumerate(divide(sizes, num_stages)):
        own, pieces = set(found), blocks[found.start : found.stop]
        if number == 0:
            own, pieces = own | {-1}, (*pieces, profile.ends[0])
        if number == num_stages - 1:
            own, pieces = own | {len(blocks)}, (*pieces, profile.ends[1])
        phases = [phase for phase, place in zip(profile.phases, places, strict=True) if place in own]
        start = _kept_after(profile, places, found.start - 1) if number else 0
        kept = _kept_after(profile, places, max(own))
        stages.append(_Stage(pieces, tuple(phases), start, kept - start))
    return stages


def _kept_after(profile: Profile, places: list[int], last: int) -> int:
    """What lives once all up to that place were computed; some of them may compute nothing."""
    phases = zip(profile.phases, places, strict=True)
    kept = [phase.kept for phase, place in phases if not phase.is_backward and place <= last]
    return kept[-1] if kept else 0


def _places(profile: Profile) -> list[int]:
    """Where in the row of blocks each phase is: -1 before the first of them, their number after the last."""
    num_blocks, place, places = len(profile.pieces) - 1, -1, []
    for phase in profile.phases:
        if phase.piece >= 0:
            place = phase.piece
            places.append(place)
        elif phase.is_backward:
            places.append(-1 if place == 0 and phase.piece == ROOT else num_blocks)
        else:
            places.append(-1 if place == -1 else num_blocks)
            place = place if place == -1 else num_blocks
    return places


def _held(profile: Profile, way: Way, own: list[_Stage], worker: int, workers: int) -> Memory:
    """Throughout a step: weights, gradients, and for each micro-batch buffers for what comes from the neighbours."""
    weights = sum(stage.weights for stage in own)
    trained = sum(stage.trained for stage in own)
    is_first, is_last = worker == 0, worker == workers - 1
    sides = sum(2 for _ in own) - (1 if is_first else 0) - (1 if is_last else 0)
    entering = profile.batch * way.micro_batches if is_first else 0
    return Memory(
        weights=weights,
        gradients=trained,
        optimizer=way.moments * trained,
        activations=step_batches(profile, way) + entering,
        buffers=sum(piece.buffers for stage in own for piece in stage.pieces)
        + sides * way.micro_batches * profile.between,
    )


def _summed(profile: Profile, way: Way, own: list[_Stage], worker: int, workers: int) -> int:
    """What gradients are copied into to be summed: those of tied weights, and all where there are several pipelines."""
    assert profile.ends is not None
    ends = profile.ends
    tied = ends[0].weights + ends[1].weights - profile.pieces[-1].weights
    shared = tied if worker in (0, workers - 1) else 0
    bucket = int(way.parallel.bucket_mb * 2**20)
    largest = max(piece.largest for stage in own for piece in stage.pieces)
    if way.degrees.copies > 1:
        return max(shared, min(sum(stage.trained for stage in own), max(bucket, largest)))
    return shared


@dataclass(frozen=True)
class _Load:
    """What a worker holds beside the micro-batch that it computes."""

    stage: int
    """Which of its own."""
    waiting: int
    """Bytes of micro-batches that wait for their backward pass."""
    is_first_backward: bool
    """Whether there are no gradients yet."""


def _loads(schedule: str, worker: int, workers: int, count: int, own: list[_Stage]) -> Iterator[_Load]:
    """The heaviest ones of a step."""
    if schedule == "interleaved":
        per_round = count // max(1, count // workers)
        warm_up = (len(own) - 1) * per_round + 2 * (workers - 1 - worker)
    else:
        per_round = count
        warm_up = count if schedule == "gpipe" or count < workers else workers - worker - 1
    total = count * len(own)
    warm_up = min(warm_up, total)
    order = ["F"] * warm_up + ["F", "B"] * (total - warm_up) + ["B"] * warm_up
    waiting, done = [0] * len(own), {"F": 0, "B": 0}
    worst: dict[tuple[int, bool], int] = {}
    for kind in order:
        index = done[kind] // per_round % len(own)
        present = index if kind == "F" else len(own) - 1 - index
        waiting[present] -= kind == "B"
        others = sum(number * stage.kept for number, stage in zip(waiting, own, strict=True))
        key = (present, done["B"] == 0)
        worst[key] = max(worst.get(key, 0), others)
        waiting[present] += kind == "F"
        done[kind] += 1
    for (present, is_first), others in worst.items():
        yield _Load(present, others, is_first)
