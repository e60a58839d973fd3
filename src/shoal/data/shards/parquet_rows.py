"""Rows of Parquet files, shuffled without holding them in memory: row groups first, then rows within some groups."""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.data.shards.labels import Labels, no_column
from shoal.data.shards.records import TABLE_ROWS, Piece

WINDOW_BYTES = 256 << 20
"""Row groups of this size together, unpacked, are shuffled with each other and held in memory."""


class ParquetRows:
    """Rows of Parquet files with one schema."""

    def __init__(
        self, files: Sequence[Path], column: str | None, labels: Labels | None, window_bytes: int = WINDOW_BYTES
    ) -> None:
        self._parquet = require("pyarrow.parquet", "SRC", "parquet")
        self._arrow = require("pyarrow", "SRC", "parquet")
        self._column = column
        self._window_bytes = window_bytes
        self._groups: list[tuple[Path, int]] = []
        rows, sizes = [], []
        first: Any = None
        for path in files:
            metadata, schema = self._read_footer(path)
            if len(set(schema.names)) < len(schema.names):
                raise UserError(f"SRC: {path}: has several columns of one name; rename them")
            first = schema if first is None else first
            if not schema.equals(first):
                raise UserError(f"SRC: {path}: has other columns than {files[0]}; give files of one schema")
            for group in range(metadata.num_row_groups):
                self._groups.append((path, group))
                rows.append(metadata.row_group(group).num_rows)
                sizes.append(metadata.row_group(group).total_byte_size)
        if column is not None:
            self._check_column(first, column, files[0])
        self.names: tuple[str, ...] = tuple(first.names)
        """Of all columns."""
        self._first = np.cumsum([0, *rows])
        self._sizes = sizes
        if labels is not None and labels.has(self.names, str(files[0])):
            self._find_classes(labels, first.field(labels.column).type)

    @property
    def num_rows(self) -> int:
        """Of all files."""
        return int(self._first[-1])

    def order(self, seed: int | None) -> np.ndarray:
        """Row groups shuffled, and within windows of some groups, all rows."""
        if seed is None:
            return np.arange(self.num_rows)
        random = np.random.RandomState(seed & 0xFFFFFFFF)
        groups = random.permutation(len(self._groups))
        orders = [np.zeros(0, np.int64)]
        for window in self._windows(groups):
            rows = np.concatenate([np.arange(self._first[group], self._first[group + 1]) for group in window])
            orders.append(rows[random.permutation(len(rows))])
        return np.concatenate(orders)

    def lines(self, order: np.ndarray) -> Iterator[bytes]:
        """Rows as JSON objects."""
        for table in self.tables(order):
            for row in table.to_pylist():
                try:
                    yield json.dumps(row, ensure_ascii=False).encode("utf-8")
                except (TypeError, ValueError) as error:
                    raise UserError(f"--format: a row cannot be JSON ({error}); take --format parquet") from error

    def tables(self, order: np.ndarray) -> Iterator[Any]:
        """Some rows at a time, with the types that they have."""
        return self._read(order, None)

    def texts(self, order: np.ndarray) -> Iterator[Piece]:
        """One column, and no other is read."""
        for table in self._read(order, [self._column]):
            for text in table.column(0).to_pylist():
                if text is None:
                    raise UserError(f"--column: a row of SRC has no {self._column!r}; take such rows out")
                yield text, True

    def _windows(self, groups: np.ndarray) -> Iterator[list[int]]:
        window: list[int] = []
        size = 0
        for group in groups.tolist():
            if window and size + self._sizes[group] > self._window_bytes:
                yield window
                window, size = [], 0
            window.append(group)
            size += self._sizes[group]
        if window:
            yield window

    def _read(self, order: np.ndarray, columns: list[str | None] | None) -> Iterator[Any]:
        kept: OrderedDict[int, Any] = OrderedDict()
        for start in range(0, len(order), TABLE_ROWS):
            numbers = order[start : start + TABLE_ROWS]
            groups = np.searchsorted(self._first, numbers, side="right") - 1
            wanted = np.unique(groups).tolist()
            for group in wanted:
                if group not in kept:
                    self._make_room(kept, group, wanted)
                    kept[group] = self._read_group(group, columns)
                kept.move_to_end(group)
            parts = [kept[group].take(numbers[groups == group] - self._first[group]) for group in wanted]
            # The parts lie group by group; this puts the rows back into their order.
            by_group = np.argsort(groups, kind="stable")
            yield self._arrow.concat_tables(parts).take(np.argsort(by_group, kind="stable")).combine_chunks()

    def _make_room(self, kept: OrderedDict[int, Any], group: int, wanted: list[int]) -> None:
        """Forget the groups that were not used for longest; those of a window are all kept until it is read."""
        while kept and sum(self._sizes[other] for other in (*kept, group)) > self._window_bytes:
            oldest = next(iter(kept))
            if oldest in wanted:
                return
            del kept[oldest]

    def _read_group(self, group: int, columns: list[str | None] | None) -> Any:
        path, number = self._groups[group]
        try:
            with self._parquet.ParquetFile(path) as file:
                return file.read_row_group(number, columns=columns).replace_schema_metadata(None)
        except (self._arrow.ArrowException, OSError) as error:
            raise UserError(f"SRC: {path}: row group {number} cannot be read ({error}); replace the file") from error

    def _read_footer(self, path: Path) -> tuple[Any, Any]:
        try:
            with self._parquet.ParquetFile(path) as file:
                return file.metadata, file.schema_arrow.remove_metadata()
        except (self._arrow.ArrowException, OSError) as error:
            raise UserError(f"SRC: {path}: is not Parquet, or was cut short ({error}); replace it") from error

    def _check_column(self, schema: Any, column: str, path: Path) -> None:
        if column not in schema.names:
            raise no_column("--column", str(path), column, schema.names)
        kind = schema.field(column).type
        types = self._arrow.types
        if not (types.is_string(kind) or types.is_large_string(kind)):
            raise UserError(f"--column: {path}: {column!r} holds {kind}, not text")

    def _find_classes(self, labels: Labels, kind: Any) -> None:
        """Read one column, and no other."""
        types = self._arrow.types
        values = kind.value_type if types.is_dictionary(kind) else kind
        may_be = (types.is_string, types.is_large_string, types.is_integer, types.is_boolean)
        if not any(is_kind(values) for is_kind in may_be):
            labels.refuse(
                f"{self._groups[0][0] if self._groups else 'SRC'}: {labels.column!r} holds {kind}, not classes"
            )
            return
        for group, (path, number) in enumerate(self._groups):
            for found in self._read_group(group, [labels.column]).column(0).value_counts().to_pylist():
                labels.add(found["values"], f"{path}: row group {number}", found["counts"])
            if labels.problem is not None:
                return
