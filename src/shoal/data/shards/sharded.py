"""A dataset in shards: any sample by its number, from whichever file it is in."""

import errno
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.bad_samples import BadSample, BadSampleError, DataGoneError
from shoal.data.shards.index import ShardIndex
from shoal.data.shards.opened import HELD_BYTES, OPEN, OpenShard, RowError
from shoal.data.shards.store import Store

REMEDY = "shoal data verify lists all files that are not whole: put back a copy, or make the shards again"
_TRIES = 3
_UNPACKED = 4
"""How much larger rows of parquet may be in memory than in their file."""
MOST_OPEN = 256
"""Shards that a process keeps open."""


class ShardedRows:
    """Rows of all shards by number: those of the first shard first. Goes to other processes with nothing open."""

    def __init__(self, index: ShardIndex, store: Store) -> None:
        self.index = index
        self.store = store
        self.starts = np.concatenate([[0], np.cumsum(index.rows)])
        self._open: OrderedDict[int, OpenShard] = OrderedDict()

    def __len__(self) -> int:
        return self.index.num_rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    @property
    def contents(self) -> str:
        """A hash of what the files hold."""
        return self.index.contents

    def where(self, number: int) -> str:
        """File and row of a sample, for messages."""
        shard, row = self.place(number)
        return f"{self.store.where(shard)}, row {row}" if self.index.rows[shard] > 1 else self.store.where(shard)

    def place(self, number: int) -> tuple[int, int]:
        """The shard of a sample and its row there."""
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return shard, number - int(self.starts[shard])

    def limits(self, window: int, lanes: int) -> tuple[int, int]:
        """A window and lanes that the format bears: of parquet, whole row groups of all of a window are in memory."""
        if self.index.format != "parquet":
            return window, lanes
        bytes_a_row = max(1, self.index.num_bytes // self.index.num_rows)
        return max(1, min(window, HELD_BYTES // (_UNPACKED * bytes_a_row))), 1

    def rows(self, indices: np.ndarray, made: Callable[[dict[str, Any], int], Any]) -> list[Any]:
        """What `made` makes of each row and its place in `indices`; it raises RowError where it cannot.

        All that cannot be read are told of together. Rows of one shard are read together, in the order they have there.
        """
        found: list[Any] = [None] * len(indices)
        bad: list[tuple[BadSample, str]] = []
        for place in np.argsort(indices, kind="stable").tolist():
            number = int(indices[place])
            shard, row = self.place(number)
            try:
                found[place] = made(self._shard(shard).row(row), place)
            except RowError as error:
                bad.append((BadSample(number, self.where(number), str(error)), error.remedy or REMEDY))
        if bad:  # the first of them in the order of their numbers, as they were read
            raise BadSampleError([sample for sample, _ in bad], bad[0][1])
        return found

    def _shard(self, number: int) -> OpenShard:
        if (shard := self._open.get(number)) is not None:
            self._open.move_to_end(number)
            return shard
        shard = self._opened(number)
        if self.index.format == "folder":  # a row alone, which is in memory now
            return shard
        self._open[number] = shard
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return shard

    def _opened(self, number: int) -> OpenShard:
        for attempt in range(_TRIES):
            try:
                path = self.store.path(number)
                shard = OPEN[self.index.format](path)
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._open:
                    self.close()  # of too many, all: they are opened again as they are needed
                elif error.errno not in (errno.ENOENT, errno.EACCES):
                    raise DataGoneError(f"data.dir: {self.store.where(number)}: {error.strerror}") from error
                elif attempt == _TRIES - 1:  # before, a cache may have deleted a file that was about to be opened
                    raise RowError(f"cannot be opened: {error.strerror}") from error
                continue
            self._check_rows(number, shard, path)
            return shard
        raise DataGoneError(f"data.dir: {self.store.where(number)} cannot be opened; raise the limit: ulimit -n 65536")

    def _check_rows(self, number: int, shard: OpenShard, path: Path) -> None:
        """That rows are where the index counts them: a damaged line would move all that follow by one."""
        about = self.index.shards[number]
        is_cut = path.stat().st_size < about.bytes
        is_moved = self.index.format == "jsonl" and len(shard) != about.rows and not is_cut
        if len(shard) > about.rows or is_moved:
            found = len(shard)
            shard.close()
            raise RowError(f"the file has {found:,} rows, and the index says {about.rows:,}")

    def close(self) -> None:
        """Let go of all files."""
        while self._open:
            self._open.popitem()[1].close()
