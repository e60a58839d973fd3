"""What FSDP2 divides by itself, what it leaves whole, and weights that are handed over one at a time."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from shoal.core.deferred import Deferred
from shoal.core.process import Process
from shoal.models.gpt import Gpt
from shoal.models.resnet import BasicBlock, ResNet
from shoal.parallel.section import FsdpSection, OptimSection
from shoal.parallel.sharding import fill, shard_model, undivided
from shoal.parallel.unit import StepSettings
from tests.many import CPU


class Blocks(nn.Module):
    """Three blocks; some of their weights may be one."""

    def __init__(self, ties: str = "") -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        if ties == "blocks":
            self.blocks[2][0].weight = self.blocks[0][0].weight
        elif ties == "outside":
            self.before.weight = self.blocks[1][0].weight
        elif ties == "scalar":
            for block in self.blocks:
                block.scale = self.scale


MODELS = {
    "gpt": lambda: Gpt(11, 4, layers=3, heads=2, dim=8),
    "resnet": lambda: ResNet(BasicBlock, (1, 1, 1, 1), 3, 10, width=4, small_stem=True),
    "row": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.BatchNorm1d(6, affine=False)),
    "blocks": Blocks,
    "blocks tied": lambda: Blocks("blocks"),
    "tied outside": lambda: Blocks("outside"),
    "scalar in each": lambda: Blocks("scalar"),
}


def divide(process: Process, name: str, precision: str = "fp32", **fields: object) -> tuple[list[str], list[str]]:
    """What is gathered by itself, and what is not divided."""
    model = MODELS[name]()
    mesh = init_device_mesh("cpu", (process.world_size,), mesh_dim_names=("shards",))
    settings = StepSettings(optim=OptimSection(), precision=precision)
    shard_model(model, mesh, FsdpSection(**fields), settings, CPU)
    whole = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "device_mesh")]
    assert [id(parameter) for parameter in undivided(model)] == [id(model.get_parameter(name)) for name in whole]
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)], whole


@pytest.mark.parametrize(
    ("name", "gathered", "whole"),
    [
        ("gpt", ["", "blocks.0", "blocks.1", "blocks.2"], []),
        ("blocks", ["", "blocks.0", "blocks.1", "blocks.2"], ["scale"]),
        ("blocks tied", ["", "blocks.1"], ["scale"]),
        ("tied outside", ["", "blocks.0", "blocks.2"], ["scale"]),
        ("scalar in each", ["", "blocks.0", "blocks.1", "blocks.2"], ["scale"]),
    ],
)
def test_each_block_is_gathered_by_itself_unless_it_shares_weights(ranks, name, gathered, whole):
    assert ranks(2)(divide, name) == [(gathered, whole)] * 2


def test_batch_norms_stay_in_full_precision(ranks):
    plain, _ = ranks(2)(divide, "resnet")[0]
    mixed, _ = ranks(2)(divide, "resnet", "bf16")[0]
    asked, _ = ranks(2)(divide, "resnet", param_dtype="bf16")[0]
    norms = {name for name, module in MODELS["resnet"]().named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert set(mixed) == set(asked) == set(plain) | norms and norms
    assert set(ranks(2)(divide, "resnet", "bf16", param_dtype="fp32")[0][0]) == set(plain)
    assert ranks(2)(divide, "row", "bf16")[0] == (["", "0", "1", "2"], [])


class Watched:
    """Weights of a deferred model, that looks whether those it gave before are gone."""

    def __init__(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.weights = weights
        self.kept: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        given: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        for name, whole in self.weights:
            self.kept += [other for other, tensor in given if tensor() is not None]
            given = [(name, weakref.ref(whole))]
            yield name, whole
            del whole


def fill_watched(process: Process) -> tuple[list[str], bool, bool]:
    torch.manual_seed(1)
    eager = Blocks("blocks")
    torch.manual_seed(1)
    deferred = Deferred(lambda: Blocks("blocks"))
    mesh = init_device_mesh("cpu", (process.world_size,), mesh_dim_names=("shards",))
    shard_model(deferred.model, mesh, FsdpSection(), StepSettings(optim=OptimSection()), CPU)
    watched = Watched(deferred.weights())
    fill(deferred.model, watched, CPU)
    model = deferred.model
    tied = model.blocks[2][0].weight is model.blocks[0][0].weight
    same = all(
        torch.equal(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor, eager.state_dict()[name])
        for name, tensor in model.state_dict().items()
    )
    return watched.kept, tied, same


def test_weights_are_taken_one_at_a_time_and_never_kept(ranks):
    assert ranks(2)(fill_watched) == [([], True, True)] * 2


def test_a_weight_that_nobody_hands_over_is_missed():
    deferred = Deferred(lambda: nn.Linear(2, 2))
    with pytest.raises(AssertionError, match=r"no initial weights for \['bias'\]"):
        fill(deferred.model, [("weight", torch.ones(2, 2))], CPU)


def test_what_is_the_same_in_several_places_stays_so_in_memory():
    def build() -> nn.Module:
        model = nn.Module()
        model.first, model.second = nn.Linear(3, 3), nn.Linear(3, 3)
        model.second.weight = model.first.weight
        model.scale = model.first.scale = nn.Parameter(torch.tensor(1.5))
        model.register_buffer("mask", torch.ones(3))
        model.second.register_buffer("mask", model.mask, persistent=False)
        return model

    torch.manual_seed(1)
    deferred = Deferred(build)
    fill(deferred.model, deferred.weights(), CPU)
    model = deferred.model
    assert model.second.weight is model.first.weight and model.first.scale is model.scale
    assert model.second.mask is model.mask and model.scale.item() == 1.5
    torch.manual_seed(1)
    expected = build()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name])
