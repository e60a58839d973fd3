"""Bytes that each worker sends in a step under every strategy; as rings send, which is the least there is."""

from shoal.parallel.memory_fsdp import RATIO, gathered_as
from shoal.parallel.sizes import Profile, Way


def sent(profile: Profile, way: Way) -> int:
    """By the worker that sends most, on average over the steps."""
    degrees, data = way.degrees, way.degrees.data
    if way.strategy == "ddp":
        return _ddp(profile, way)
    if way.strategy == "fsdp":
        return _sharded(profile, way)
    if way.strategy == "tensor":
        across = _sharded(profile, way) if way.parallel.tensor.across == "fsdp" else _all_reduce(profile.trained, data)
        return across + way.micro_batches * profile.sent
    if way.strategy == "pipeline":
        return _pipeline(profile, way)
    if way.strategy == "deepspeed":
        return _zero(profile, way)
    assert degrees.data == 1, way.strategy
    return 0


def _all_reduce(size: float, workers: int) -> int:
    return 2 * _pass_on(size, workers)


def _pass_on(size: float, workers: int) -> int:
    """Gathering a whole of `size`, or summing one of which each keeps a part."""
    return int(size * (workers - 1) / workers)


def _ddp(profile: Profile, way: Way) -> int:
    section, workers = way.parallel, way.degrees.data
    if section.sync_every > 1:
        return _all_reduce((1 + way.moments) * profile.trained / section.sync_every, workers)
    if section.compress == "powersgd":
        return _all_reduce(4 * section.powersgd_rank * sum(piece.low_rank for piece in profile.pieces), workers)
    return _all_reduce(profile.trained * (1.0 if section.compress == "none" else 0.5), workers)


def _sharded(profile: Profile, way: Way) -> int:
    section, degrees = way.parallel.fsdp, way.degrees
    gathered = profile.weights * RATIO[gathered_as(section, way.precision)]
    gathers = way.micro_batches * (2 if section.reshard_after_forward else 1)
    reduces = way.micro_batches if section.reduce_every_micro_batch else 1
    gradients = profile.trained * RATIO[section.reduce_dtype]
    return (
        gathers * _pass_on(gathered, degrees.shards)
        + reduces * _pass_on(gradients, degrees.shards)
        + reduces * _all_reduce(gradients / degrees.shards, degrees.copies)
    )


def _pipeline(profile: Profile, way: Way) -> int:
    """The outputs of a stage forward, their gradients back; tied weights and other pipelines' gradients."""
    assert profile.ends is not None
    section, degrees = way.parallel.pipeline, way.degrees
    per_worker = section.stages_per_worker if section.schedule == "interleaved" else 1
    tied = profile.ends[0].weights + profile.ends[1].weights - profile.pieces[-1].weights
    # Those at the ends of the row have one neighbour; of two workers, that is each.
    messages = 2 * per_worker if degrees.stages > 2 else 2 * per_worker - 1
    each = messages * way.micro_batches * profile.between
    return each + _all_reduce(tied, 2) + _all_reduce(profile.trained / degrees.stages, degrees.copies)


def _zero(profile: Profile, way: Way) -> int:
    """Stages 1 and 2 sum whole gradients and gather new weights after the optimizer's step; stage 3 gathers weights in
    every pass, and each worker gets its part of the gradients alone."""
    stage, workers = way.parallel.deepspeed.stage, way.degrees.data
    weights, trained = (int(size * RATIO[way.precision]) for size in (profile.weights, profile.trained))
    if stage == 3:
        return way.micro_batches * (2 * _pass_on(weights, workers) + _pass_on(trained, workers))
    reduces = 1 if stage == 1 else way.micro_batches
    return reduces * _all_reduce(trained, workers) + _pass_on(trained, workers)
