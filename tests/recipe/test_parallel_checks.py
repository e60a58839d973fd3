"""Combinations of strategy, model and workers that cannot work are refused before anything starts, with what does."""

from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.recipe.load import load_recipe
from shoal.recipe.parallel_checks import check_ds_config, idle_settings, num_shares

VIT = {"name": "vit", "patch": 4, "dim": 48, "layers": 6, "heads": 6}


def load(strategy: str, workers: int, model: Any = VIT, **overrides: Any) -> Any:
    dotted = {name.replace("__", "."): value for name, value in overrides.items()}
    base = {"train.global_batch": 240, "cluster.workers": workers, "parallel.strategy": strategy}
    return load_recipe(["digits"], base | ({} if model is None else {"model": model}) | dotted).recipe


def told(*args: Any, **overrides: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(*args, **overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "workers", "overrides"),
    [
        ("single", 1, {}),
        ("auto", 3, {"parallel__compress": "bf16", "parallel__hierarchical": False}),
        ("ddp", 3, {"parallel__hierarchical": True}),
        ("fsdp", 1, {}),
        ("fsdp", 6, {"parallel__fsdp__shard_size": 3}),
        ("fsdp", 6, {"parallel__fsdp__shard_size": "node"}),
        ("fsdp", 6, {"train__compile": True, "cluster__min_workers": 2}),
        ("deepspeed", 5, {"parallel__deepspeed__stage": 3, "parallel__deepspeed__offload_params": "cpu"}),
        ("deepspeed", 5, {"parallel__deepspeed__stage": 2, "train__compile": True}),
        ("pipeline", 6, {}),
        ("pipeline", 3, {"parallel__pipeline__schedule": "interleaved"}),
        ("pipeline", 12, {"parallel__pipeline__stages": 2, "parallel__pipeline__stages_per_worker": 9}),
        ("tensor", 6, {}),
        ("tensor", 8, {"parallel__tensor__size": 2, "parallel__tensor__across": "fsdp"}),
        ("pipeline", 4, {"model": {"name": "my.module:build"}}),
        ("tensor", 4, {"model": {"name": "my.module:build"}}),
    ],
    ids=str,
)
def test_what_works_is_not_refused(strategy: str, workers: int, overrides: dict[str, Any]) -> None:
    load(strategy, workers, **overrides)


