"""Language modelling over files of token ids that are mapped into memory, never read whole."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.data.dataset import Datasets
from shoal.data.download import find_file, search_folders
from shoal.data.section import Tokens
from shoal.data.windows import count_windows, read_windows


def load_tokens(section: Tokens) -> Datasets:
    """Training windows `stride` apart; validation windows side by side, so that every token but the first counts once.

    The last validation window is filled up with targets that do not count (`windows.IGNORE`).
    """
    folders = search_folders(section.dir, section.name)

    def part(name: str, stride: int, keep_last: bool) -> TokenDataset:
        path = find_file(folders, [name])
        if path is None:
            raise UserError(
                f"data.dir: {name} not found in {folders[0]} (also looked in {folders[1]}). Put {section.train_file} "
                f"and {section.val_file} there: token ids one after the other as little-endian {section.dtype}, no "
                f"header, as numpy.array(ids, dtype='<{np.dtype(section.dtype).str[1:]}').tofile('{name}') writes them."
            )
        num_tokens = count_tokens(path, section.dtype)
        if num_tokens <= section.context:
            raise UserError(
                f"data.context: {path} holds {num_tokens:,} tokens, more than the context of {section.context} are "
                "needed; take a smaller context or a longer file"
            )
        return TokenDataset(
            path, section.dtype, section.vocab_size, context=section.context, stride=stride, keep_last=keep_last
        )

    return Datasets(
        train=part(section.train_file, section.stride or section.context, keep_last=False),
        val=part(section.val_file, section.context, keep_last=True),
        spec=DataSpec(vocab_size=section.vocab_size, context=section.context),
    )


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
    """Windows over a mapped file; the mapping is opened at the first batch, anew in every process that gets a copy."""

    def __init__(self, path: Path, dtype: str, vocab_size: int, *, context: int, stride: int, keep_last: bool) -> None:
        self.path = path
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.context = context
        self.stride = stride
        self.num_windows = count_windows(count_tokens(path, dtype), context, stride, keep_last)
        self._ids: np.ndarray | None = None

    def __len__(self) -> int:
        return self.num_windows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None}  # pickling a memory map would copy the whole file

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the windows at `indices`, checked to be below `vocab_size`."""
        if self._ids is None:
            self._ids = np.memmap(self.path, dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")
        starts = indices * self.stride
        inputs, targets = read_windows(self._ids, starts, self.context)
        if max(int(inputs.max()), int(targets.max())) >= self.vocab_size:
            self._refuse(starts, inputs, targets)
        return inputs, targets

    def _refuse(self, starts: np.ndarray, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        window = torch.cat([inputs, targets[:, -1:]], dim=1)
        row, column = (int(place) for place in (window >= self.vocab_size).nonzero()[0])
        raise UserError(
            f"data.vocab_size: {self.path} holds token id {int(window[row, column])} at position "
            f"{int(starts[row]) + column}, which is not below {self.vocab_size}; raise data.vocab_size to that of the "
            f"tokenizer, or set data.dtype (now {self.dtype}) to what the file was written with"
        )
