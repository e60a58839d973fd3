import math

import pytest

from shoal.core.metrics import direction, is_better, less_is_better

nan = math.nan


@pytest.mark.parametrize(
    ("metric", "less"),
    [
        ("val_loss", True),
        ("loss", True),
        ("val_perplexity", True),
        ("val_error", True),
        ("val_rmse", True),
        ("val_accuracy", False),
        ("val_f1", False),
        ("lossless", False),
        ("bleu", False),
        ("val_wer", True),
        ("val_error_rate", True),
    ],
)
def test_the_name_says_whether_less_is_better(metric: str, less: bool) -> None:
    assert less_is_better(metric) is less
    assert less_is_better(metric, "min") is True
    assert less_is_better(metric, "max") is False


@pytest.mark.parametrize(
    ("value", "best", "metric", "mode", "min_delta", "better"),
    [
        (0.9, 1.0, "val_loss", "auto", 0.0, True),
        (1.0, 1.0, "val_loss", "auto", 0.0, False),
        (1.1, 1.0, "val_loss", "auto", 0.0, False),
        (1.1, 1.0, "val_loss", "max", 0.0, True),
        (0.9, 0.8, "val_accuracy", "auto", 0.0, True),
        (0.9, 0.8, "val_accuracy", "min", 0.0, False),
        (0.75, 0.5, "val_accuracy", "auto", 0.25, False),
        (0.76, 0.5, "val_accuracy", "auto", 0.25, True),
        (nan, 1.0, "val_loss", "auto", 0.0, False),
        (nan, 0.0, "val_accuracy", "auto", 0.0, False),
        (5.0, nan, "val_loss", "auto", 0.0, True),
        (nan, nan, "val_loss", "auto", 0.0, False),
        (math.inf, 1.0, "val_loss", "auto", 0.0, False),
        (1.0, math.inf, "val_loss", "auto", 0.0, True),
    ],
)
def test_better_is_by_more_than_the_least_gain(
    value: float, best: float, metric: str, mode: str, min_delta: float, better: bool
) -> None:
    assert is_better(value, best, metric, mode, min_delta) is better


def test_where_the_name_says_nothing_there_is_no_direction() -> None:
    assert direction("val_size") is None and direction("val_loss") == "min" and direction("val_Accuracy") == "max"