@pytest.mark.parametrize(
    ("strategy", "workers", "overrides", "field", "words"),
    [
        ("single", 2, {}, "cluster.workers", "2 workers are not possible with parallel.strategy single; set 1, or"),
        (
            "fsdp",
            6,
            {"parallel__fsdp__shard_size": 4},
            "parallel.fsdp.shard_size",
            "4 does not divide the 6 workers into equal groups; nearest that does: 3",
        ),
        (
            "pipeline",
            6,
            {"parallel__pipeline__stages": 5},
            "parallel.pipeline.stages",
            "5 does not divide the 6 workers into equal groups; nearest that does: 6",
        ),
        (
            "tensor",
            6,
            {"parallel__tensor__size": 4},
            "parallel.tensor.size",
            "4 does not divide the 6 workers into equal groups; nearest that does: 3",
        ),
        (
            "tensor",
            8,
            {"parallel__tensor__size": 2, "parallel__tensor__across": "fsdp", "parallel__fsdp__shard_size": 3},
            "parallel.fsdp.shard_size",
            "3 does not divide the 4 groups of 2 workers into equal groups; nearest that do: 2 and 4",
        ),
        ("pipeline", 1, {}, "parallel.strategy", "divides a model among workers, and there is one; use single"),
        ("tensor", 1, {}, "parallel.strategy", "divides a model among workers, and there is one; use single"),
        (
            "pipeline",
            6,
            {"parallel__pipeline__stages": 1},
            "parallel.pipeline.stages",
            "a pipeline of one worker is none; set 2 or more, or use ddp",
        ),
        (
            "pipeline",
            8,
            {},
            "parallel.pipeline.stages",
            "8 workers of a pipeline need as many blocks, and model.layers is 6; set parallel.pipeline.stages=4, or",
        ),
        (
            "pipeline",
            4,
            {"parallel__pipeline__schedule": "interleaved"},
            "parallel.pipeline.stages",
            "4 workers of a pipeline with 2 stages each (schedule interleaved) need as many blocks, and model.layers "
            "is 6; set parallel.pipeline.stages=2, or more layers",
        ),
        ("pipeline", 7, {}, "parallel.pipeline.stages", "and model.layers is 6; use fsdp, or more layers"),
        (
            "tensor",
            4,
            {},
            "parallel.tensor.size",
            "4 workers cannot share the 6 heads of model.heads evenly; set parallel.tensor.size=2, or make "
            "model.heads a multiple of 4",
        ),
        ("tensor", 5, {}, "parallel.tensor.size", "cannot share the 6 heads of model.heads evenly; use fsdp, or"),
        (
            "deepspeed",
            2,
            {"parallel__deepspeed__offload_params": "cpu"},
            "parallel.deepspeed.offload_params",
            "is for stage 3, where weights are divided, but parallel.deepspeed.stage is 2; set 3",
        ),
        (
            "deepspeed",
            2,
            {"parallel__deepspeed__offload_optimizer": "nvme", "parallel__deepspeed__nvme_dir": "disk"},
            "parallel.deepspeed.offload_optimizer",
            "nvme is for stage 3, but parallel.deepspeed.stage is 2; set 3, or offload to cpu",
        ),
        (
            "deepspeed",
            2,
            {"parallel__deepspeed__offload_optimizer": "nvme", "parallel__deepspeed__stage": 3},
            "parallel.deepspeed.nvme_dir",
            "is required by offloading to nvme",
        ),
        (
            "deepspeed",
            2,
            {"parallel__deepspeed__stage": 3, "train__compile": True},
            "train.compile",
            "does not go with stage 3 of parallel.deepspeed",
        ),
        ("pipeline", 2, {"cluster__min_workers": 1}, "cluster.min_workers", "which pipeline cannot; give one number"),
        ("tensor", 2, {"cluster__min_workers": 1}, "cluster.min_workers", "which tensor cannot; give one number"),
        (
            "fsdp",
            4,
            {"cluster__min_workers": 2, "parallel__fsdp__shard_size": 2},
            "cluster.min_workers",
            "parallel.fsdp.shard_size needs groups of them; drop one of the two",
        ),
    ],
)
def test_what_cannot_work_is_told_with_what_does(
    strategy: str, workers: int, overrides: dict[str, Any], field: str, words: str
) -> None:
    message = told(strategy, workers, **overrides)
    assert message.startswith(f"{field}: "), message
    assert words in message
    assert "\n" not in message, "and nothing else is wrong"


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_a_model_that_cannot_be_divided_is_told_with_those_that_can(strategy: str) -> None:
    message = told(strategy, 2, model=None)
    assert message.startswith(f"parallel.strategy: {strategy} needs a model with repeated blocks, which simple_cnn has")
    assert message.endswith("ddp, fsdp, deepspeed; possible with this strategy: gpt, vit, your own")


@pytest.mark.parametrize("strategy", ["single", "fsdp", "deepspeed", "pipeline", "tensor"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("compress", "bf16"),
        ("hierarchical", True),
        ("sync_every", 2),
        ("sync_batch_norm", True),
        ("find_unused_parameters", True),
        ("static_graph", True),
        ("gradient_as_bucket_view", False),
    ],
)
def test_fields_of_ddp_are_refused_elsewhere(strategy: str, field: str, value: Any) -> None:
    message = told(strategy, 1 if strategy == "single" else 2, **{f"parallel__{field}": value})
    assert message == f"parallel.{field}: is for parallel.strategy ddp, but that is {strategy}; drop one of them"


