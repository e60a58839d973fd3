"""Batches by step: whole or item by item, in line or by worker processes, from any step on."""

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import time
import traceback
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.data.dataset import MemoryDataset, in_one_go
from shoal.data.loader import Evaluation, Loading, evaluation_batches, train_batches
from shoal.data.order import Order


class Recording:
    """Hands out the indices it is asked for, and remembers them."""

    def __init__(self, size):
        self.size = size
        self.asked = []

    def __len__(self):
        return self.size

    def batch(self, indices, epoch):
        self.asked += indices.tolist()
        return torch.from_numpy(indices.copy()), epoch


class RandomItems(torch.utils.data.Dataset):
    """Items as users write them: random through every generator there is."""

    def __init__(self, size=23):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(2)


class FailsAt(RandomItems):
    def __getitem__(self, index):
        if index == 7:
            raise UserError("data.dir: file 7 is corrupt; delete it")
        return index


@given(
    size=st.integers(1, 60),
    accumulation=st.integers(1, 3),
    micro_batch=st.integers(1, 8),
    world_size=st.integers(1, 4),
    epochs=st.integers(1, 3),
)
def test_every_sample_once_an_epoch_over_all_workers(size, accumulation, micro_batch, world_size, epochs):
    global_batch = accumulation * micro_batch * world_size
    order = Order(size, global_batch, seed=1)
    seen = Counter()
    num_steps = epochs * order.steps_per_epoch
    ranks = [
        list(
            train_batches(
                Recording(size), order, 0, num_steps, rank=rank, world_size=world_size, micro_batch=micro_batch
            )
        )
        for rank in range(world_size)
    ]
    for number, parts in enumerate(zip(*ranks, strict=True)):
        start, end = order.bounds(number)
        positions = order.permutation(order.epoch_of(number))[start:end].tolist()
        counted = [[micro for micro in part.microbatches if micro.num_samples] for part in parts]
        taken = [index for micros in counted for micro in micros for index in micro.data[0].tolist()]
        assert taken == positions, "in the order of the ranks, whatever their number"
        seen.update(taken)
        shares = [sum(micro.num_samples for micro in micros) for micros in counted]
        assert shares[0] == max(shares) <= min(shares) + 1
        assert len(counted[0]) == len(parts[0].microbatches), (
            "the first worker, whose statistics count, computes them all"
        )
        for part in parts:
            assert part.num_samples == end - start
            assert len(part.microbatches) == len(parts[0].microbatches), "collectives need as many from everybody"
            assert all(micro.data[1] == order.epoch_of(number) for micro in part.microbatches)
            assert all(0 < len(micro.data[0]) <= micro_batch for micro in part.microbatches if micro.num_samples)
            for stand_in in (micro for micro in part.microbatches if not micro.num_samples):
                assert stand_in.data[0].tolist() == positions[:2]
    assert len(ranks[0]) == num_steps and seen == Counter(dict.fromkeys(range(size), epochs))


@given(size=st.integers(1, 50), global_batch=st.integers(1, 12), start=st.integers(0, 40))
def test_starting_at_a_step_reads_nothing_before_it(size, global_batch, start):
    order = Order(size, global_batch, seed=2)
    end = start + 5
    whole, rest = Recording(size), Recording(size)
    all_steps = list(train_batches(whole, order, 0, end, micro_batch=global_batch))
    resumed = list(train_batches(rest, order, start, end, micro_batch=global_batch))
    assert [s.microbatches[0].data[0].tolist() for s in resumed] == [
        s.microbatches[0].data[0].tolist() for s in all_steps[start:]
    ]
    assert len(rest.asked) == sum(step.num_samples for step in resumed), "resuming must not replay the epoch"


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_random_items_are_the_same_whoever_reads_them_and_from_wherever(workers):
    dataset, order = RandomItems(), Order(23, 5, seed=4)

    def read(start, workers):
        torch.rand(start + 1)  # other code draws in between
        steps = train_batches(dataset, order, start, 9, micro_batch=5, loading=Loading(workers=workers))
        return [[t.tolist() for t in micro.data] for step in steps for micro in step.microbatches]

    reference = read(0, 0)
    assert read(0, workers) == reference
    assert read(4, workers) == reference[4:]


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_does_not_move_the_generators_that_the_model_draws_from(workers):
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    list(train_batches(RandomItems(), Order(23, 5, 0), 0, 5, micro_batch=5, loading=Loading(workers=workers)))
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_augmentation_changes_from_epoch_to_epoch():
    dataset, order = RandomItems(4), Order(4, 4, seed=0)
    first, second = [dict(zip(s.microbatches[0].data[0].tolist(), s.microbatches[0].data[1].tolist(), strict=True))
                     for s in train_batches(dataset, order, 0, 2, micro_batch=4)]  # fmt: skip
    assert all(first[index] != second[index] for index in range(4))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_users_error_in_a_loader_worker_arrives_as_it_was_raised(workers):
    steps = train_batches(FailsAt(8), Order(8, 4, 0), 0, 2, micro_batch=4, loading=Loading(workers=workers))
    with pytest.raises(UserError) as caught:
        list(steps)
    assert str(caught.value) == "data.dir: file 7 is corrupt; delete it"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_sample_that_a_users_code_fails_at_is_named(workers):
    class Fails(RandomItems):
        def __getitem__(self, index):
            return 1 // (index - 5)

    steps = train_batches(Fails(8), Order(8, 4, 0), 0, 2, micro_batch=4, loading=Loading(workers=workers))
    with pytest.raises(ZeroDivisionError) as caught:
        list(steps)
    told = "".join(traceback.format_exception(caught.value))
    assert "(sample 5; data.on_error=skip leaves such samples out)" in told


