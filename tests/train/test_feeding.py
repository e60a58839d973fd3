"""Which data resides on the GPU without being asked to."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.core.spec import DataSpec
from shoal.data.csv_text import trim_padding
from shoal.data.dataset import Datasets, MemoryDataset, in_one_go
from shoal.recipe.load import load_recipe
from shoal.train import feeding as module
from shoal.train.feeding import _may_reside, _room, plan_feeding
from tests.recipe.test_automatic import CNN, LSTM

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def held(*, trims: bool = False, rows: int = 10) -> Datasets:
    data = MemoryDataset(torch.zeros(rows, 4), transform=trim_padding if trims else None, trims=trims)
    return Datasets(data, data, DataSpec())


def may_reside(
    datasets: Datasets, tree: dict[str, Any] = CNN, overrides: tuple[str, ...] = (), room: float = 2e9
) -> bool:
    recipe = load_recipe([tree], list(overrides)).recipe
    return _may_reside(recipe.data, recipe.model, datasets, room)


def test_what_is_held_as_few_tensors_resides_on_a_gpu() -> None:
    assert may_reside(held()) and not may_reside(held(), room=_room(load_recipe([CNN]).recipe, CPU))
    tensors = in_one_go(TensorDataset(torch.zeros(4, 2), torch.zeros(4)))
    assert may_reside(Datasets(tensors, None, DataSpec()))


@pytest.mark.parametrize("override", ["data.workers=2", "data.transform_on=cpu"])
def test_what_a_recipe_wants_read_otherwise_does_not(override: str) -> None:
    assert not may_reside(held(), overrides=(override,))


def test_what_is_large_or_not_held_as_tensors_does_not() -> None:
    large = Datasets(MemoryDataset(torch.empty(1 << 20, 600, device="meta")), None, DataSpec())
    assert not may_reside(large)
    assert not may_reside(dataclasses.replace(held(), val=["anything", "else"]))


def test_data_take_a_tenth_of_what_a_worker_has_of_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    of_gpu = SimpleNamespace(total_memory=10e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: of_gpu)
    assert _room(load_recipe([CNN]).recipe, GPU) == 1e9
    assert _room(load_recipe([CNN], ["cluster.gpus_per_worker=0.25"]).recipe, GPU) == 0.25e9
    of_gpu.total_memory = 100e9
    assert _room(load_recipe([CNN]).recipe, GPU) == 2e9


@pytest.mark.parametrize("counts", [False, True])
def test_data_of_a_task_of_ones_own_resides_unless_it_counts(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its recipe has no data section; and what count() is given is on the host."""
    recipe = load_recipe([{"task": {"name": "mine:Task"}, "train": {"steps": 1, "global_batch": 2}}]).recipe
    count = (lambda batch: len(batch[0])) if counts else None
    monkeypatch.setattr(module, "_room", lambda recipe, device: 2e9)
    moved: list[Datasets] = []
    monkeypatch.setattr(module, "_resident", lambda datasets, *_: moved.append(datasets) or datasets)
    plan_feeding(recipe, held(), Objective(lambda *_: torch.zeros(()), lambda *_: {}, count), Process(0, 1, CPU))
    assert len(moved) == (0 if counts else 1)


def test_padding_is_only_left_in_for_models_that_it_does_not_matter_to() -> None:
    assert may_reside(held(trims=True), LSTM)
    own = LSTM | {"model": {"name": "mine:model"}}
    assert not may_reside(held(trims=True), own)


def test_on_a_gpu_padding_is_not_cut_off_and_other_transforms_stay() -> None:
    texts = MemoryDataset(
        torch.tensor([[1, 0, 0], [2, 3, 0]]), torch.tensor([0, 1]), transform=trim_padding, trims=True
    )
    assert texts.batch(np.array([0, 1]), 0)[0].shape == (2, 2) and texts.batch_transform is None
    assert texts.to(torch.device("meta")).transform is None
    doubled = MemoryDataset(torch.ones(2, 2), transform=lambda batch, indices, epoch: (batch[0] * 2,))
    assert doubled.to(torch.device("meta")).transform is doubled.transform is doubled.batch_transform
