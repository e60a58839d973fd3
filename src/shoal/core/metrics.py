"""Which way a metric is better."""

import math

_LESS_IS_BETTER = ("loss", "perplexity", "error", "err", "mse", "mae", "rmse")


def less_is_better(metric: str, mode: str = "auto") -> bool:
    """Whether a smaller value of `metric` is better, by `mode` or, for `auto`, by its name."""
    if mode != "auto":
        return mode == "min"
    return not set(metric.split("_")).isdisjoint(_LESS_IS_BETTER)


def is_better(value: float, best: float, metric: str, mode: str = "auto", min_delta: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `min_delta`; what is not a number beats nothing and loses to any."""
    if math.isnan(best):
        return not math.isnan(value)
    gain = best - value if less_is_better(metric, mode) else value - best
    return gain > min_delta
