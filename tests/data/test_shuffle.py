"""Orders of an epoch: permutations all, any stretch of them the same however it is asked for."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.order import Order, worker_slices
from shoal.data.shuffle import MOST_PERMUTED, InOrder, Scrambled, Windows, permuted

files = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any)


def windowed(rows, window, lanes, global_batch, seed=0):
    windows = Windows(np.array(rows), window, lanes)
    return Order(sum(rows), global_batch, seed, windows)


@given(rows=files, window=st.integers(1, 90), lanes=st.integers(1, 9), global_batch=st.integers(1, 40),
       epoch=st.integers(0, 3), seed=st.integers(0, 2**40))  # fmt: skip
def test_windows_take_every_sample_once(rows, window, lanes, global_batch, epoch, seed):
    order = windowed(rows, window, lanes, global_batch, seed)
    assert sorted(order.permutation(epoch).tolist()) == list(range(sum(rows)))


@given(rows=files, window=st.integers(1, 90), lanes=st.integers(1, 9), global_batch=st.integers(1, 40),
       cuts=st.lists(st.integers(0, 700), max_size=6))  # fmt: skip
def test_a_stretch_is_the_same_however_it_is_asked_for(rows, window, lanes, global_batch, cuts):
    order = windowed(rows, window, lanes, global_batch)
    edges = sorted({0, sum(rows), *(cut % (sum(rows) + 1) for cut in cuts)})
    pieces = [order.in_epoch(1).take(a, b) for a, b in itertools.pairwise(edges)]
    assert np.concatenate(pieces).tolist() == order.permutation(1).tolist()


@given(rows=files, window=st.integers(1, 60), lanes=st.integers(1, 8), per_worker=st.integers(1, 8),
       world_size=st.integers(1, 5), step=st.integers(0, 30))  # fmt: skip
def test_the_files_that_a_worker_is_told_of_are_those_it_reads(rows, window, lanes, per_worker, world_size, step):
    order = windowed(rows, window, lanes, per_worker * world_size)
    step %= order.steps_per_epoch
    for rank in range(world_size):
        in_epoch, starts = order.in_epoch(0), order.windows.starts
        first_slot, last_slot = rank * per_worker, (rank + 1) * per_worker
        told = list(in_epoch.files_from(step, first_slot, last_slot))
        read = set()
        for number in range(step, order.steps_per_epoch):
            for first, last in worker_slices(*order.bounds(number), rank, world_size, 10**6):
                read |= set((np.searchsorted(starts, in_epoch.take(first, last), side="right") - 1).tolist())
        assert read <= {file for _, window_files in told for file in window_files}


def test_files_are_told_in_the_order_of_need():
    order = windowed([10] * 40, window=40, lanes=4, global_batch=8)
    in_epoch, starts = order.in_epoch(0), order.windows.starts
    told = [set(files) for _, files in in_epoch.files_from(20, 0, 2)]
    first_lane = np.concatenate([in_epoch.take(step * 8, step * 8 + 2) for step in range(20, 50)])
    read = (np.searchsorted(starts, first_lane, side="right") - 1).reshape(-1, 10)  # 40 // 4 samples a window
    assert [step for step, _ in in_epoch.files_from(20, 0, 2)] == [20, 25, 30, 35, 40, 45]
    assert [set(row.tolist()) <= files for row, files in zip(read, told, strict=True)] == [True] * len(told)


def test_a_lane_stays_with_a_worker_so_that_few_machines_read_a_file():
    order = windowed([50] * 64, window=400, lanes=16, global_batch=64)
    in_epoch, starts = order.in_epoch(0), order.windows.starts

    def files_of(rank, world_size):
        samples = [in_epoch.take(s * 64 + rank * 64 // world_size, s * 64 + (rank + 1) * 64 // world_size)
                   for s in range(order.steps_per_epoch)]  # fmt: skip
        return set((np.searchsorted(starts, np.concatenate(samples), side="right") - 1).tolist())

    for world_size in (2, 4, 8):
        read = [len(files_of(rank, world_size)) for rank in range(world_size)]
        assert sum(read) <= 64 + 2 * 16, "hardly a file is read by two workers"


def test_neighbours_in_a_file_are_pulled_apart():
    order = windowed([100] * 50, window=1000, lanes=4, global_batch=20)
    taken = order.permutation(0)
    assert np.mean(np.abs(np.diff(taken)) == 1) < 0.02
    assert (order.permutation(1) != taken).mean() > 0.9


@given(num=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_scrambling_is_a_permutation(num, key):
    assert sorted(Scrambled(num, key).take(0, num).tolist()) == list(range(num))


def test_scrambling_mixes_as_well_as_a_permutation():
    taken = Scrambled(100_000, 7).take(0, 100_000)
    assert abs(np.corrcoef(np.arange(100_000), taken)[0, 1]) < 0.02
    assert np.abs(np.diff(taken)).mean() == pytest.approx(100_000 / 3, rel=0.03)
    halves = np.histogram2d(np.arange(100_000), taken, bins=20)[0]
    assert ((halves - 250) ** 2 / 250).sum() < 480, "chi-squared over 400 squares"


@pytest.mark.alone
def test_large_sets_are_ordered_without_memory_or_waiting():
    started = time.perf_counter()
    order = Order(10**11, 4096, 3)
    taken = [order.in_epoch(order.epoch_of(step)).take(*order.bounds(step)) for step in (0, 10**6, 10**9)]
    assert time.perf_counter() - started < 0.5
    assert all(len(set(step.tolist())) == 4096 and step.max() < 10**11 for step in taken)
    assert isinstance(permuted(MOST_PERMUTED + 1, 0, 0), Scrambled)


def test_orders_are_the_same_in_every_version_of_shoal():
    assert Scrambled(1000, 5).take(10, 16).tolist() == [400, 937, 406, 984, 21, 891]
    order = windowed([5, 3, 9, 2], window=6, lanes=2, global_batch=4, seed=3)
    assert order.permutation(2).tolist() == [6, 7, 11, 13, 5, 18, 12, 16, 17, 8, 15, 14, 10, 9, 1, 0, 3, 4, 2]


def test_in_order():
    assert InOrder().take(3, 6).tolist() == [3, 4, 5]
    assert Order(5, 2, 0, is_shuffled=False).permutation(7).tolist() == [0, 1, 2, 3, 4]