@pytest.mark.parametrize(
    ("strategy", "workers", "overrides", "shares"),
    [
        ("ddp", 6, {}, 6),
        ("fsdp", 6, {"parallel__fsdp__shard_size": 2}, 6),
        ("deepspeed", 6, {}, 6),
        ("pipeline", 6, {}, 1),
        ("pipeline", 6, {"parallel__pipeline__stages": 3}, 2),
        ("tensor", 6, {"parallel__tensor__size": 2}, 3),
    ],
)
def test_the_batch_is_divided_among_those_who_have_data_of_their_own(
    strategy: str, workers: int, overrides: dict[str, Any], shares: int
) -> None:
    recipe = load(strategy, workers, **overrides)
    assert num_shares(recipe) == shares
    for global_batch in (shares, 7 * shares):
        load(strategy, workers, **overrides, train__global_batch=global_batch)
    if shares > 1:
        message = told(strategy, workers, **overrides, train__global_batch=8 * shares + 1)
        assert f"{8 * shares + 1} is not divisible by" in message and f"nearest that is: {8 * shares}" in message


@pytest.mark.parametrize(
    ("strategy", "overrides", "idle"),
    [
        ("ddp", {"parallel__deepspeed__stage": 3}, ["parallel.deepspeed.stage"]),
        ("pipeline", {"parallel__fsdp__cpu_offload": True}, ["parallel.fsdp.cpu_offload"]),
        ("pipeline", {"parallel__pipeline__stages_per_worker": 3}, ["parallel.pipeline.stages_per_worker"]),
        ("tensor", {"parallel__fsdp__cpu_offload": True}, ["parallel.fsdp.cpu_offload"]),
        ("tensor", {"parallel__fsdp__cpu_offload": True, "parallel__tensor__across": "fsdp"}, []),
        ("fsdp", {"parallel__fsdp__cpu_offload": True}, []),
        ("auto", {"parallel__fsdp__cpu_offload": True}, []),  # which may take it
    ],
)
def test_what_is_said_for_other_strategies_is_told(strategy: str, overrides: dict[str, Any], idle: list[str]) -> None:
    found = list(idle_settings(load(strategy, 2, **overrides).parallel))
    assert [words.partition(":")[0] for words in found] == idle
    assert all("not used" in words for words in found)


def test_a_ds_config_is_compared_as_far_as_a_recipe_alone_decides(tmp_path: Path) -> None:
    def check(text: str, **overrides: Any) -> None:
        (tmp_path / "ds.json").write_text(text)
        check_ds_config(load("deepspeed", 2, parallel__deepspeed__config=str(tmp_path / "ds.json"), **overrides))

    check('{"train_micro_batch_size_per_gpu": 60, "gradient_accumulation_steps": 2}', train__micro_batch=60)
    check('{"train_micro_batch_size_per_gpu": 7}', train__micro_batch="auto")
    for text, says in (
        ('{"train_micro_batch_size_per_gpu": 7}', "train_micro_batch_size_per_gpu"),
        ('{"zero_optimization": {"stage": 3}}', "parallel.deepspeed.stage"),
        ('{"zero_optimisation": {}', "is not JSON"),
        ("[]", "holds a list"),
    ):
        with pytest.raises(UserError, match=says):
            check(text)
    (tmp_path / "ds.json").unlink()
    with pytest.raises(UserError, match="cannot be read: No such file or directory; give another path"):
        check_ds_config(load("deepspeed", 2, parallel__deepspeed__config=str(tmp_path / "ds.json")))


def test_every_size_that_is_told_works() -> None:
    """Over many sizes: what a message proposes is accepted."""
    for workers in range(2, 17):
        for strategy, field in (("pipeline", "pipeline__stages"), ("tensor", "tensor__size")):
            try:
                load(strategy, workers, train__global_batch=720720)
            except UserError as error:
                message = str(error)
                best = message.partition("=")[2].partition(",")[0]
                if best:
                    load(strategy, workers, train__global_batch=720720, **{f"parallel__{field}": int(best)})
                else:
                    assert "use fsdp" in message
                    load("fsdp", workers, train__global_batch=720720)
