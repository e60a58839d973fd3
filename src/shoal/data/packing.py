"""Documents, one after the other, as one long row of ids: nothing is lost, nothing comes twice, nothing is padded.

The reader cuts windows of `context + 1` ids out of the row, so a window may hold the end of one document and the
beginning of the next.
"""

from collections.abc import Iterable, Iterator

import numpy as np


def cut_row(pieces: Iterable[np.ndarray], num_ids: int) -> Iterator[np.ndarray]:
    """The pieces as one row, cut into arrays of `num_ids`; the last one may be shorter, and is never empty."""
    assert num_ids > 0
    waiting: list[np.ndarray] = []
    num_waiting = 0
    for piece in pieces:
        waiting.append(piece)
        num_waiting += len(piece)
        if num_waiting < num_ids:
            continue
        row = np.concatenate(waiting)
        num_whole = num_waiting - num_waiting % num_ids
        yield from row[:num_whole].reshape(-1, num_ids)
        waiting, num_waiting = [row[num_whole:]], num_waiting - num_whole
    if num_waiting:
        yield np.concatenate(waiting)
