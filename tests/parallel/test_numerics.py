"""Process-wide settings are set inside a run and put back after it."""

import pytest
import torch

from shoal.core.errors import UserError
from shoal.parallel.numerics import check_precision, torch_settings


def settings_now():
    return (
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
    )


def test_settings_hold_inside_and_are_put_back_even_after_an_error():
    before = settings_now()
    with pytest.raises(ZeroDivisionError), torch_settings(precision="tf32", deterministic=True, threads=1):
        assert settings_now() == (1, "high", True, False)
        raise ZeroDivisionError
    assert settings_now() == before


def test_fp32_means_full_precision():
    torch.set_float32_matmul_precision("medium")
    try:
        with torch_settings(precision="fp32"):
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_needs_a_gpu():
    with pytest.raises(UserError, match=r"train\.precision: tf32 needs an NVIDIA GPU"):
        check_precision("tf32", torch.device("cpu"))
