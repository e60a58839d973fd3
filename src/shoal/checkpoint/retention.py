"""Which checkpoints go: a pure function of what there is."""

import math
from collections.abc import Collection, Sequence

from shoal.checkpoint.manifest import CheckpointInfo
from shoal.checkpoint.section import CheckpointSection
from shoal.core.metrics import less_is_better


def to_delete(
    checkpoints: Sequence[CheckpointInfo], policy: CheckpointSection, in_use: Collection[int] = ()
) -> list[CheckpointInfo]:
    """All but the newest `keep_last`, the best `keep_best` by `metric` (of equals, the earlier is better), and the
    steps `in_use`: those being read or uploaded."""
    by_step = sorted(checkpoints, key=lambda info: info.step)
    kept = {info.step for info in by_step[-policy.keep_last :]} | set(in_use)
    if policy.keep_best and policy.metric is not None:
        kept |= {info.step for info in best_first(by_step, policy.metric, policy.mode)[: policy.keep_best]}
    return [info for info in by_step if info.step not in kept]


def best_first(checkpoints: Sequence[CheckpointInfo], metric: str, mode: str) -> list[CheckpointInfo]:
    """Those that have the metric, the best one first; of equals, the earlier is better."""
    sign = 1 if less_is_better(metric, mode) else -1
    scored = [info for info in checkpoints if math.isfinite(info.metrics.get(metric, math.nan))]
    return sorted(scored, key=lambda info: (sign * info.metrics[metric], info.step))
