"""Language modelling over files of token ids, of which only the windows of a batch are read."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import NoDataError, UserError
from shoal.core.recycled import RECYCLED
from shoal.core.spec import DataSpec
from shoal.data.bad_samples import BadSample, BadSampleError
from shoal.data.dataset import Datasets
from shoal.data.download import find_file
from shoal.data.section import Tokens
from shoal.data.shards.find import find_shards, is_remote, local_folders
from shoal.data.shards.index import Shard, ShardIndex
from shoal.data.shards.opened import RowError
from shoal.data.shards.sharded import MOST_OPEN, REMEDY
from shoal.data.shards.store import LocalStore, Store
from shoal.data.windows import IGNORE, count_windows

VOCAB_SIZE = 50_304
"""Where nothing else tells: GPT-2's, padded to a multiple of 64."""


def load_tokens(section: Tokens) -> Datasets:
    """Training windows `stride` apart; validation windows side by side, so that every token but the first counts once.

    A window does not reach from one file into the next. The last validation window of a file is filled up with targets
    that do not count (`windows.IGNORE`).
    """
    parts = {name: _find(section, name, file) for name, file in _files(section).items()}
    told = max(index.about.get("vocab_size", 0) for index, _ in parts.values())
    vocab_size = section.vocab_size or told or VOCAB_SIZE
    if told > vocab_size:
        raise UserError(f"data.vocab_size: {vocab_size} is less than the {told} of the tokenizer of these shards")

    def part(name: str, stride: int, keep_last: bool) -> TokenDataset:
        index, store = parts[name]
        found = TokenDataset(
            index, store, section.dtype, vocab_size, context=section.context, stride=stride, keep_last=keep_last
        )
        if int(index.rows.max()) <= section.context:
            raise UserError(
                f"data.context: {store.where(int(index.rows.argmax()))} holds {int(index.rows.max()):,} tokens, more "
                f"than the context of {section.context} are needed; take a smaller context or a longer file"
            )
        return found

    return Datasets(
        train=part("train", section.stride or section.context, keep_last=False),
        val=part("val", section.context, keep_last=True),
        spec=DataSpec(vocab_size=vocab_size, context=section.context),
    )


def _files(section: Tokens) -> dict[str, str]:
    return {"train": section.train_file, "val": section.val_file}


def _find(section: Tokens, part: str, name: str) -> tuple[ShardIndex, Store]:
    """The shards of a part, or its one file as the only shard."""
    if (found := find_shards(section, part)) is not None:
        if found[0].format != "tokens":
            raise UserError(
                f"data.dir: the shards in {section.dir}/{part} are {found[0].format}, not tokens; "
                "make them with shoal data shard --tokenizer"
            )
        return found
    if is_remote(section.dir):
        raise NoDataError(f"data.dir: no shards in {section.dir}/{part}; make them with shoal data shard --tokenizer")
    folders = local_folders(section)
    path = find_file(folders, [name])
    if path is None:
        raise NoDataError(
            f"data.dir: {name} not found in {folders[0]} (also looked in {folders[1]}). Put {section.train_file} "
            f"and {section.val_file} there: token ids one after the other as little-endian {section.dtype}, no "
            f"header, as numpy.array(ids, dtype='<{np.dtype(section.dtype).str[1:]}').tofile('{name}') writes them."
        )
    index = ShardIndex("tokens", (Shard(path.name, count_tokens(path, section.dtype), path.stat().st_size),))
    return index, LocalStore(path.parent, index)


def count_tokens(path: Path, dtype: str) -> int:
    """How many ids a file holds, by its size."""
    item_bytes = np.dtype(dtype).itemsize
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise UserError(f"data.dir: {path}: is empty; write token ids to it")
    if num_bytes % item_bytes:
        raise UserError(
            f"data.dir: {path}: {num_bytes:,} bytes is not a whole number of {dtype} tokens ({item_bytes} bytes each); "
            "it was cut short, or data.dtype is not how it was written"
        )
    return num_bytes // item_bytes


