"""Rows of JSON lines, read in any order without holding them in memory: where each begins is known."""

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

Row = dict[str, Any]
Look = Callable[[Row, str], None]
"""Sees every row, and where it stands, when a file is first read."""
Piece = tuple[str, bool]
"""Some text, and whether a document ends with it."""

TABLE_ROWS = 1024
BOM = b"\xef\xbb\xbf"
_MOST_OPEN = 64


class Rows(Protocol):
    """What shards of rows are made of. An order is an array of row numbers."""

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

    def __init__(self, files: Sequence[Path], starts: Sequence[np.ndarray]) -> None:
        self.files = files
        self._starts = np.concatenate([np.zeros(0, np.int64), *starts])
        ends = [
            np.append(start[1:], path.stat().st_size) for path, start in zip(files, starts, strict=True) if len(start)
        ]
        self._ends = np.concatenate([np.zeros(0, np.int64), *ends])
        self._first = np.cumsum([0, *(len(start) for start in starts)])

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
class JsonRows:
    """Rows of JSON lines; written again they are the same bytes."""

    records: Records
    column: str | None
    schema: Any = None

    @property
    def num_rows(self) -> int:
        """Lines that are not empty."""
        return len(self.records)

    def order(self, seed: int | None) -> np.ndarray:
        """Any order is as good as any other."""
        return shuffled(self.num_rows, seed)

    def lines(self, order: np.ndarray) -> Iterator[bytes]:
        """The bytes as they are."""
        return (line.strip() for line in self.records.read(order))

    def tables(self, order: np.ndarray) -> Iterator[Any]:
        """By the schema that all rows fit."""
        return tables_of((json.loads(line) for line in self.records.read(order)), self.schema)

    def texts(self, order: np.ndarray) -> Iterator[Piece]:
        """The column."""
        for line in self.records.read(order):
            yield _encodable(json.loads(line)[self.column]), True


def open_json(files: Sequence[Path], column: str | None, with_schema: bool) -> JsonRows:
    """Read all files once: every line must be a JSON object, with text in `column`."""
    schema = _Schema() if with_schema else None

    def look(row: Row, where: str) -> None:
        if column is not None:
            check_text(row, column, where)
        if schema is not None:
            schema.add(row, where)

    starts = [_index_json(path, look) for path in files]
    return JsonRows(Records(files, starts), column, schema.found() if schema is not None else None)


def check_text(row: Row, column: str, where: str) -> None:
    """That there is text in the column."""
    if column not in row:
        raise UserError(f"--column: {where}: has no column {column!r}; it has: {', '.join(map(str, row))}")
    if not isinstance(row[column], str):
        raise UserError(f"--column: {where}: {column!r} is {json.dumps(row[column])[:40]}, not text; correct the row")


def _encodable(text: str) -> str:
    """The text, with halves of surrogate pairs, which JSON can spell and UTF-8 cannot, replaced."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def tables_of(rows: Iterable[Row], schema: Any) -> Iterator[Any]:
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


def _index_json(path: Path, look: Look) -> np.ndarray:
    """Where the lines begin."""
    starts = array("q")
    with path.open("rb") as file:
        position = len(BOM) if file.read(len(BOM)) == BOM else 0
        file.seek(position)
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}: line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UserError(f"SRC: {where} is not JSON ({error}); correct it or take it out") from error
                if not isinstance(row, dict):
                    raise UserError(f"SRC: {where} is not a JSON object but a {type(row).__name__}; correct it")
                look(row, where)
                starts.append(position)
            position += len(line)
    return np.frombuffer(starts, dtype=np.int64) if starts else np.zeros(0, np.int64)
