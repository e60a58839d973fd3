"""What a training step needs of each worker under every strategy: memory by part. Pure arithmetic."""

from collections.abc import Iterator
from dataclasses import replace

from shoal.parallel.memory_deepspeed import deepspeed_moments
from shoal.parallel.memory_fsdp import fsdp_moments
from shoal.parallel.memory_pipeline import pipeline_moments
from shoal.parallel.sizes import Memory, Profile, Way, phase_words, step_batches

_KERNELS_ON_CPU, _KERNELS_ON_GPU = 12 << 20, 64 << 20
"""What libraries of kernels keep for themselves; on the CPU as little as a small model needs."""


def needed(profile: Profile, way: Way) -> Memory:
    """What the worker that needs most needs at the worst moment of a step, the second one or later."""
    worst = max(_moments(profile, way), key=lambda moment: moment.total)
    kernels = _KERNELS_ON_GPU if way.on_gpu else min(_KERNELS_ON_CPU, worst.total // 16)
    return replace(worst, buffers=worst.buffers + kernels)


def _moments(profile: Profile, way: Way) -> Iterator[Memory]:
    if way.strategy == "single":
        yield from _replica(profile, way, holds_gradients=way.micro_batches > 1)
    elif way.strategy == "ddp":
        yield from _ddp(profile, way)
    elif way.strategy == "fsdp":
        yield from fsdp_moments(profile, way)
    elif way.strategy == "tensor":
        yield from _tensor(profile, way)
    elif way.strategy == "pipeline":
        yield from pipeline_moments(profile, way)
    else:
        assert way.strategy == "deepspeed", way.strategy
        yield from deepspeed_moments(profile, way)


def _replica(
    profile: Profile, way: Way, holds_gradients: bool, buffers: int = 0, packed: float = 0.0
) -> Iterator[Memory]:
    """A whole model on every worker.

    Args:
        profile: Of one micro-batch.
        way: How a step is carried out.
        holds_gradients: Whether all gradients are there throughout a pass, of earlier micro-batches or in buckets.
        buffers: Bytes beside the model's own.
        packed: Bytes that are there, until the pass ends, for each one of a gradient that was made in it.
    """
    held = Memory(weights=profile.weights, optimizer=way.moments * profile.trained, buffers=profile.buffers + buffers)
    made, given = 0, step_batches(profile, way)
    for phase in profile.phases:
        if holds_gradients:
            gradients, activations = profile.trained, phase.peak_apart
        else:
            gradients, activations = made + phase.peak_gradients, phase.peak - phase.peak_gradients
        when, sent = phase_words(profile, phase), int(packed * (made + phase.made))
        yield replace(
            held, gradients=gradients, activations=activations + given, buffers=held.buffers + sent, when=when
        )
        made += phase.made
    yield replace(held, gradients=profile.trained, activations=given, when="optimizer")


def _ddp(profile: Profile, way: Way) -> Iterator[Memory]:
    """A whole model on every worker, gradients in buckets that are sent."""
    section = way.parallel
    if section.sync_every > 1:  # the buckets are there and unused: on the CPU, memory is taken when it is written to
        unused = profile.trained if way.on_gpu else 0
        yield from _replica(profile, way, holds_gradients=way.micro_batches > 1, buffers=unused)
        return
    # On the CPU, powersgd has done with one bucket before it begins another.
    packed = {"none": 0.0, "bf16": 0.5, "fp16": 0.5, "powersgd": 1.0 if way.on_gpu else 0.0}[section.compress]
    buffers = profile.trained if section.compress == "powersgd" else 0  # what was lost in packing, for the next step
    # Micro-batches before the last add up their gradients outside of the buckets.
    if section.gradient_as_bucket_view and way.micro_batches == 1:
        yield from _replica(profile, way, holds_gradients=True, buffers=buffers, packed=packed)
    else:
        yield from _replica(profile, way, way.micro_batches > 1, buffers + profile.trained, packed)


def _tensor(profile: Profile, way: Way) -> Iterator[Memory]:
    """A part of every layer on each worker, as the profile has it already."""
    if way.parallel.tensor.across == "fsdp" and way.degrees.data > 1:
        yield from fsdp_moments(profile, way)
        return
    moments = list(_replica(profile, way, holds_gradients=way.micro_batches > 1))
    yield from moments
    if way.degrees.copies > 1:  # all gradients once more, to be sent
        last = moments[-1]
        yield replace(last, buffers=last.buffers + profile.trained, when="summing gradients")
