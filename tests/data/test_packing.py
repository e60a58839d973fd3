"""Documents in one row: nothing is lost, nothing comes twice."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.packing import cut_row

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 500), max_size=20), max_size=12)


@given(documents, st.integers(1, 30))
def test_a_row_is_cut_and_nothing_is_lost(pieces: Documents, num_ids: int) -> None:
    cut = list(cut_row([np.array(piece, dtype=np.uint16) for piece in pieces], num_ids))
    assert [token for array in cut for token in array.tolist()] == [token for piece in pieces for token in piece]
    assert all(len(array) == num_ids for array in cut[:-1]) and all(0 < len(array) <= num_ids for array in cut)
    assert all(array.dtype == np.uint16 for array in cut)
