"""Documents in one row: nothing is lost, nothing comes twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.packing import IN_NO_DOCUMENT, cut_row, pack_rows

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 500), max_size=20), max_size=12)
END = 501


@given(documents, st.integers(1, 30))
def test_a_row_is_cut_and_nothing_is_lost(pieces: Documents, num_ids: int) -> None:
    cut = list(cut_row([np.array(piece, dtype=np.uint16) for piece in pieces], num_ids))
    assert [token for array in cut for token in array.tolist()] == [token for piece in pieces for token in piece]
    assert all(len(array) == num_ids for array in cut[:-1]) and all(0 < len(array) <= num_ids for array in cut)
    assert all(array.dtype == np.uint16 for array in cut)


@given(documents, st.integers(1, 30), st.booleans())
def test_samples_hold_every_id_as_a_target_once(texts: Documents, context: int, separated: bool) -> None:
    ids, numbers = pack_rows(texts, context, END if separated else None)
    assert ids.shape == numbers.shape and ids.shape[1] == context + 1
    row = [token for text in texts for token in (*text, *([END] if separated else []))]
    of = [number for number, text in enumerate(texts) for _ in range(len(text) + separated)]
    inside = numbers[:, 1:] != IN_NO_DOCUMENT
    if len(row) > 1:
        assert [int(ids[0, 0]), *ids[:, 1:][inside].tolist()] == row
        assert [int(numbers[0, 0]), *numbers[:, 1:][inside].tolist()] == of
        assert inside.any(axis=1).all()  # no sample without a target
    else:
        assert len(ids) == 0
    assert (ids[1:, 0] == ids[:-1, -1]).all()  # a sample begins with the last id of the one before


def test_documents_are_told_apart() -> None:
    ids, numbers = pack_rows([[1, 2], [3, 4, 5]], 4, END)
    assert ids.tolist() == [[1, 2, END, 3, 4], [4, 5, END, 0, 0]]
    assert numbers.tolist() == [[0, 0, 0, 1, 1], [1, 1, 1, -1, -1]]
