"""Every sample once an epoch, in an order that (seed, epoch) alone decides, however the work is cut."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.order import Order, worker_slices

sizes = st.integers(1, 300)
batches = st.integers(1, 80)


@given(num_samples=sizes, global_batch=batches, seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_steps_of_an_epoch_take_every_sample_exactly_once(num_samples, global_batch, seed, epoch):
    order = Order(num_samples, global_batch, seed)
    first_step = epoch * order.steps_per_epoch
    permutation = order.permutation(epoch)
    seen = []
    for step in range(first_step, first_step + order.steps_per_epoch):
        assert order.epoch_of(step) == epoch
        start, end = order.bounds(step)
        assert start == (step - first_step) * global_batch
        assert 0 < end - start <= global_batch
        seen += permutation[start:end].tolist()
    assert seen == permutation.tolist()
    assert sorted(seen) == list(range(num_samples))


@given(num_samples=sizes, global_batch=batches)
def test_only_the_last_step_of_an_epoch_is_short(num_samples, global_batch):
    order = Order(num_samples, global_batch, 0)
    counts = [end - start for start, end in map(order.bounds, range(order.steps_per_epoch))]
    assert all(count == global_batch for count in counts[:-1])
    assert counts[-1] == (num_samples % global_batch or global_batch)


@given(
    count=st.integers(1, 200),
    first=st.integers(0, 1000),
    world_size=st.integers(1, 9),
    micro_batch=st.integers(1, 64),
)
def test_workers_share_a_step_without_gap_or_overlap(count, first, world_size, micro_batch):
    shares = [worker_slices(first, first + count, rank, world_size, micro_batch) for rank in range(world_size)]
    positions = [p for share in shares for start, end in share for p in range(start, end)]
    assert positions == list(range(first, first + count))
    assert len({len(share) for share in shares}) == 1, "collectives need the same number of micro-batches everywhere"
    assert all(end - start <= micro_batch for share in shares for start, end in share)
    sizes = [sum(end - start for start, end in share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@given(accumulation=st.integers(1, 5), world_size=st.integers(1, 6), micro_batch=st.integers(1, 16))
def test_a_full_step_is_cut_into_equal_micro_batches_that_do_not_depend_on_who_computes_them(
    accumulation, world_size, micro_batch
):
    global_batch = accumulation * world_size * micro_batch
    shares = [worker_slices(0, global_batch, rank, world_size, micro_batch) for rank in range(world_size)]
    by_workers = [part for share in shares for part in share]
    alone = worker_slices(0, global_batch, 0, 1, micro_batch)
    assert by_workers == alone
    assert all(end - start == micro_batch for start, end in alone)


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_the_permutation_depends_on_seed_and_epoch_alone(seed, epoch):
    one = Order(97, 8, seed).permutation(epoch)
    np.random.rand(3)
    other = Order(97, 32, seed).permutation(epoch)
    assert (one == other).all()


def test_epochs_and_seeds_differ():
    orders = {tuple(Order(50, 8, seed).permutation(epoch)) for seed in (0, 1, 2**32) for epoch in range(10)}
    assert len(orders) == 30


def test_the_order_is_the_same_in_every_version_of_shoal():
    assert Order(10, 4, seed=3).permutation(2).tolist() == [1, 5, 9, 4, 6, 7, 3, 8, 2, 0]
