"""Sizes are found without memory, and are those of the real thing."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import UserError
from shoal.data.build import build_datasets
from shoal.parallel.degrees import Degrees
from shoal.parallel.memory import needed
from shoal.parallel.section import ParallelSection
from shoal.parallel.sizes import LOSS, ROOT, Way
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from shoal.train.advise import TooFewSamplesError
from shoal.train.shapes import known_shapes
from shoal.train.trace import Form, Tracer, extrapolate
from tests.small_recipes import NAMES, small
from tests.tiny import own_recipe, write_own_task

GPT: dict[str, Any] = {
    "task": "language_modelling",
    "model": {"name": "gpt", "layers": 4, "heads": 4, "dim": 64},
    "data": {"name": "tokens", "dir": "nowhere", "context": 32, "vocab_size": 500},
    "train": {"steps": 1, "global_batch": 8},
}
VIT: dict[str, Any] = {
    "task": "image_classification",
    "model": {"name": "vit", "dim": 64, "layers": 4, "heads": 4, "patch": 4},
    "data": {"name": "synthetic", "shape": [3, 16, 16]},
    "train": {"steps": 1, "global_batch": 8},
}
RESNET = VIT | {"model": {"name": "resnet50", "width": 4}, "data": {"name": "synthetic", "shape": [3, 16, 16]}}


def recipe_of(tree: dict[str, Any], **overrides: Any) -> Recipe:
    return load_recipe([tree], {"cluster.gpus_per_worker": 0, **overrides}).recipe


def peak(tracer: Tracer, micro_batch: int = 4, form: Form | None = None) -> int:
    return max(phase.peak for phase in tracer.profile(micro_batch, form).phases)


@pytest.mark.parametrize("tree", [GPT, VIT, RESNET], ids=["gpt", "vit", "resnet50"])
@pytest.mark.parametrize(
    "overrides",
    [{}, {"train.precision": "bf16"}, {"train.activation_checkpointing": True}],
    ids=str,
)
def test_what_is_traced_without_memory_is_what_lives_in_a_real_step(
    tree: dict[str, Any], overrides: dict[str, Any]
) -> None:
    fake, real = (Tracer(recipe_of(tree, **overrides), on_gpu=False) for _ in range(2))
    real.run_for_real()
    of_fake, of_real = fake.profile(4), real.profile(4)
    assert fake.is_fake and of_fake.pieces == of_real.pieces and of_fake.batch == of_real.batch
    assert [phase.piece for phase in of_fake.phases] == [phase.piece for phase in of_real.phases]
    for one, other in zip(of_fake.phases, of_real.phases, strict=True):
        assert one.kept == pytest.approx(other.kept, rel=0.02, abs=4096)
        assert one.peak == pytest.approx(other.peak, rel=0.02, abs=4096)
        assert one.gradients == other.gradients


def test_a_model_is_its_blocks_and_the_rest() -> None:
    profile = Tracer(recipe_of(GPT), on_gpu=False).profile(2)
    *blocks, rest = profile.pieces
    assert [block.name for block in blocks] == [f"blocks.{number}" for number in range(4)]
    assert rest.weights == 4 * (500 * 64 + 32 * 64 + 2 * 64), "the output projection is the token embedding"
    assert profile.parameters * 4 == profile.weights == profile.trained
    assert profile.between == 2 * 32 * 64 * 4 and profile.batch == 2 * 2 * 32 * 8
    first, *_, last = profile.phases
    assert (first.piece, first.is_backward) == (ROOT, False) and (last.piece, last.is_backward) == (ROOT, True)
    assert [phase.is_backward for phase in profile.phases if phase.piece == LOSS] == [False, True]
    made = [(piece, size) for phase in profile.phases for piece, size in phase.gradients]
    assert sum(size for _, size in made) == profile.trained, "each gradient once, tied ones too"


def test_running_statistics_are_buffers() -> None:
    profile = Tracer(recipe_of(RESNET), on_gpu=False).profile(2)
    assert len(profile.pieces) == 17 and profile.buffers > 0 and profile.ends is None


def test_recomputing_activations_keeps_less() -> None:
    tracer = Tracer(recipe_of(GPT), on_gpu=False)
    plain, recomputed = tracer.profile(8), tracer.profile(8, Form(recompute=True))
    kept = [max(phase.kept for phase in profile.phases) for profile in (plain, recomputed)]
    assert kept[1] < 0.6 * kept[0] and tracer.is_fake


def test_a_larger_micro_batch_needs_more_and_what_is_between_is_on_a_line() -> None:
    tracer = Tracer(recipe_of(VIT), on_gpu=False)
    few, more, most = (tracer.profile(count) for count in (2, 4, 12))
    foreseen = extrapolate(few, more, 12)
    assert foreseen.batch == most.batch and foreseen.between == most.between and foreseen.micro_batch == 12
    for guess, found in zip(foreseen.phases, most.phases, strict=True):
        assert guess.kept == pytest.approx(found.kept, rel=0.01)


@pytest.mark.parametrize("tree", [GPT, VIT, RESNET], ids=["gpt", "vit", "resnet50"])
@pytest.mark.parametrize(
    ("precision", "recompute"),
    [
        *(("fp32", False), ("bf16", True)),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("fp32", True), ("bf16", False), ("fp16", True))),
    ],
)
def test_a_gpu_is_planned_for_without_one(tree: dict[str, Any], precision: str, recompute: bool) -> None:
    overrides = {"train.precision": precision}
    if tree is not RESNET:
        overrides["model.dropout"] = 0.1  # type: ignore[assignment]
    tracer = Tracer(recipe_of(tree, **overrides), on_gpu=True)
    assert peak(tracer, 4, Form(recompute=recompute)) > 0 and tracer.is_fake
    # Attention weights are never held, dropout keeps a byte: less than on the CPU.
    if tree is not RESNET and not recompute:
        assert peak(tracer) < peak(Tracer(recipe_of(tree, **overrides), on_gpu=False))


def test_on_a_gpu_logits_of_half_precision_become_losses_in_full() -> None:
    """As measured on one: logits, their softmax and its gradient in fp32, and the gradient of the logits."""
    tree = GPT | {"data": GPT["data"] | {"vocab_size": 20_000}, "model": GPT["model"] | {"layers": 2, "dim": 8}}
    profile = Tracer(recipe_of(tree, **{"train.precision": "bf16"}), on_gpu=True).profile(8)
    (loss,) = [phase for phase in profile.phases if phase.piece == LOSS and phase.is_backward]
    logits = 8 * 32 * 20_000
    assert loss.peak == pytest.approx((4 + 4 + 2) * logits, rel=0.05)


@pytest.mark.parametrize("tree", [GPT, VIT], ids=["gpt", "vit"])
@pytest.mark.parametrize("sequence", [False, True])
def test_workers_that_share_layers_hold_less_each(tree: dict[str, Any], sequence: bool) -> None:
    recipe = recipe_of(tree, **{"parallel.strategy": "tensor", "cluster.workers": 4})
    tracer = Tracer(recipe, on_gpu=False)
    whole, shared = tracer.profile(4), tracer.profile(4, Form(tensor=4, sequence=sequence))
    assert tracer.is_fake and whole.sent == 0 < shared.sent
    for block, part in zip(whole.pieces[:-1], shared.pieces[:-1], strict=True):
        assert 0.25 < part.weights / block.weights < 0.27, "all but norms and a few biases"
    kept = [max(phase.kept for phase in profile.phases) for profile in (whole, shared)]
    assert kept[1] < (0.6 if sequence and tree is GPT else 0.8) * kept[0]


def test_what_is_sent_for_a_layer_grows_with_the_micro_batch() -> None:
    tracer, form = Tracer(recipe_of(GPT), on_gpu=False), Form(tensor=2)
    few, more, most = (tracer.profile(count, form) for count in (2, 4, 12))
    assert extrapolate(few, more, 12).sent == most.sent == 6 * few.sent


def test_heads_that_cannot_be_shared_are_refused() -> None:
    tracer = Tracer(recipe_of(GPT), on_gpu=False)
    with pytest.raises(UserError, match=r"parallel.tensor.size: 3 workers cannot have equal shares"):
        tracer.profile(2, Form(tensor=3))


def test_weights_in_half_precision_have_gradients_of_it() -> None:
    tracer = Tracer(recipe_of(RESNET, **{"train.precision": "bf16"}), on_gpu=False)
    profile = tracer.profile(4, Form(dtype="bf16"))
    made = sum(phase.made for phase in profile.phases)
    assert tracer.is_fake and profile.weights == tracer.profile(4).weights
    assert 0.5 < made / profile.trained < 0.52, "all but those of batch norms"
    assert all(parameter.dtype == torch.float32 for parameter in tracer._models[Form(dtype="bf16")].parameters())


def test_tied_weights_of_a_pipeline_have_gradients_at_both_ends() -> None:
    tracer = Tracer(recipe_of(GPT), on_gpu=False)
    profile = tracer.profile(2, Form(untied=True))
    assert profile.pieces == tracer.profile(2).pieces and profile.ends is not None
    first, last = profile.ends
    assert first.weights == 4 * (500 * 64 + 32 * 64) and last.weights == 4 * (500 * 64 + 2 * 64)
    assert sum(phase.made for phase in profile.phases) == profile.trained + 4 * 500 * 64


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_recipe_can_be_traced(name: str, tmp_path: Path) -> None:
    overrides = small(name, tmp_path)
    recipe = load_recipe([name], overrides | {"cluster.gpus_per_worker": 0}).recipe
    tracer = Tracer(recipe, on_gpu=False)
    assert peak(tracer, 2) > 0 and tracer.is_fake
    if (known := known_shapes(recipe.data)) is not None:
        assert recipe.data is not None
        datasets = build_datasets(recipe.data, 0)
        assert known.spec == datasets.spec
        assert [(t.shape, t.dtype) for t in known.make(3)] == [
            (t.shape, t.dtype) for t in datasets.train.batch(np.arange(3), 0)
        ]


def test_data_that_a_recipe_describes_is_not_needed() -> None:
    assert Tracer(recipe_of(GPT | {"data": {"name": "tokens", "dir": "nowhere"}}), on_gpu=True).profile(1).batch
    with pytest.raises(UserError, match=r"data.dir"):
        Tracer(recipe_of(GPT | {"data": {"name": "text", "dir": "nowhere", "download": False}}), on_gpu=True)


def test_a_task_of_ones_own_is_read_a_few_samples_of(here: Path) -> None:
    write_own_task(here, "task_to_trace")
    profile = Tracer(load_recipe([own_recipe("task_to_trace")]).recipe, on_gpu=False).profile(5)
    assert profile.parameters == 3 and profile.batch == 5 * 3 * 4


def test_a_model_that_looks_at_numbers_is_run_instead(here: Path) -> None:
    write_own_task(here, "task_that_looks", "assert float(batch[0].sum()) != 1e9")
    tracer = Tracer(load_recipe([own_recipe("task_that_looks")]).recipe, on_gpu=False)
    assert tracer.profile(64).micro_batch == 64 and not tracer.is_fake
    assert math.isclose(tracer.profile(64).batch, 64 * 3 * 4)


def write_task(folder: Path, module: str, model: str, sample: str = "{'x': x, 'name': 'a'}") -> Recipe:
    """A task of one's own with that model, and samples of eight numbers with a name."""
    (folder / f"{module}.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Task:\n"
        f"    def model(self): return {model}\n"
        "    def datasets(self):\n"
        f"        return {{'train': [{sample} for x in torch.ones(8, 8)], 'val': None}}\n"
        "    def loss(self, model, batch):\n"
        "        assert len(batch['name']) == len(batch['x'])\n"
        "        return model(batch['x']).square().mean()\n"
    )
    return load_recipe([{"task": f"{module}:Task", "train": {"steps": 1, "global_batch": 8}}]).recipe


