"""Which way a metric is better."""

import math

_LESS = "loss perplexity ppl error err errors mse mae rmse nll wer cer fid bpc bpb crossentropy distance".split()
_MORE = "accuracy acc f1 auc auroc precision recall iou dice map bleu rouge psnr ssim r2 score reward top1 top5".split()


def direction(metric: str) -> str | None:
    """`min` or `max`, as the name of a metric tells; None where it does not."""
    words = set(metric.lower().split("_"))
    if not words.isdisjoint(_LESS):
        return "min"
    return None if words.isdisjoint(_MORE) else "max"


def less_is_better(metric: str, mode: str = "auto") -> bool:
    """Whether a smaller value of `metric` is better, by `mode` or, for `auto`, by its name."""
    return (direction(metric) if mode == "auto" else mode) == "min"


def is_better(value: float, best: float, metric: str, mode: str = "auto", min_delta: float = 0.0) -> bool:
    """Whether `value` beats `best` by more than `min_delta`; what is not a number beats nothing and loses to any."""
    if math.isnan(best):
        return not math.isnan(value)
    gain = best - value if less_is_better(metric, mode) else value - best
    return gain > min_delta
