"""A file that safetensors itself reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from shoal.checkpoint.layout import DTYPES, lay_out
from shoal.core.errors import UserError


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES, key=str)), st.lists(st.integers(0, 4), max_size=3)), max_size=9
    )
)
def test_safetensors_reads_what_is_laid_out(kinds):
    tensors = {f"t{number}": (dtype, tuple(shape)) for number, (dtype, shape) in enumerate(kinds)}
    layout = lay_out(tensors, {"a": "b"})
    found = load(layout.header + bytes(layout.num_bytes))
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == tensors
    assert all(begin % tensors[name][0].itemsize == 0 for name, (begin, _) in layout.places.items())


def test_a_type_that_no_file_holds_is_refused_by_name():
    with pytest.raises(UserError, match=r"^model: odd is torch.complex128, which a checkpoint cannot hold"):
        lay_out({"odd": (torch.complex128, (2,))}, {})
