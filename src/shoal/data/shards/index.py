"""What a folder of shards holds: which files, how many rows in each, and the checksums of their bytes.

`index.json` lies beside the shards. It is written last, so a folder that has one is whole.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shoal.core.errors import UserError

INDEX = "index.json"
VERSION = 1
FORMATS = ("tar", "jsonl", "parquet", "tokens", "folder")


@dataclass(frozen=True)
class Shard:
    """One file."""

    file: str
    """Name below the folder of the index, with forward slashes."""
    rows: int
    """Samples in it; in a file of tokens, the tokens."""
    bytes: int
    xxh3_128: str | None = None
    """Hash of all its bytes, in hex; None where nobody has read them yet."""


@dataclass(frozen=True)
class ShardIndex:
    """All shards of one part of a dataset, in an order that never changes."""

    format: str
    """One of FORMATS: how a file is read."""
    shards: tuple[Shard, ...]
    about: dict[str, Any] = field(default_factory=dict)
    """What a format or task must know besides: classes; dtype and vocab_size of tokens."""

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of every shard, int64."""
        return np.array([shard.rows for shard in self.shards], dtype=np.int64)

    @cached_property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return int(self.rows.sum())

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    @cached_property
    def contents(self) -> str:
        """A hash of what the files hold, in their order; where nobody has read them, of their names and sizes."""
        known = (shard.xxh3_128 or f"{shard.file} {shard.bytes}" for shard in self.shards)
        return hashlib.sha256("\n".join(known).encode()).hexdigest()

    def to_json(self) -> str:
        """As it is written: one line a shard, so that it can be looked at."""
        head = {"shoal": "shards", "version": VERSION, "format": self.format, "rows": self.num_rows, **self.about}
        lines = ",\n".join("  " + json.dumps(asdict(shard)) for shard in self.shards)
        return f'{json.dumps(head)[:-1]}, "shards": [\n{lines}\n]}}\n'


_NAME = re.compile(r"[^./\\\0][^/\\\0]{0,199}")
"""A part of a file's name: not hidden, no way out of the folder."""
_AGAIN = "shoal data index DIR --overwrite"
_HEAD = ("shoal", "version", "format", "rows", "shards")


def parse_index(text: str | bytes, where: str) -> ShardIndex:
    """The index that `to_json` wrote; `where` is its address for messages."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.dir: {where}: is not JSON ({error}); make it again: {_AGAIN}") from error
    if not isinstance(tree, dict) or tree.get("shoal") != "shards":
        raise UserError(f"data.dir: {where}: is not an index of shards; make one: {_AGAIN}")
    if tree.get("version") != VERSION:
        found = tree.get("version")
        raise UserError(
            f"data.dir: {where}: is of version {found}, this Shoal reads {VERSION}; make it again: {_AGAIN}"
        )
    if tree.get("format") not in FORMATS:
        raise UserError(f"data.dir: {where}: format {tree.get('format')!r}; allowed: {', '.join(FORMATS)}")
    try:
        shards = tuple(_shard(**{"file": "", "rows": -1, "bytes": -1, **entry}) for entry in tree["shards"])
        check_unique(shards)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UserError(f"data.dir: {where}: a shard is not as it should be ({error})") from error
    about = {name: value for name, value in tree.items() if name not in _HEAD}
    index = ShardIndex(tree["format"], shards, about)
    if index.num_rows != tree.get("rows"):
        raise UserError(
            f"data.dir: {where}: its shards hold {index.num_rows} rows, and it says {tree.get('rows')}; "
            f"it was changed by hand, so make it again: {_AGAIN}"
        )
    return index


def _shard(file: str, rows: int, bytes: int, xxh3_128: str | None = None) -> Shard:  # noqa: A002 - as the field is called
    if not isinstance(file, str) or not all(_NAME.fullmatch(part) for part in file.split("/")):
        raise ValueError(f"{str(file)[:80]!r} is not the name of a file below the folder")
    if not all(type(number) is int and 0 <= number < 1 << 48 for number in (rows, bytes)):
        raise ValueError(f"{file}: rows and bytes must be whole numbers")
    return Shard(file, rows, bytes, xxh3_128)


def check_unique(shards: Iterable[Shard]) -> None:
    """Raise where two shards are the same file."""
    seen: set[str] = set()
    for shard in shards:
        if shard.file in seen:
            raise ValueError(f"{shard.file} is listed twice")
        seen.add(shard.file)
