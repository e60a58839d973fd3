"""What a recipe leaves open is found once the workers have met, told, and kept to by those who go on with the run."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.observe.records import Observers
from shoal.observe.runs import read_events
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from shoal.train import settle as module
from shoal.train.advise import USABLE
from shoal.train.forecast import largest_micro_batch
from shoal.train.request import RunRequest
from shoal.train.settle import SETTLED, settle
from tests.many import CPU, Ranks
from tests.tiny import TINY

MakeRanks = Callable[[int], Ranks]
MIB, GIB = 1 << 20, 1 << 30
GPT = {
    "task": "language_modelling",
    "model": {"name": "gpt", "layers": 2, "heads": 4, "dim": 256},
    "data": {"name": "tokens", "dir": "nowhere", "context": 64, "vocab_size": 1000},
    "train": {"steps": 4, "global_batch": 16},
}


def recipe_of(tree: dict[str, Any], workers: int = 1, **train: Any) -> Recipe:
    tree = tree | {"train": tree["train"] | train, "cluster": {"workers": workers, "gpus_per_worker": 0}}
    return load_recipe([tree]).recipe


def settle_with(
    process: Process, recipe: Recipe, run_dir: Path, memory: int | list[int] | None = None, gpu_fits: int | None = None
) -> tuple[Recipe, list[Any]]:
    """On a machine with so much memory for each worker.

    Args:
        memory: Of each worker, or one for each.
        gpu_fits: As on GPUs, where so large a micro-batch is found to fit when it is tried.
    """
    with pytest.MonkeyPatch.context() as patch:
        if memory is not None:
            own = memory[process.rank] if isinstance(memory, list) else memory
            patch.setattr(module, "worker_memory", lambda recipe, process: own)
        if gpu_fits is not None:
            process = replace(process, device=torch.device("cuda", 0))
            patch.setattr(module, "_device_name", lambda process: "a GPU")
            patch.setattr(module, "_fits", lambda recipe, process: recipe.train.micro_batch <= gpu_fits)
        settled = settle(recipe, process, run_dir)
    return settled.recipe, settled.told


def remember(run_dir: Path, told: list[Any], **other: Any) -> dict[str, Any]:
    """As a run writes down what was found."""
    event = {"time": 1.0, "event": SETTLED, **told[0][1], **other}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    return event


def test_what_is_said_stays_as_it_is(tmp_path: Path) -> None:
    recipe = recipe_of(TINY, micro_batch=4)
    settled = settle(recipe, Process(0, 1, CPU), tmp_path)
    assert settled.recipe is recipe and not settled.told


def test_a_small_model_is_not_looked_at(ranks: MakeRanks, tmp_path: Path) -> None:
    for recipe, told in ranks(2)(settle_with, recipe_of(TINY, workers=2), tmp_path):
        assert recipe.parallel.strategy == "ddp" and not told, "as everybody expects: nothing to tell"


def test_a_model_that_does_not_fit_is_divided_and_all_workers_know(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(2)(settle_with, recipe_of(GPT, workers=2), tmp_path, memory=39 * MIB)
    assert {recipe.parallel.strategy for recipe, _ in found} == {"fsdp"}
    ((name, facts),) = found[0][1]
    assert name == SETTLED and facts["words"].startswith("strategy fsdp: ddp would need ")
    assert facts["world_size"] == 2


def test_the_micro_batch_follows_from_the_memory_and_the_global_batch_stays(tmp_path: Path) -> None:
    alone = Process(0, 1, CPU)
    sizes = {}
    for memory in (GIB, 60 * MIB, 40 * MIB):
        recipe, told = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=memory)
        sizes[memory] = recipe.train.micro_batch
        assert recipe.train.global_batch == 16 and 16 % recipe.train.micro_batch == 0
        assert told[0][1]["micro_batch"] == recipe.train.micro_batch
    assert sizes[GIB] == 16 > sizes[60 * MIB] > sizes[40 * MIB] >= 1


def test_the_worker_with_the_least_memory_counts(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(2)(settle_with, recipe_of(GPT, workers=2), tmp_path, memory=[GIB, 39 * MIB])
    assert {recipe.parallel.strategy for recipe, _ in found} == {"fsdp"}


def test_a_strategy_that_fits_with_a_smaller_micro_batch_comes_with_it(ranks: MakeRanks, tmp_path: Path) -> None:
    ((recipe, told), _) = ranks(2)(settle_with, recipe_of(GPT, workers=2), tmp_path, memory=39 * MIB)
    assert recipe.parallel.strategy == "fsdp" and recipe.train.micro_batch in (1, 2, 4)
    assert told[0][1]["micro_batch"] == recipe.train.micro_batch
    assert f"with micro-batch {recipe.train.micro_batch}" in told[0][1]["words"]
    ((own, told), _) = ranks(2)(settle_with, recipe_of(GPT, workers=2, micro_batch=8), tmp_path, memory=39 * MIB)
    assert own.train.micro_batch == 8, "what is said stays"
    remember(tmp_path, told)
    ((again, told), _) = ranks(2)(settle_with, recipe_of(GPT, workers=2, micro_batch=8), tmp_path, memory=GIB)
    assert again == own and not told


def test_those_who_go_on_with_a_run_keep_to_what_was_found(tmp_path: Path) -> None:
    alone = Process(0, 1, CPU)
    _, told = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=60 * MIB)
    event = remember(tmp_path, told)
    recipe, again = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=GIB)
    assert recipe.train.micro_batch == event["micro_batch"] != 16 and not again
    remember(tmp_path, told, world_size=4)
    recipe, again = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=GIB)
    assert recipe.train.micro_batch == 16 and again, "found for other workers"


def test_what_is_asked_differently_is_searched_anew(tmp_path: Path) -> None:
    alone = Process(0, 1, CPU)
    _, told = settle_with(alone, recipe_of(GPT, micro_batch="auto"), tmp_path, memory=60 * MIB)
    remember(tmp_path, told)
    changed = recipe_of(GPT | {"parallel": {"strategy": "fsdp"}}, micro_batch="auto")
    recipe, again = settle_with(alone, changed, tmp_path, memory=GIB)
    assert recipe.parallel.strategy == "fsdp" and recipe.train.micro_batch == 16 and again


def test_what_counts_as_asked_differently() -> None:
    """All that the memory of a step depends on, and no more: a run that goes on keeps to what was found."""

    def asked(**overrides: Any) -> str:
        fields = {name.replace("__", "."): value for name, value in overrides.items()}
        return module._asked(load_recipe([GPT], {"train.micro_batch": "auto", **fields}).recipe)

    others = [
        {"parallel__strategy": "fsdp"},
        {"parallel__fsdp__cpu_offload": True},
        {"train__micro_batch": 4},
        {"train__precision": "bf16"},
        {"train__activation_checkpointing": True},
        {"train__compile": True},
        {"train__global_batch": 32},
        {"optim__name": "sgd"},
        {"optim__name": "sgd", "optim__momentum": 0.9},
        {"model__dim": 64},
        {"data__context": 32},
        {"cluster__gpu_memory_fraction": 0.5},
        {"cluster__gpus_per_worker": 0.25},
    ]
    assert len({asked(), *(asked(**other) for other in others)}) == 1 + len(others)
    assert asked() == asked(train__steps=8, data__dir="elsewhere", optim__lr=0.1, checkpoint__every_steps=2)


def test_a_strategy_that_is_remembered_is_not_that_of_another_recipe(ranks: MakeRanks, tmp_path: Path) -> None:
    ((_, told), _) = ranks(2)(settle_with, recipe_of(GPT, workers=2), tmp_path, memory=39 * MIB)
    event = remember(tmp_path, told)
    assert event["parallel"] == {"strategy": "fsdp"}, "what was changed, and no more"
    ((recipe, again), _) = ranks(2)(settle_with, recipe_of(GPT, workers=2), tmp_path, memory=GIB)
    assert recipe.parallel.strategy == "fsdp" and recipe.train.micro_batch == event["micro_batch"] and not again
    tree = GPT | {"parallel": {"strategy": "auto", "bucket_mb": 5.0}}
    ((recipe, again), _) = ranks(2)(settle_with, recipe_of(tree, workers=2), tmp_path, memory=GIB)
    assert recipe.parallel.strategy == "ddp" and recipe.parallel.bucket_mb == 5.0


def test_on_one_gpu_what_is_foreseen_is_tried(tmp_path: Path) -> None:
    alone, recipe = Process(0, 1, CPU), recipe_of(GPT, micro_batch="auto")
    found, told = settle_with(alone, recipe, tmp_path, memory=GIB, gpu_fits=5)
    assert found.train.micro_batch == 4 and told[0][1]["words"] == "micro-batch 4, the largest that fits"
    found, _ = settle_with(alone, recipe, tmp_path, memory=10 * MIB, gpu_fits=1)
    assert found.train.micro_batch == 1, "a trial knows better than the forecast"
    with pytest.raises(UserError, match=r"not even 1 at a time fits: `shoal plan` foresees \d+ MiB"):
        settle_with(alone, recipe, tmp_path, memory=GIB, gpu_fits=0)


def test_on_several_gpus_nothing_is_tried_and_a_reserve_is_kept(ranks: MakeRanks, tmp_path: Path) -> None:
    """One that runs out of memory would leave the others waiting for it in the middle of a step."""
    tree = GPT | {"parallel": {"strategy": "ddp"}, "train": GPT["train"] | {"precision": "fp32"}}
    recipe = recipe_of(tree, workers=2, micro_batch="auto")
    needs = {size: needed(recipe_of(tree, workers=2, micro_batch=size)) for size in (1, 4, 8)}
    words = {}
    for usable in (1.3 * needs[8], 1.26 * needs[4], 1.1 * needs[1]):
        memory = int(usable / USABLE)
        (found, told), (other, _) = ranks(2)(settle_with, recipe, tmp_path, memory=memory, gpu_fits=-1)
        assert other == found
        words[found.train.micro_batch] = told[0][1]["words"]
    assert list(words) == [8, 4, 1]
    assert words[8] == "micro-batch 8, foreseen to fit with a fifth to spare; with several GPUs it is not tried"
    assert words[1] == "micro-batch 1, foreseen to fit with little to spare; with several GPUs it is not tried"


def needed(recipe: Recipe) -> int:
    """Bytes on a GPU."""
    return largest_micro_batch(recipe, GIB, on_gpu=True).memory.total


@pytest.mark.parametrize("parallel", [{}, {"strategy": "ddp"}], ids=str)
def test_where_nothing_fits_no_micro_batch_is_the_largest_that_does(
    ranks: MakeRanks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    recipe = recipe_of(GPT | {"parallel": parallel}, workers=2, micro_batch="auto")
    for words in ranks(2)(refused, recipe, tmp_path, memory=8 * MIB):
        assert words.startswith("train.micro_batch: ") and "7.2 MiB" in words and "would help: " in words
    if parallel:
        for words in ranks(2)(refused, recipe, tmp_path, memory=39 * MIB):
            assert "a worker can use 35 MiB; what would help: parallel.strategy=fsdp, which needs 3" in words


def refused(process: Process, recipe: Recipe, run_dir: Path, **how: Any) -> str:
    """What the user is told."""
    try:
        settle_with(process, recipe, run_dir, **how)
    except UserError as error:
        return str(error)
    raise AssertionError("was settled")


def test_the_memory_of_a_container_is_shared_by_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "machine_memory", lambda: 8000)
    assert module.worker_memory(recipe_of(TINY), Process(0, 4, CPU, local_world_size=4)) == 2000


def test_what_came_from_the_environment_is_hidden_however_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAST_DISK", "/secret/disk")
    loaded = load_recipe([TINY | {"parallel": {"deepspeed": {"nvme_dir": "${env:FAST_DISK}"}}}])
    request = RunRequest(loaded, tmp_path, Observers())
    facts = {"size": 4, "parallel": loaded.recipe.parallel.model_dump(mode="json"), "list": [["at /secret/disk"], None]}
    hidden = request.hidden(facts)
    assert "secret" not in json.dumps(hidden)
    assert hidden["size"] == 4 and hidden["list"] == [["at ${env:FAST_DISK}"], None]
    assert hidden["parallel"]["deepspeed"]["nvme_dir"] == "${env:FAST_DISK}"
    assert hidden["parallel"]["bucket_mb"] == 25.0


def test_a_run_with_a_micro_batch_left_open(train_here: Callable[..., dict[str, Any]]) -> None:
    open_one = train_here(TINY, overrides={"train.micro_batch": "auto"}, run_dir="open")
    plain = train_here(TINY, run_dir="plain")
    assert open_one["weights_sha256"] == plain["weights_sha256"], "all of it fits, so it is the whole share"
    (event,) = [event for event in read_events(Path("open")) if event["event"] == SETTLED]
    assert event["micro_batch"] == TINY["train"]["global_batch"]


@pytest.mark.parametrize("value", ["large", 0, -1])
def test_what_a_micro_batch_may_be(value: Any) -> None:
    with pytest.raises(UserError, match=r"^train\.micro_batch: should be [a-z0 ]* or auto \(given: [^\n]*$"):
        recipe_of(TINY, micro_batch=value)
