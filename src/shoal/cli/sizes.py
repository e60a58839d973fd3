"""Sizes as people write them on a command line, and as they read them."""

import math
import re

from shoal.core.errors import UserError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([a-z]*)", re.ASCII)
_UNITS = {
    **{"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}
_LARGE = ((12, "TB"), (9, "GB"), (6, "MB"))
_SHOWN = 40
"""Characters of wrong input that are repeated."""


def parse_size(text: str, option: str, *, least: int = 1, such_as: str = "64MiB, 500MB or 2GiB") -> int:
    """`64MiB`, `500 MB`, `2GiB` or a number of bytes."""
    match = _SIZE.fullmatch(text.strip().lower())
    size = float(match.group(1)) * _UNITS.get(match.group(2), 0) if match else 0.0
    if not least <= size < math.inf:
        shown = repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
        raise UserError(f"{option}: {shown} is not a size; give one such as {such_as}")
    return int(size)


def in_units(num_bytes: int) -> str:
    """`31.6 kB`, `4.2 GB`"""
    size, unit = next(((10**power, unit) for power, unit in _LARGE if num_bytes >= 10**power), (1000, "kB"))
    return f"{num_bytes / size:,.1f} {unit}"