def test_samples_may_hold_what_is_no_tensor(here: Path) -> None:
    tracer = Tracer(write_task(here, "task_of_names", "nn.Linear(8, 1)"), on_gpu=False)
    assert tracer.profile(5).batch == 5 * 8 * 4 and tracer.is_fake
    assert tracer.shapes.make(5)["name"] == ["a"] * 5


def test_a_micro_batch_too_small_for_batch_norm_is_told_and_nothing_is_run_for_it(here: Path) -> None:
    model = "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))"
    tracer = Tracer(write_task(here, "task_with_norm", model), on_gpu=False)
    with pytest.raises(TooFewSamplesError, match="batch norm cannot train on 1 sample"):
        tracer.profile(1)
    assert tracer.profile(2).micro_batch == 2 and tracer.is_fake


def test_parameters_are_counted_without_a_step(here: Path) -> None:
    write_own_task(here, "task_to_count", "raise ZeroDivisionError('of the task')")
    tracer = Tracer(load_recipe([own_recipe("task_to_count")]).recipe, on_gpu=False)
    assert tracer.num_parameters() == 3
    whole = Tracer(recipe_of(GPT), on_gpu=False)
    parameters = whole.profile(2, Form(tensor=2)).parameters
    assert parameters < whole.num_parameters() == whole.profile(2).parameters


