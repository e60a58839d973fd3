"""The learning rate by step."""

import math

import pytest

from shoal.parallel.section import OptimSection
from shoal.train.schedule import learning_rate, peak_lr


def rates(num_steps=10, **fields):
    optim = OptimSection(lr=1.0, **fields)
    return [learning_rate(optim, 1.0, step, num_steps) for step in range(num_steps)]


def test_constant():
    assert rates(3) == [1.0, 1.0, 1.0]


def test_warm_up_rises_in_equal_parts_to_the_peak():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_falls_to_the_floor():
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="linear", min_lr_ratio=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_cosine_falls_as_half_a_wave_after_the_warm_up():
    found = rates(12, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * k / 10)) for k in range(10)]
    assert found == pytest.approx([0.5, 1.0, *expected])
    assert min(found[2:]) > 0.1


def test_step_drops_at_every_multiple():
    found = rates(8, schedule="step", step_every=3, step_factor=0.5, warmup_steps=1)
    assert found == [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.25]


def test_a_warm_up_longer_than_the_run_just_keeps_rising():
    assert rates(2, warmup_steps=4, schedule="cosine") == [0.25, 0.5]


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_scaling_rule(rule, expected):
    optim = OptimSection(lr=0.1, scale_lr=rule, reference_batch=64)
    assert peak_lr(optim, 256) == pytest.approx(expected)
