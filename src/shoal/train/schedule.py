"""The learning rate as a pure function of the step."""

import math

from shoal.parallel.section import OptimSection


def peak_lr(optim: OptimSection, global_batch: int) -> float:
    """`optim.lr` after the scaling rule."""
    if optim.scale_lr == "none":
        return optim.lr
    assert optim.reference_batch is not None
    ratio = global_batch / optim.reference_batch
    return optim.lr * (ratio if optim.scale_lr == "linear" else math.sqrt(ratio))


def learning_rate(optim: OptimSection, peak: float, step: int, num_steps: int) -> float:
    """The learning rate of step `step` (from 0) of `num_steps`."""
    if step < optim.warmup_steps:
        return peak * (step + 1) / optim.warmup_steps
    if optim.schedule == "constant":
        return peak
    if optim.schedule == "step":
        assert optim.step_every is not None
        return float(peak * optim.step_factor ** ((step - optim.warmup_steps) // optim.step_every))
    progress = (step - optim.warmup_steps) / max(1, num_steps - optim.warmup_steps)
    fall = 1 - progress if optim.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * fall)