def test_a_pipeline_is_cut_between_all_modules_of_a_row(here: Path) -> None:
    twice = "(lambda same: nn.Sequential(nn.Identity(), nn.Linear(8, 8), nn.ReLU(), same, same))(nn.Linear(8, 8))"
    tracer = Tracer(write_task(here, "task_of_row", twice), on_gpu=False)
    plain, cut = tracer.profile(4), tracer.profile(4, Form(untied=True))
    assert len(plain.pieces) == 3 and [piece.name for piece in cut.pieces] == [*"01234", ""]
    assert plain.weights == cut.weights and cut.ends is not None and cut.ends[0].weights == cut.pieces[-1].weights == 0
    order = [phase.piece for phase in cut.phases if not phase.is_backward and phase.piece >= 0]
    assert order == [1, 2, 3, 4], "one that computes nothing has no phase, one that is there twice has two"
    for count in (2, 5):
        way = Way(ParallelSection(), "pipeline", Degrees(1, stages=count), 2, 2, "fp32", on_gpu=False)
        assert needed(cut, way).total > 0
    with pytest.raises(UserError, match=r"parallel.pipeline.stages: 6 workers need 6 blocks or more"):
        needed(cut, replace(way, degrees=Degrees(1, stages=6)))


def test_a_model_that_says_not_how_it_is_cut_cannot_be_a_pipeline(here: Path) -> None:
    tracer = Tracer(write_task(here, "task_uncut", "nn.Linear(8, 1)"), on_gpu=False)
    with pytest.raises(UserError, match=r"pipeline needs a model that says how it is cut, and Linear does not"):
        tracer.profile(4, Form(untied=True))


def test_what_is_wrong_with_a_model_is_told(here: Path) -> None:
    write_own_task(here, "task_that_fails", "raise ZeroDivisionError('of the task')")
    with pytest.raises(ZeroDivisionError, match="of the task"):
        Tracer(load_recipe([own_recipe("task_that_fails")]).recipe, on_gpu=False).profile(2)


def test_tracing_leaves_random_numbers_as_they_were() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Tracer(recipe_of(GPT, **{"model.dropout": 0.1}), on_gpu=False).profile(2)
    assert torch.equal(torch.rand(3), expected)
