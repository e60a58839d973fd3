"""Which checkpoints go: a pure function of what there is."""

import math
from collections.abc import Sequence

from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.store import CheckpointInfo
from shoal.core.metrics import less_is_better


def to_delete(checkpoints: Sequence[CheckpointInfo], policy: CheckpointSection) -> list[CheckpointInfo]:
    """All but the newest `keep_last` and the best `keep_best` by `metric` (of equals, the earlier is better)."""
    by_step = sorted(checkpoints, key=lambda info: info.step)
    kept = {info.step for info in by_step[-policy.keep_last :]}
    if policy.keep_best and policy.metric is not None:
        metric = policy.metric
        sign = 1 if less_is_better(metric, policy.mode) else -1
        scored = [info for info in by_step if math.isfinite(info.metrics.get(metric, math.nan))]
        best = sorted(scored, key=lambda info: (sign * info.metrics[metric], info.step))
        kept |= {info.step for info in best[: policy.keep_best]}
    return [info for info in by_step if info.step not in kept]
