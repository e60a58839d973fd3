"""What `auto` comes to: the fast settings of the device, for what is shipped, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.recipe.automatic import CPU, GPU, Hardware, with_numerics
from shoal.recipe.load import load_recipe
from shoal.recipe.parallel_checks import check_ds_config
from shoal.recipe.schema import Recipe

IMAGES = {"name": "synthetic", "samples": 64, "val_samples": 8, "shape": [1, 8, 8], "classes": 2}
CNN: dict[str, Any] = {
    "task": "image_classification",
    "model": "simple_cnn",
    "data": IMAGES,
    "train": {"steps": 1, "global_batch": 8},
}
GPT: dict[str, Any] = {
    "task": "language_modelling",
    "model": "gpt",
    "data": {"name": "tokens", "dir": "nowhere"},
    "train": {"steps": 1, "global_batch": 8},
}
LSTM: dict[str, Any] = {
    "task": "text_classification",
    "model": "lstm",
    "data": {"name": "agnews"},
    "train": {"steps": 1, "global_batch": 8},
}


def recipe_of(tree: dict[str, Any], *overrides: str) -> Recipe:
    return load_recipe([tree], list(overrides)).recipe


def chosen(recipe: Recipe, hardware: Hardware = GPU) -> dict[str, Any]:
    found = with_numerics(recipe, hardware).train
    names = ("precision", "compile", "cuda_graphs", "channels_last", "fp8")
    return {name: getattr(found, name) for name in names}


SLOW = {"precision": "fp32", "compile": False, "cuda_graphs": False, "channels_last": False, "fp8": False}


@pytest.mark.parametrize("tree", [CNN, GPT, LSTM], ids=["cnn", "gpt", "lstm"])
def test_on_a_cpu_nothing_is_chosen_but_how_images_lie(tree: dict[str, Any]) -> None:
    assert chosen(recipe_of(tree), CPU) == SLOW | {"channels_last": tree is CNN}


@pytest.mark.parametrize(
    ("tree", "compiles", "convolves"), [(CNN, True, True), (GPT, True, False), (LSTM, False, False)]
)
def test_a_gpu_has_what_the_model_gains_by(tree: dict[str, Any], compiles: bool, convolves: bool) -> None:
    found = chosen(recipe_of(tree))
    graphs: Any = "auto" if compiles else False
    expected = {"precision": "bf16", "compile": compiles, "cuda_graphs": graphs, "channels_last": convolves}
    assert found == {**expected, "fp8": False}, "what is less exact is never chosen"


def test_what_a_recipe_says_stands() -> None:
    said = {"precision": "fp32", "compile": False, "cuda_graphs": False, "channels_last": False}
    overrides = [f"train.{name}={str(value).lower()}" for name, value in said.items()]
    assert chosen(recipe_of(CNN, *overrides)) == {**said, "fp8": False}
    on = chosen(recipe_of(CNN, "train.compile=true", "train.channels_last=true"), CPU)
    assert on["compile"] is True and on["channels_last"] is True
    assert chosen(recipe_of(CNN, "train.cuda_graphs=true"))["cuda_graphs"] is True


def test_nothing_is_left_open_and_choosing_again_changes_nothing() -> None:
    for tree in (CNN, GPT, LSTM):
        once = with_numerics(recipe_of(tree), GPU)
        assert with_numerics(once, GPU) == once
        assert with_numerics(once, CPU).train.precision == "bf16", "what was chosen is as good as said"


def test_what_hardware_lacks_is_not_chosen() -> None:
    old = Hardware(is_gpu=True, has_bf16=False, can_compile=False)
    found = chosen(recipe_of(CNN), old)
    assert found["precision"] == "fp32" and found["compile"] is False and found["channels_last"] is True
    assert Hardware.common([GPU, old]) == old
    assert not Hardware.common([GPU, CPU]).is_gpu


def test_code_of_ones_own_is_neither_compiled_nor_recorded_unasked() -> None:
    own_model = recipe_of(CNN | {"model": {"name": "mine:model"}})
    own_task = recipe_of(CNN | {"task": {"name": "mine:Task"}})
    for recipe in (own_model, own_task):
        assert chosen(recipe) == SLOW | {"precision": "bf16"}


def test_strategies_that_divide_a_model_are_not_compiled_unasked() -> None:
    for strategy, compiles in (("ddp", True), ("fsdp", False), ("deepspeed", False)):
        found = chosen(recipe_of(CNN, f"parallel.strategy={strategy}", "cluster.workers=2"))
        assert found["compile"] is compiles and found["cuda_graphs"] is False, strategy


def test_whether_to_compile_is_open_as_long_as_the_strategy_is() -> None:
    """What is chosen for several workers may be one that is not compiled unasked."""
    found = with_numerics(recipe_of(GPT, "cluster.workers=2"), GPU)
    assert found.train.compile == "auto"
    for strategy, compiles in (("ddp", True), ("fsdp", False)):
        parallel = found.parallel.model_copy(update={"strategy": strategy})
        assert with_numerics(found.model_copy(update={"parallel": parallel}), GPU).train.compile is compiles
    small_buckets = recipe_of(GPT, "cluster.workers=2", "parallel.strategy=ddp", "parallel.bucket_mb=0.5")
    assert chosen(small_buckets)["compile"] is False


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": "auto"}}, "bf16"),
        ({}, "bf16"),
    ],
    ids=str,
)
def test_a_ds_config_says_what_the_precision_is(config: dict[str, Any], precision: str, tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    recipe = recipe_of(GPT, "cluster.workers=2", "parallel.strategy=deepspeed", f"parallel.deepspeed.config={file}")
    assert chosen(recipe)["precision"] == precision
    check_ds_config(recipe)  # refuses nothing


def test_fp16_is_not_recorded_because_the_host_looks_at_its_scale() -> None:
    assert chosen(recipe_of(CNN, "train.precision=fp16"))["cuda_graphs"] is False


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.fp8=true", "cluster.gpus_per_worker=0"], "train.fp8: needs a GPU"),
        (["train.fp8=true", "train.precision=fp32"], "needs train.precision bf16, but that is fp32"),
        (["train.fp8=true", "train.compile=false"], "gains nothing without train.compile"),
        (["train.fp8=true", "parallel.strategy=fsdp", "cluster.workers=2"], "but parallel.strategy is fsdp"),
        (["train.fp8=true", "train.activation_checkpointing=true"], "train.activation_checkpointing; drop one"),
        (["train.cuda_graphs=true", "cluster.gpus_per_worker=0"], "train.cuda_graphs: is for GPUs"),
        (["train.cuda_graphs=true", "cluster.workers=2"], "is for one worker, but cluster.workers is 2"),
        (["train.cuda_graphs=true", "train.precision=fp16"], "whose scale the host looks at"),
        (["train.cuda_graphs=true", "train.micro_batch=4"], "needs a step of one micro-batch"),
        (["train.compile=true", "cluster.workers=2", "parallel.bucket_mb=0.5"], "less than the 1 that train.compile"),
        (["train.cuda_graphs=true", "parallel.strategy=ddp"], "but parallel.strategy is ddp"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe_of(GPT, *overrides)
