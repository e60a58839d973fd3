"""Rows of text files, read in any order without holding them in memory: where each begins is known. JSON lines."""

import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.data.shards.labels import Labels, no_column

Row = dict[str, Any]
Piece = tuple[str, bool]
"""Some text, and whether a document ends with it."""

TABLE_ROWS = 1024
_BOM = b"\xef\xbb\xbf"
_MOST_OPEN = 64


class Rows(Protocol):
    """What shards of rows are made of. An order is an array of row numbers."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns."""

    @property
    def num_rows(self) -> int:
        """How many there are."""

    def order(self, seed: int | None) -> np.ndarray:
        """All rows once, shuffled; without a seed as they come."""

    def lines(self, order: np.ndarray) -> Iterator[bytes]:
        """As JSON, without line ends."""

    def tables(self, order: np.ndarray) -> Iterator[Any]:
        """As Arrow tables of one schema."""

    def texts(self, order: np.ndarray) -> Iterator[Piece]:
        """One column, each row a document."""


def shuffled(num_rows: int, seed: int | None) -> np.ndarray:
    """All numbers below `num_rows` once."""
    # RandomState's streams are frozen across NumPy versions, so the order is too.
    return np.arange(num_rows) if seed is None else np.random.RandomState(seed & 0xFFFFFFFF).permutation(num_rows)


class Records:
    """Pieces of files by number, read where they begin."""

    def __init__(self, files: Sequence[Path], starts: Sequence["array[int]"]) -> None:
        """Where the pieces of each file begin; a piece ends where the next one begins."""
        self.files = files
        found = [np.array(start, dtype=np.int64) for start in starts]
        ends = [
            np.append(start[1:], path.stat().st_size) for path, start in zip(files, found, strict=True) if len(start)
        ]
        self._starts = np.concatenate([np.zeros(0, np.int64), *found])
        self._ends = np.concatenate([np.zeros(0, np.int64), *ends])
        self._first = np.cumsum([0, *map(len, found)])

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, order: np.ndarray) -> Iterator[bytes]:
        """The records at `order`, with whatever empty lines follow."""
        opened: OrderedDict[int, IO[bytes]] = OrderedDict()
        try:
            for number in order:
                which = int(np.searchsorted(self._first, number, side="right")) - 1
                if which not in opened:
                    if len(opened) >= _MOST_OPEN:
                        opened.popitem(last=False)[1].close()
                    opened[which] = self.files[which].open("rb")
                opened.move_to_end(which)
                opened[which].seek(int(self._starts[number]))
                yield opened[which].read(int(self._ends[number] - self._starts[number]))
        finally:
            for file in opened.values():
                file.close()


@dataclass(frozen=True)
class FileRows:
    """Rows that are pieces of files."""

    records: Records
    names: tuple[str, ...]
    """Of the columns."""
    parse: Callable[[bytes], Row]
    """A record as a row."""
    to_json: Callable[[bytes], bytes]
    """A record as JSON."""
    column: str | None
    """Where the text is."""
    schema: Any = None
    """For Arrow tables."""

    @property
    def num_rows(self) -> int:
        """Without header lines and empty ones."""
        return len(self.records)

    def order(self, seed: int | None) -> np.ndarray:
        """Any order is as good as any other."""
        return shuffled(self.num_rows, seed)

    def lines(self, order: np.ndarray) -> Iterator[bytes]:
        """As JSON, without line ends."""
        return map(self.to_json, self.records.read(order))

    def tables(self, order: np.ndarray) -> Iterator[Any]:
        """By the schema that all rows fit."""
        return _tables(map(self.parse, self.records.read(order)), self.schema)

    def texts(self, order: np.ndarray) -> Iterator[Piece]:
        """The column."""
        assert self.column is not None
        for record in self.records.read(order):
            yield _encodable(self.parse(record)[self.column]), True


def open_json(files: Sequence[Path], column: str | None, labels: Labels | None, with_schema: bool) -> FileRows:
    """Read all files once: every line must be a JSON object, with text in `column`; written again, it is the same."""
    schema = _Schema() if with_schema else None
    names: dict[str, None] = {}
    found = []
    for path in files:
        starts = array("q")
        for where, start, row in _json_rows(path):
            starts.append(start)
            names |= dict.fromkeys(row)
            if column is not None:
                _check_text(row, column, where)
            if labels is not None:
                labels.add_row(row, where)
            if schema is not None:
                schema.add(row, where)
        found.append(starts)
    arrow_schema = schema.found() if schema is not None else None
    return FileRows(Records(files, found), tuple(names), json.loads, bytes.strip, column, arrow_schema)


def _check_text(row: Row, column: str, where: str) -> None:
    if column not in row:
        raise no_column("--column", where, column, list(row))
    if not isinstance(row[column], str):
        raise UserError(f"--column: {where}: {column!r} is {json.dumps(row[column])[:40]}, not text; correct the row")


def _encodable(text: str) -> str:
    """The text, with halves of surrogate pairs, which JSON can spell and UTF-8 cannot, replaced."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _tables(rows: Iterable[Row], schema: Any) -> Iterator[Any]:
    """Arrow tables of so many rows each."""
    arrow = require("pyarrow", "--format", "parquet")
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == TABLE_ROWS:
            yield arrow.Table.from_pylist(batch, schema=schema)
            batch = []
    if batch:
        yield arrow.Table.from_pylist(batch, schema=schema)


class _Schema:
    """The schema that all rows fit, found batch by batch."""

    def __init__(self) -> None:
        self._arrow = require("pyarrow", "--format", "parquet")
        self._schema: Any = self._arrow.schema([])
        self._batch: list[Row] = []
        self._where = ""

    def add(self, row: Row, where: str) -> None:
        self._batch.append(row)
        self._where = where
        if len(self._batch) == TABLE_ROWS:
            self._merge()

    def found(self) -> Any:
        self._merge()
        return self._schema

    def _merge(self) -> None:
        names = dict.fromkeys(name for row in self._batch for name in row)  # from_pylist looks at the first row alone
        try:
            columns = {name: self._arrow.array([row.get(name) for row in self._batch]) for name in names}
            schema = self._arrow.schema([(name, column.type) for name, column in columns.items()])
            self._schema = self._arrow.unify_schemas([self._schema, schema], promote_options="permissive")
        except self._arrow.ArrowException as error:
            raise UserError(
                f"--format: {self._where} or a row before it does not fit in a Parquet column with the others "
                f"({error}); make its values alike, or take --format jsonl"
            ) from error
        self._batch = []


def open_at_text(path: Path) -> IO[bytes]:
    """The file, after its byte order mark if it has one."""
    file = path.open("rb")
    if file.read(len(_BOM)) != _BOM:
        file.seek(0)
    return file


def _json_rows(path: Path) -> Iterator[tuple[str, int, Row]]:
    """Where each line is, for people and in bytes, and what it says."""
    with open_at_text(path) as file:
        position = file.tell()
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}: line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    why = getattr(error, "msg", error)  # without a line number, which would be counted from this line
                    raise UserError(f"SRC: {where} is not JSON ({why}); correct it or take it out") from error
                if not isinstance(row, dict):
                    raise UserError(f"SRC: {where} is not a JSON object but a {type(row).__name__}; correct it")
                yield where, position, row
            position += len(line)
