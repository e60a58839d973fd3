"""Steps recorded as CUDA graphs give the very bits of usual ones: also after a resume, and where some are not alike."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.core.rng import capture_rng, restore_rng
from shoal.parallel.numerics import torch_settings
from shoal.parallel.single import SingleUnit
from shoal.parallel.unit import UnitState
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from shoal.train.build import build

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
STEPS, KEPT_AT = 24, 9


def images(*shape: int) -> dict[str, Any]:
    return {"name": "synthetic", "samples": 1000, "val_samples": 8, "shape": list(shape), "classes": 10}


IMAGES = {"task": "image_classification"}
SGD = {"name": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True}
CASES: dict[str, dict[str, Any]] = {
    "mlp": IMAGES | {"model": {"name": "mlp", "dropout": 0.1}, "data": images(1, 28, 28)},
    "cnn_sgd": IMAGES | {"model": {"name": "simple_cnn", "dropout": 0.25}, "data": images(1, 28, 28), "optim": SGD},
    "vit": IMAGES | {"model": {"name": "vit", "layers": 2}, "data": images(3, 32, 32)},
    "gpt": {
        "task": "language_modelling",
        "model": {"name": "gpt", "layers": 2, "heads": 4, "dim": 128, "dropout": 0.1},
        "data": {"name": "tokens", "context": 128},
    },
}


def recipe_of(name: str, folder: Path, **train: Any) -> Recipe:
    tree = CASES[name]
    if tree["task"] == "language_modelling":
        for file in ("train.bin", "val.bin"):
            (np.random.default_rng(0).integers(0, 50_000, 40_000)).astype("<u2").tofile(folder / file)
        tree = tree | {"data": tree["data"] | {"dir": str(folder)}}
    # 64 does not divide 1000: the last step of an epoch is of another size.
    own = {"steps": 100, "global_batch": 64, "clip_norm": 1.0, "deterministic": True} | train
    return load_recipe([tree | {"train": own}]).recipe


@dataclasses.dataclass
class Trained:
    weights: dict[str, torch.Tensor]
    losses: list[float]
    kept: tuple[UnitState, Any] | None
    unit: SingleUnit


def trained(recipe: Recipe, device: torch.device, resumed: tuple[UnitState, Any] | None = None) -> Trained:
    with torch_settings(deterministic=recipe.train.deterministic, device=device):
        torch.manual_seed(1)
        built = build(recipe, Process(0, 1, device))
        unit, losses, kept, start = built.unit, [], None, 0
        assert isinstance(unit, SingleUnit)
        if resumed is not None:
            unit.load(resumed[0])
            restore_rng(resumed[1], device)
            start = KEPT_AT
        for number, batch in enumerate(built.batches(start, STEPS), start):
            loss = unit.forward_backward(batch)
            losses.append(sum(float(term) * weight for term, weight in loss.terms) / float(loss.count))
            unit.optimizer_step(1e-3 * (1 + number % 3))
            if number + 1 == KEPT_AT:
                state = unit.state()
                copies = {name: tensor.detach().clone() for name, tensor in state.tensors.items()}  # type: ignore[union-attr]
                kept = dataclasses.replace(state, tensors=copies), capture_rng(device)
        weights = {name: tensor.detach().clone() for name, tensor in unit.state().tensors.items()}  # type: ignore[union-attr]
    return Trained(weights, losses, kept, unit)


def different(one: Trained, other: Trained) -> list[str]:
    return [name for name in one.weights if not torch.equal(one.weights[name], other.weights[name])]


@needs_gpu
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CASES)
def test_not_a_bit_changes(name: str, compiles: bool, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    recorded = trained(recipe_of(name, tmp_path, compile=compiles, cuda_graphs=True), device)
    usual = trained(recipe_of(name, tmp_path, compile=compiles, cuda_graphs=False), device)
    assert recorded.unit.recorded is not None and recorded.unit.recorded._recording is not None
    assert usual.unit.recorded is None
    assert recorded.losses == usual.losses and not different(recorded, usual)
    resumed = trained(recipe_of(name, tmp_path, compile=compiles, cuda_graphs=True), device, recorded.kept)
    assert resumed.losses == recorded.losses[KEPT_AT:] and not different(resumed, recorded)


@needs_gpu
def test_what_cannot_be_recorded_is_refused_by_name(tmp_path: Path) -> None:
    recipe = recipe_of("mlp", tmp_path, compile=False, cuda_graphs=True)
    built = build(recipe, Process(0, 1, torch.device("cuda", 0)))
    unit = built.unit
    assert isinstance(unit, SingleUnit)
    plain = unit.loss_of

    def looks_at_values(batch: Any) -> Any:
        loss = plain(batch)
        assert float(loss) >= 0  # which waits for the GPU
        return loss

    unit.loss_of = looks_at_values
    with pytest.raises(UserError, match=r"train\.cuda_graphs: this step cannot be recorded .*; set it to false"):
        for batch in built.batches(0, 8):
            unit.forward_backward(batch)
            unit.optimizer_step(1e-3)


@needs_gpu
def test_the_gradient_norm_that_is_told_is_that_of_the_step(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    norms = []
    for graphs in (True, False):
        built = build(recipe_of("mlp", tmp_path, compile=False, cuda_graphs=graphs), Process(0, 1, device))
        norms.append([])
        for batch in built.batches(0, STEPS):  # with the last, shorter one of an epoch among them
            built.unit.forward_backward(batch)
            built.unit.optimizer_step(1e-3)
            norms[-1].append(built.unit.report()["grad_norm"])
    assert norms[0] == norms[1] and len(set(norms[0])) == STEPS


@needs_gpu
def test_nothing_is_recorded_unasked_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1 << 60)
    unit = trained(recipe_of("mlp", tmp_path, compile=False, cuda_graphs="auto"), device).unit
    assert unit.recorded is not None and unit.recorded._recording is None


def test_on_a_cpu_nothing_is_recorded(tmp_path: Path) -> None:
    device = torch.device("cpu")
    assert trained(recipe_of("mlp", tmp_path, cuda_graphs="auto", deterministic=False), device).unit.recorded is None
    with pytest.raises(UserError, match=r"train\.cuda_graphs: needs a GPU and this worker has none"):
        trained(recipe_of("mlp", tmp_path, cuda_graphs=True, deterministic=False), device)


@pytest.mark.parametrize("name", ["cnn_sgd", "mlp"])
def test_channels_last_learns_the_same_and_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    device = torch.device("cpu")
    plain = trained(recipe_of(name, tmp_path, deterministic=False), device)
    whole = trained(recipe_of(name, tmp_path, deterministic=False, channels_last=True), device)
    assert whole.losses == pytest.approx(plain.losses, rel=1e-2)
    assert whole.losses[:3] == pytest.approx(plain.losses[:3], rel=1e-4)
    resumed = trained(recipe_of(name, tmp_path, deterministic=False, channels_last=True), device, whole.kept)
    assert not different(resumed, whole)
    other_layout = trained(recipe_of(name, tmp_path, deterministic=False), device, whole.kept)
    assert other_layout.losses == pytest.approx(whole.losses[KEPT_AT:], rel=1e-2)
    if name == "cnn_sgd":
        weight = whole.unit.model.get_parameter("stages.1.0.weight")
        assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
