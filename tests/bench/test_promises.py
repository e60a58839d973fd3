"""The loop's cost and the loader's speed, as promised. Noise makes them look worse, so the best of a few counts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.bench import data, step
from shoal.recipe.load import load_recipe


def best_of(tries: int, measure: Callable[[], float], enough: Callable[[float], bool]) -> list[float]:
    found: list[float] = []
    for _ in range(tries):
        found.append(measure())
        if enough(found[-1]):
            break
    return found


def fake_mnist() -> dict[str, Any]:
    """MNIST's shapes without its files."""
    return {"data": {"name": "synthetic", "samples": 60_000, "val_samples": 8, "shape": [1, 28, 28]}}


def test_a_step_of_a_trivial_model_costs_at_most_60_microseconds_more_than_by_hand() -> None:
    recipe = load_recipe([step.TRIVIAL], ["cluster.threads_per_worker=1"]).recipe
    found = best_of(5, lambda: step.measure(recipe, 400, 5, 50)["overhead_us"], lambda us: us <= 60)
    assert min(found) <= 60, found


@pytest.mark.slow
def test_the_loop_costs_at_most_2_percent_on_mnist() -> None:
    recipe = load_recipe(["mnist", fake_mnist()]).recipe
    found = best_of(4, lambda: step.measure(recipe, 40, 5, 5)["ratio"], lambda ratio: ratio <= 1.02)
    assert min(found) <= 1.02, found


def test_mnist_in_memory_is_read_at_least_5_times_as_fast_as_by_dataloader(shared_data: Path) -> None:
    recipe = load_recipe(
        ["mnist"], [f"data.dir={shared_data}", "data.download=false", "cluster.threads_per_worker=1"]
    ).recipe
    found = best_of(4, lambda: data.measure(recipe, 2)["ratio"], lambda ratio: ratio >= 5)
    assert max(found) >= 5, found
