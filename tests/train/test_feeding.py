"""Which data resides on the GPU without being asked to."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from shoal.core.spec import DataSpec
from shoal.data.csv_text import trim_padding
from shoal.data.dataset import Datasets, MemoryDataset, in_one_go
from shoal.recipe.load import load_recipe
from shoal.train.feeding import _may_reside
from tests.recipe.test_automatic import CNN, LSTM

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def held(*, trims: bool = False, rows: int = 10) -> Datasets:
    data = MemoryDataset(torch.zeros(rows, 4), transform=trim_padding if trims else None, trims=trims)
    return Datasets(data, data, DataSpec())


def may_reside(
    datasets: Datasets, tree: dict[str, Any] = CNN, overrides: tuple[str, ...] = (), device: torch.device = GPU
) -> bool:
    return _may_reside(load_recipe([tree], list(overrides)).recipe, datasets, device)


def test_what_is_held_as_few_tensors_resides_on_a_gpu() -> None:
    assert may_reside(held()) and not may_reside(held(), device=CPU)
    tensors = in_one_go(TensorDataset(torch.zeros(4, 2), torch.zeros(4)))
    assert may_reside(Datasets(tensors, None, DataSpec()))


@pytest.mark.parametrize("override", ["data.workers=2", "data.transform_on=cpu"])
def test_what_a_recipe_wants_read_otherwise_does_not(override: str) -> None:
    assert not may_reside(held(), overrides=(override,))


def test_what_is_large_or_not_held_as_tensors_does_not() -> None:
    large = Datasets(MemoryDataset(torch.empty(1 << 20, 600, device="meta")), None, DataSpec())
    assert not may_reside(large)
    assert not may_reside(dataclasses.replace(held(), val=["anything", "else"]))


def test_of_a_share_of_a_gpu_data_take_a_share() -> None:
    half = Datasets(MemoryDataset(torch.empty(1 << 20, 400, device="meta")), None, DataSpec())
    assert may_reside(half) and not may_reside(half, overrides=("cluster.gpus_per_worker=0.5",))


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
