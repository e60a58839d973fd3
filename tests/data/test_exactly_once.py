"""Every sample once an epoch and the same samples in every step, for every loader, however many workers there are,
wherever they are killed, and whatever number goes on."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.choose import Streaming, choose_loader, make_order
from shoal.data.dataset import MemoryDataset
from shoal.data.iterable import IterableRows
from shoal.data.loader import Loading, train_batches
from shoal.data.shards.sharded import ShardedRows
from shoal.data.shards.store import LocalStore
from shoal.data.tokens import TokenDataset
from tests.data.shards.making import write_json_lines, write_tokens


class Items(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index


class Passing(torch.utils.data.IterableDataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter(range(self.size))


class Ids(ShardedRows):
    """Rows of shards, of which only the number is handed out."""

    def batch(self, indices, epoch):
        return torch.tensor(self.rows(indices, lambda row, place: row["id"]))


class FirstTokens(TokenDataset):
    """Windows of which only the number is handed out, by the token they begin with."""

    def batch(self, indices, epoch):
        return super().batch(indices, epoch)[0][:, 0]


KINDS = ("memory", "map", "iterable", "stream", "tokens")


def make(kind, folder, rows):
    """A dataset of `sum(rows)` samples that hands out a number for each, all different."""
    size = sum(rows)
    if kind == "memory":
        return MemoryDataset(torch.arange(size))
    if kind == "map":
        return Items(size)
    if kind == "iterable":
        return IterableRows(Passing(size), 0)
    if kind == "stream":
        index = write_json_lines(folder, rows)
        return Ids(index, LocalStore(folder, index))
    index = write_tokens(folder, [count * 3 + 1 for count in rows])  # windows of three tokens
    return FirstTokens(index, LocalStore(folder, index), "uint16", 50_000, context=3, stride=3, keep_last=False)


def numbers(batch):
    return (batch[0] if isinstance(batch, tuple) else batch).tolist()


def read(dataset, order, first, last, world_size, workers=0):
    """The samples of every step, over all workers, as a run of `world_size` workers reads them."""
    shares = [
        list(train_batches(dataset, order, first, last, rank=rank, world_size=world_size, micro_batch=3,
                           loading=Loading(workers=workers)))
        for rank in range(world_size)
    ]  # fmt: skip
    return [
        [number for part in parts for micro in part.microbatches if micro.num_samples for number in numbers(micro.data)]
        for parts in zip(*shares, strict=True)
    ]


lives = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=5)
"""Of workers: how many, for how many steps, and how many of these were not saved yet when they were killed."""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    rows=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    window=st.integers(1, 60),
    lanes=st.integers(1, 6),
    global_batch=st.integers(4, 14),
    lives=lives,
)
def test_killed_and_resized(kind, tmp_path_factory, rows, window, lanes, global_batch, lives):
    dataset = make(kind, tmp_path_factory.mktemp("data"), rows)
    asked = "stream" if kind == "tokens" else "auto"
    order = make_order(dataset, choose_loader(asked, dataset), global_batch, 7, Streaming(window, lanes))
    num_steps = 3 * order.steps_per_epoch
    reference = read(dataset, order, 0, num_steps, world_size=1)
    taken, step = {}, 0
    for world_size, length, lost in [*lives, (2, num_steps, 0)]:
        last = min(step + length, num_steps)
        for number, samples in enumerate(read(dataset, order, step, last, world_size), step):
            assert samples == taken.get(number, samples), "a step that is done again has the same samples"
            taken[number] = samples
        step = max(step, last - lost)
    assert [taken[number] for number in range(num_steps)] == reference
    for epoch in range(3):
        steps = reference[epoch * order.steps_per_epoch : (epoch + 1) * order.steps_per_epoch]
        assert all(len(samples) == global_batch for samples in steps[:-1])
        seen = Counter(number for samples in steps for number in samples)
        assert len(seen) == len(dataset) and set(seen.values()) == {1}, "every sample once an epoch"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in ("memory", "tokens") else ()) for kind in KINDS]
)
def test_by_processes_that_read_ahead(kind, tmp_path):
    dataset = make(kind, tmp_path / "data", [9, 14, 1, 20])
    order = make_order(dataset, choose_loader("auto", dataset), 8, 3, Streaming(16, 2))
    reference = read(dataset, order, 0, 11, world_size=1)
    for world_size in (1, 2, 3, 4):
        workers = 1 if kind == "iterable" else world_size % 3 + 1
        assert read(dataset, order, 0, 5, world_size, workers) + read(dataset, order, 5, 11, world_size) == reference


def test_the_number_of_readers_changes_on_the_way_and_nothing_else_does(monkeypatch):
    from shoal.data import how_many

    monkeypatch.setattr(how_many, "_SECONDS", 0.0)
    monkeypatch.setattr(how_many, "_SHORT_S", 0.0)
    monkeypatch.setattr(how_many, "_BORNE", 0.0)
    dataset = Items(100)
    order = make_order(dataset, "map", 4, 0, None)
    loading = Loading(workers="auto", most_workers=3)
    steps = list(train_batches(dataset, order, 0, 60, micro_batch=4, loading=loading))
    assert loading.statistics.workers == 3
    plain = train_batches(dataset, order, 0, 60, micro_batch=4)
    assert [numbers(s.microbatches[0].data) for s in steps] == [numbers(s.microbatches[0].data) for s in plain]


def test_an_order_that_is_asked_for_must_fit_the_data():
    from shoal.core.errors import UserError

    for asked, dataset, words in [
        ("stream", Items(3), "stream reads samples in files, which Items has not"),
        ("memory", Items(3), "memory is for data that is in memory"),
        ("ray", IterableRows(Passing(3), 0), "ray reads samples in any order"),
    ]:
        with pytest.raises(UserError, match=f"^data.loader: {words}"):
            choose_loader(asked, dataset)
    assert choose_loader("map", MemoryDataset(torch.arange(3))) == "map"
    assert np.array_equal(make_order(IterableRows(Passing(3), 0), "map", 2, 0, None).permutation(0), [0, 1, 2])
