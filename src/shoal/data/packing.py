"""Documents, one after the other, as one long row of ids: nothing is lost, nothing comes twice, nothing is padded.

The reader cuts windows of `context + 1` ids out of the row, so a window may hold the end of one document and the
beginning of the next.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

IN_NO_DOCUMENT = -1
"""Where the last row of `pack_rows` is filled up."""


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


def pack_rows(
    documents: Sequence[Sequence[int]], context: int, end_of_text: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Short documents in memory as samples, with the document that each id is of, for masks of attention.

    Sample `i` holds ids `[i * context, (i + 1) * context]` of the row, so that every id but the first is a target
    once. An end of text is of the document that it ends.

    Returns:
        Ids and numbers of documents, int64 `[samples, context + 1]`; beyond the end of the row the ids are 0 and the
        documents `IN_NO_DOCUMENT`.
    """
    ending = [] if end_of_text is None else [end_of_text]
    row = np.array([token for document in documents for token in (*document, *ending)], dtype=np.int64)
    lengths = [len(document) + len(ending) for document in documents]
    of_document = np.repeat(np.arange(len(documents), dtype=np.int64), lengths)
    num_samples = max(0, -(-(len(row) - 1) // context))
    beyond = num_samples * context + 1 - len(row)
    if num_samples:
        row = np.pad(row, (0, beyond))
        of_document = np.pad(of_document, (0, beyond), constant_values=IN_NO_DOCUMENT)
    positions = np.arange(num_samples)[:, None] * context + np.arange(context + 1)
    return row[positions], of_document[positions]
