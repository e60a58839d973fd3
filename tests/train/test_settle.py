"""What a recipe leaves open is found once the workers have met, told, and kept to by those who go on with the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.process import Process
from shoal.observe.runs import read_events
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from shoal.train import settle as module
from shoal.train.settle import SETTLED, settle
from tests.many import CPU, Ranks
from tests.tiny import TINY

MakeRanks = Callable[[int], Ranks]
GPT = {
    "task": "language_modelling",
    "model": {"name": "gpt", "layers": 8, "heads": 4, "dim": 128},
    "data": {"name": "tokens", "dir": "nowhere", "context": 64, "vocab_size": 1000},
    "train": {"steps": 4, "global_batch": 16},
}


def recipe_of(tree: dict[str, Any], workers: int = 1, **train: Any) -> Recipe:
    tree = tree | {"train": tree["train"] | train, "cluster": {"workers": workers, "gpus_per_worker": 0}}
    return load_recipe([tree]).recipe


def settle_with(process: Process, recipe: Recipe, run_dir: Path, memory: int | None = None) -> tuple[Recipe, list[Any]]:
    """On a machine with so much memory for each worker."""
    before = module.worker_memory
    if memory is not None:
        module.worker_memory = lambda recipe, process: memory
    try:
        settled = settle(recipe, process, run_dir)
    finally:
        module.worker_memory = before
    return settled.recipe, settled.told


def test_what_is_said_stays_as_it_is(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, micro_batch=4)
    settled = settle(recipe, Process(0, 1, CPU), tmp_path)
    assert settled.recipe is recipe and not settled.told


def test_a_small_model_is_not_looked_at(ranks: MakeRanks, tmp_path: Path) -> None:
    for recipe, told in ranks(2)(settle_with, recipe_of(TINY, workers=2), tmp_path):
        assert recipe.parallel.strategy == "ddp" and not told, "as everybody expects: nothing to tell"


def test_a_model_that_does_not_fit_is_divided_and_all_workers_know(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(2)(settle_with, recipe_of(GPT, workers=2), tmp_path, memory=38 << 20)
    assert {recipe.parallel.strategy for recipe, _ in found} == {"fsdp"}
    ((name, facts),) = found[0][1]
    assert name == SETTLED and facts["words"].startswith("strategy fsdp: ddp would need ")
    assert facts["world_size"] == 2


def test_the_micro_batch_follows_from_the_memory_and_the_global_batch_stays(tmp_path: Path) -> None:
    alone = Process(0, 1, CPU)
    sizes = {}
    for memory in (1 << 30, 100 << 20, 70 << 20):
        recipe, told = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=memory)
        sizes[memory] = recipe.train.micro_batch
        assert recipe.train.global_batch == 16 and 16 % recipe.train.micro_batch == 0
        assert told[0][1]["micro_batch"] == recipe.train.micro_batch
    assert sizes[1 << 30] == 16 > sizes[100 << 20] > sizes[70 << 20] >= 1


def test_those_who_go_on_with_a_run_keep_to_what_was_found(tmp_path: Path) -> None:
    alone = Process(0, 1, CPU)
    _, told = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=100 << 20)
    event = {"time": 1.0, "event": SETTLED, **told[0][1]}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    recipe, again = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=1 << 30)
    assert recipe.train.micro_batch == event["micro_batch"] != 16 and not again
    (tmp_path / "events.jsonl").write_text(json.dumps(event | {"world_size": 4}) + "\n")
    recipe, again = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=1 << 30)
    assert recipe.train.micro_batch == 16 and again, "found for other workers"


def test_a_run_with_a_micro_batch_left_open(train_here: Callable[..., dict[str, Any]]) -> None:
    open_one = train_here(TINY, overrides={"train.micro_batch": "auto"}, run_dir="open")
    plain = train_here(TINY, run_dir="plain")
    assert open_one["weights_sha256"] == plain["weights_sha256"], "all of it fits, so it is the whole share"
    (event,) = [event for event in read_events(Path("open")) if event["event"] == SETTLED]
    assert event["micro_batch"] == TINY["train"]["global_batch"]


@pytest.mark.parametrize("value", ["large", 0, -1])
def test_what_a_micro_batch_may_be(value: Any) -> None:
    with pytest.raises(Exception, match=r"micro_batch"):
        recipe_of(TINY, micro_batch=value)
