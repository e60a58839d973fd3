"""How a safetensors file is laid out. By hand, because files are written from memory in pieces and hashed on the way,
which the library does not do; it does all the reading.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shoal.core.errors import UserError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""As safetensors calls them."""


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a file."""

    header: bytes
    """What the file begins with."""
    places: dict[str, tuple[int, int]]
    """The first and the last byte of each tensor after the header, in their order in the file."""

    @property
    def num_bytes(self) -> int:
        """What comes after the header."""
        return max((end for _, end in self.places.values()), default=0)


def lay_out(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """A file for tensors of these types and shapes."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    places: dict[str, tuple[int, int]] = {}
    begin = 0
    # The largest elements first: then every tensor begins at a multiple of its element's size.
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        if dtype not in DTYPES:
            raise UserError(f"model: {name} is {dtype}, which a checkpoint cannot hold; use another type")
        end = begin + math.prod(shape) * dtype.itemsize
        fields[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        places[name], begin = (begin, end), end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, places)
