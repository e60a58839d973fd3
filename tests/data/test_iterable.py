"""Datasets that can only be gone through."""

import random

import numpy as np
import pytest
import torch

from shoal.core.errors import UserError
from shoal.data.iterable import IterableRows


class Passing(torch.utils.data.IterableDataset):
    def __init__(self, size, told=None):
        self.size, self.told, self.epoch = size, told or size, 0

    def __len__(self):
        return self.told

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return ((self.epoch, number, random.random()) for number in range(self.size))


def test_samples_by_their_place():
    rows = IterableRows(Passing(10), seed=1)
    epochs, numbers, chance = rows.batch(np.array([2, 3, 7]), 4)
    assert epochs.tolist() == [4] * 3 and numbers.tolist() == [2, 3, 7] and len(rows) == 10
    assert rows.batch(np.array([8]), 4)[1].tolist() == [8]
    again = IterableRows(Passing(10), seed=1).batch(np.array([7]), 4)
    assert again[2][0] == chance[2], "random numbers depend on seed, epoch and sample alone"
    assert rows.batch(np.array([0]), 4)[1].tolist() == [0], "going back begins anew"
    assert rows.batch(np.array([1]), 5)[0].tolist() == [5]


def test_a_length_that_is_not_true():
    with pytest.raises(UserError, match=r"^data: Passing ended after 5 samples, and its length is 9; correct its"):
        IterableRows(Passing(5, 9), seed=0).batch(np.array([4, 5]), 0)
