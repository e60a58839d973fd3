import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.windows import IGNORE, WindowDataset, count_windows, read_windows


@given(num_ids=st.integers(2, 200), context=st.integers(1, 50))
def test_side_by_side_every_id_but_the_first_is_a_target_once(num_ids, context):
    ids = np.arange(num_ids)
    data = WindowDataset(ids, context, context, keep_last=True)
    inputs, targets = data.batch(np.arange(len(data)), 0)
    assert inputs.shape == targets.shape == (len(data), context)
    counted = targets != IGNORE
    assert targets[counted].tolist() == list(range(1, num_ids))
    assert inputs[counted].tolist() == list(range(num_ids - 1))  # each is predicted from the id before it
    assert counted.any(1).all()  # no window without a target


@given(num_ids=st.integers(2, 200), context=st.integers(1, 50), stride=st.integers(1, 60))
def test_whole_windows_only(num_ids, context, stride):
    ids = np.arange(num_ids)
    count = count_windows(num_ids, context, stride, keep_last=False)
    starts = [start for start in range(0, num_ids, stride) if start + context + 1 <= num_ids]
    assert count == len(starts)
    data = WindowDataset(ids, context, stride, keep_last=False)
    if count:
        inputs, targets = data.batch(np.arange(count), 0)
        assert inputs[:, 0].tolist() == starts and torch.equal(targets, inputs + 1)


def test_batches_are_int64_and_rectangular_beyond_the_end():
    inputs, targets = read_windows(np.array([5, 6, 7], dtype=np.uint16), np.array([1, 0]), 3)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[6, 7, 0], [5, 6, 7]]
    assert targets.tolist() == [[7, IGNORE, IGNORE], [6, 7, IGNORE]]


def test_one_window_beyond_the_end_keeps_inputs_and_targets_apart():
    inputs, targets = read_windows(np.arange(10), np.array([6]), 8)
    assert inputs.tolist() == [[6, 7, 8, 9, 0, 0, 0, 0]]
    assert targets.tolist() == [[7, 8, 9, IGNORE, IGNORE, IGNORE, IGNORE, IGNORE]]
