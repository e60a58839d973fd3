"""Which checkpoints go: never the newest, never the best."""

from collections.abc import Collection
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.manifest import CheckpointInfo, Manifest
from shoal.checkpoint.retention import to_delete
from shoal.checkpoint.section import CheckpointSection


def info(step: int, value: float | None = None) -> CheckpointInfo:
    metrics = {} if value is None else {"val_loss": value, "val_accuracy": value}
    return CheckpointInfo(Path(f"step-{step}"), Manifest(step, 0, metrics, 0.0, 1, "single", {}))


def deleted(infos: list[CheckpointInfo], in_use: Collection[int] = (), **policy: object) -> list[int]:
    return [found.step for found in to_delete(infos, CheckpointSection(**policy), in_use)]


def test_the_newest_are_kept():
    assert deleted([info(step) for step in (4, 1, 3, 2)], keep_last=2) == [1, 2]


def test_the_best_are_kept_besides():
    infos = [info(1, 0.5), info(2, 0.1), info(3, 0.9), info(4, 0.4), info(5)]
    assert deleted(infos, keep_last=1, keep_best=1, metric="val_loss") == [1, 3, 4]
    assert deleted(infos, keep_last=1, keep_best=1, metric="val_accuracy") == [1, 2, 4]
    assert deleted(infos, keep_last=1, keep_best=2, metric="val_loss", mode="max") == [2, 4]


def test_a_metric_that_is_not_a_number_is_never_the_best():
    infos = [info(1, 0.5), info(2, float("nan")), info(3, float("inf")), info(4)]
    assert deleted(infos, keep_last=1, keep_best=1, metric="val_loss") == [2, 3]
    assert deleted(infos, keep_last=1, keep_best=1, metric="val_accuracy") == [2, 3]


def test_of_equals_the_earlier_is_the_best():
    assert deleted([info(1, 0.5), info(2, 0.5), info(3, 0.5)], keep_last=1, keep_best=1, metric="val_loss") == [2]


@given(
    values=st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=30),
    keep_last=st.integers(1, 5),
    keep_best=st.integers(0, 4),
    metric=st.sampled_from(["val_loss", "val_accuracy"]),
    in_use=st.sets(st.integers(0, 30), max_size=3),
)
def test_never_the_newest_never_the_best_never_one_in_use_and_never_too_many_kept(
    values, keep_last, keep_best, metric, in_use
):
    infos = [info(step, value) for step, value in enumerate(values)]
    gone = set(deleted(infos, in_use, keep_last=keep_last, keep_best=keep_best, metric=metric))
    assert gone.isdisjoint(in_use)
    assert gone.isdisjoint(range(max(0, len(values) - keep_last), len(values)))
    scored = {step: value for step, value in enumerate(values) if value is not None}
    if keep_best and scored:
        best = (min if metric == "val_loss" else max)(scored.values())
        assert min(step for step, value in scored.items() if value == best) not in gone
    assert len(values) - len(gone) <= keep_last + keep_best + len(in_use)