PROGRAM = """
import os, sys, time
from shoal.data.loader import Loading, train_batches
from shoal.data.order import Order

class Items:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(0 if index < 4 else {longest_s})
        return index

order = Order(64, 4, 0, is_shuffled=False)
batches = train_batches(Items(), order, 0, 16, micro_batch=4, loading=Loading(4))
next(batches)
{then}
"""


@pytest.mark.parametrize("longest_s", [0, 600])
def test_a_program_that_ends_with_batches_still_unread_ends_at_once(longest_s):
    then = "time.sleep(1)\nraise ValueError('of the user, while `batches` is alive')"
    began = time.monotonic()
    program = PROGRAM.format(longest_s=longest_s, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1].startswith("ValueError"), done.stderr  # and nothing of processes after it
    assert time.monotonic() - began < 40  # it took a minute more: the processes gave themselves that long


def test_a_fork_that_ends_leaves_the_processes_of_the_program_alone():
    then = "child = os.fork()\nif child == 0: sys.exit(0)\nos.waitpid(child, 0)\nprint(1 + len(list(batches)))"
    program = PROGRAM.format(longest_s=0, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "16\n", done.stderr


def test_what_nobody_holds_any_more_has_no_processes():
    def children() -> set[int | None]:
        return {child.pid for child in multiprocessing.active_children()}

    of_others = children()
    evaluation = Evaluation(RandomItems(8), batch=4, loading=Loading(workers=2))
    assert len(list(evaluation.batches())) == 2
    readers = children() - of_others
    assert len(readers) == 2
    del evaluation
    gc.collect()
    assert not children() & readers


def test_loader_workers_are_not_in_the_process_group_that_signals_go_to():
    class WhoReads(RandomItems):
        def __getitem__(self, index):
            return os.getpgrp(), os.getpid()

    (step,) = train_batches(WhoReads(4), Order(4, 4, 0), 0, 1, micro_batch=4, loading=Loading(workers=1))
    groups, pids = step.microbatches[0].data
    assert set(groups.tolist()) == set(pids.tolist()) and os.getpgrp() not in groups.tolist()


@given(size=st.integers(1, 100), batch=st.integers(1, 40), world_size=st.integers(1, 5))
def test_evaluation_takes_every_sample_once(size, batch, world_size):
    parts = [
        list(evaluation_batches(Recording(size), rank=rank, world_size=world_size, batch=batch))
        for rank in range(world_size)
    ]
    assert len({len(part) for part in parts}) == 1, "collectives need as many from everybody"
    counted = [micro for part in parts for micro in part if micro.num_samples]
    assert all(micro.num_samples == len(micro.data[0]) <= batch for micro in counted)
    assert [index for micro in counted for index in micro.data[0].tolist()] == list(range(size))
    assert all(len(micro.data[0]) in (1, 2) for part in parts for micro in part if not micro.num_samples)


def test_a_dataset_may_bring_its_own_collate():
    class Ragged(RandomItems):
        def __getitem__(self, index):
            return [index] * index

        def collate(self, items):
            return [value for item in items for value in item]

    (step,) = train_batches(Ragged(4), Order(4, 4, 0), 0, 1, micro_batch=4)
    assert sorted(step.microbatches[0].data) == [1, 2, 2, 3, 3, 3]


def test_memory_datasets_are_read_whole():
    dataset = MemoryDataset(torch.arange(10) * 10, torch.arange(10))
    values, labels = dataset.batch(np.array([3, 1]), 0)
    assert values.tolist() == [30, 10] and labels.tolist() == [3, 1]


def test_tensor_datasets_of_the_users_own_are_read_whole_too():
    tensors = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    plain = torch.utils.data.TensorDataset(*tensors)
    order = Order(6, 4, seed=1)
    by_item = [step.microbatches[0].data for step in train_batches(plain, order, 0, 2, micro_batch=4)]
    whole = [step.microbatches[0].data for step in train_batches(in_one_go(plain), order, 0, 2, micro_batch=4)]
    assert isinstance(in_one_go(plain), MemoryDataset) and in_one_go([1]) == [1] and in_one_go(None) is None
    for one, other in zip(by_item, whole, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
