"""Text classification from shards of JSON lines or parquet; texts become ids as they are read."""

from typing import Any

import numpy as np
import torch

from shoal.core.errors import NoDataError, UserError
from shoal.core.spec import DataSpec
from shoal.data.classes import Classes, find_classes, label_column
from shoal.data.dataset import Datasets
from shoal.data.section import TextShards
from shoal.data.shards.find import check_columns, find_shards
from shoal.data.shards.index import ShardIndex
from shoal.data.shards.opened import RowError
from shoal.data.shards.sharded import ShardedRows
from shoal.data.shards.store import Store
from shoal.data.tokenizer import Tokenizer, make_tokenizer

PADDING = 0


def load_text_shards(section: TextShards) -> Datasets:
    """`train` and, where it is there, `val`; id 0 is padding, so every id of the tokenizer is one more."""
    train, val = (find_shards(section, part) for part in ("train", "val"))
    if train is None:
        raise NoDataError(
            f"data.dir: no shards in {section.dir}/train; make them: shoal data shard FILES {section.dir}"
        )
    parts = [train, *([val] if val is not None else [])]
    for index, store in parts:
        if index.format not in ("jsonl", "parquet"):
            raise UserError(f"data.dir: {store.where(0)} is {index.format}; texts are in jsonl or parquet")
    column = label_column(section.label, train[0], "label")
    check_columns({"data.text": section.text, "data.label": column}, parts)
    if section.tokenizer == "chars":
        raise UserError(
            "data.tokenizer: chars needs all texts to find its characters; use bytes, or a tokenizer's file"
        )
    tokenizer = make_tokenizer(section.tokenizer, (), separated=False, field="data.tokenizer")
    classes = find_classes(column, train[0], val[0] if val is not None else None, section.classes)

    def part(found: tuple[ShardIndex, Store]) -> "TextRows":
        return TextRows(*found, section, tokenizer, classes)

    return Datasets(
        train=part(train),
        val=part(val) if val is not None else None,
        spec=DataSpec(num_classes=classes.count, vocab_size=tokenizer.vocab_size + 1),
    )


def _is_broken(text: str) -> bool:
    """Whether a text has half of a pair that only makes a character together, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


class TextRows(ShardedRows):
    """Token ids `[B, longest]` int64, 0 where a text is shorter, and labels."""

    def __init__(
        self,
        index: ShardIndex,
        store: Store,
        section: TextShards,
        tokenizer: Tokenizer,
        classes: Classes,
    ) -> None:
        super().__init__(index, store)
        self.text_column, self.max_tokens = section.text, section.max_tokens
        self.tokenizer = tokenizer
        self.classes = classes

    def batch(self, indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows at `indices`."""
        rows = self.rows(indices, lambda row, place: (self._text(row), self.classes.of(row)))
        ids = [encoded[: self.max_tokens] for encoded in self.tokenizer.encode([text for text, _ in rows])]
        tokens = np.full((len(rows), max(1, *map(len, ids))), PADDING, dtype=np.int64)
        for place, encoded in enumerate(ids):
            tokens[place, : len(encoded)] = encoded.astype(np.int64) + 1
        return torch.from_numpy(tokens), torch.tensor([label for _, label in rows])

    def _text(self, row: dict[str, Any]) -> str:
        text = row.get(self.text_column)
        if not isinstance(text, str):
            columns = ", ".join(map(str, row)) or "none"
            what = f"has no column {self.text_column}; its columns: {columns}" if text is None else "is not a text"
            raise RowError(what, "set data.text to a column that is a text in every row, or correct the row")
        if not text or (not text.isprintable() and _is_broken(text)):
            raise RowError(f"column {self.text_column} is {'empty' if not text else 'not Unicode text'}")
        return text
