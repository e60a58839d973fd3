"""Cutting a long row of token ids into samples for language modelling: inputs, and targets shifted by one."""

import numpy as np
import torch

IGNORE = -100
"""Target where there is nothing to predict; the index that torch's cross entropy leaves out."""


def count_windows(num_ids: int, context: int, stride: int, keep_last: bool) -> int:
    """Windows that start at 0, stride, 2*stride, ...; `keep_last` keeps one that reaches beyond the end.

    With `keep_last` and a stride of `context`, every id but the first is a target exactly once.
    """
    num_targets = num_ids - 1
    if keep_last:
        return max(0, -(-num_targets // stride))
    return max(0, (num_targets - context) // stride + 1)


def read_windows(ids: np.ndarray, starts: np.ndarray, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets `[len(starts), context]`, int64; only the windows are read from `ids`.

    Beyond the end of `ids` the inputs are 0 and the targets `IGNORE`, so that a batch stays rectangular.
    """
    positions = starts[:, None] + np.arange(context + 1)
    beyond = positions >= len(ids)
    window = torch.from_numpy(ids[np.minimum(positions, len(ids) - 1)].astype(np.int64))
    # Copies, both: of a single row `contiguous` would give two views of the same memory.
    inputs, targets = window[:, :-1].clone(), window[:, 1:].clone()
    if beyond.any():
        inputs[torch.from_numpy(beyond[:, :-1])] = 0
        targets[torch.from_numpy(beyond[:, 1:])] = IGNORE
    return inputs, targets


class WindowDataset:
    """Windows over ids held in memory."""

    def __init__(self, ids: np.ndarray, context: int, stride: int, keep_last: bool) -> None:
        self.ids = ids
        self.context = context
        self.stride = stride
        self.num_windows = count_windows(len(ids), context, stride, keep_last)

    def __len__(self) -> int:
        return self.num_windows

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the windows at `indices`."""
        return read_windows(self.ids, indices * self.stride, self.context)