class TokenDataset:
    """Windows over files of ids. They are read by position and not mapped: mapped pages would count as memory."""

    def __init__(
        self,
        index: ShardIndex,
        store: Store,
        dtype: str,
        vocab_size: int,
        *,
        context: int,
        stride: int,
        keep_last: bool,
    ) -> None:
        self.index = index
        self.store = store
        self.dtype = np.dtype(index.about.get("dtype", dtype)).newbyteorder("<")
        self._item_bytes = self.dtype.itemsize
        self.vocab_size = vocab_size
        self.context = context
        self.stride = stride
        windows = [count_windows(shard.rows, context, stride, keep_last) for shard in index.shards]
        self.starts = np.concatenate([[0], np.cumsum(windows, dtype=np.int64)])
        self._open: OrderedDict[int, int] = OrderedDict()
        """File descriptors by number of the shard."""

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    @property
    def contents(self) -> str:
        """A hash of what the files hold."""
        return self.index.contents

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets `[len(indices), context]`, int64, of the windows at `indices`."""
        window = np.empty((len(indices), self.context + 1), dtype=self.dtype)
        short: dict[int, int] = {}
        bad: list[BadSample] = []
        shards = np.searchsorted(self.starts, indices, side="right") - 1
        firsts = (indices - self.starts[shards]) * self.stride
        for place, (shard, first) in enumerate(zip(shards.tolist(), firsts.tolist(), strict=True)):
            try:
                count = self._read(shard, first, window[place])
            except RowError as error:
                bad.append(BadSample(int(indices[place]), self._where(int(indices[place])), str(error)))
                continue
            if count <= self.context:
                short[place] = count
        if bad:
            raise BadSampleError(bad, REMEDY)
        for place, count in short.items():
            window[place, count:] = 0
        if len(indices) and int(window.max()) >= self.vocab_size:
            self._refuse(indices, window)
        inputs, targets = (RECYCLED.empty((len(indices), self.context), torch.int64) for _ in range(2))
        np.copyto(inputs.numpy(), window[:, :-1])
        np.copyto(targets.numpy(), window[:, 1:])
        for place, count in short.items():
            targets[place, max(0, count - 1) :] = IGNORE
        return inputs, targets

    def _place(self, number: int) -> tuple[int, int]:
        """The shard of a window, and the token that it begins with."""
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return shard, (number - int(self.starts[shard])) * self.stride

    def _where(self, number: int) -> str:
        shard, first = self._place(number)
        return f"{self.store.where(shard)}, tokens from {first}"

    def _read(self, shard: int, first: int, window: np.ndarray) -> int:
        """Fill a window from token `first` of a shard on; returns how many ids there were for it."""
        count = min(self.context + 1, self.index.shards[shard].rows - first)
        size = self._item_bytes
        try:
            read = os.preadv(self._descriptor(shard), [window[:count].data], first * size)
        except OSError as error:
            raise RowError(f"cannot be read: {error.strerror}") from error
        if read != count * size:
            raise RowError("the file ends too early")
        return count

    def _descriptor(self, shard: int) -> int:
        if (descriptor := self._open.get(shard)) is not None:
            return descriptor
        try:
            descriptor = os.open(self.store.path(shard), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # a cache has deleted it before it was open
            descriptor = os.open(self.store.path(shard), os.O_RDONLY | os.O_CLOEXEC)
        self._open[shard] = descriptor
        if len(self._open) > MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def close(self) -> None:
        """Let go of all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def _refuse(self, indices: np.ndarray, ids: np.ndarray) -> None:
        row, column = (int(place) for place in np.argwhere(ids >= self.vocab_size)[0])
        shard, first = self._place(int(indices[row]))
        raise UserError(
            f"data.vocab_size: {self.store.where(shard)} holds token id {int(ids[row, column])} at position "
            f"{first + column}, which is not below {self.vocab_size}; raise data.vocab_size to that of the "
            f"tokenizer, or set data.dtype (now {self.dtype.name}) to what the file was written with"
        )
