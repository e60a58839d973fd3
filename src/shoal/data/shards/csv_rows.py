"""Rows of CSV files, read in any order without holding them in memory: where each begins is known."""

import csv
import io
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.data.shards.records import BOM, Piece, Records, Row, check_text, shuffled, tables_of

_LONGEST_FIELD = 2**31 - 1


@dataclass(frozen=True)
class CsvRows:
    """Rows of CSV files; all values are text."""

    records: Records
    column: str | None
    names: tuple[str, ...]
    """The columns."""
    schema: Any = None

    @property
    def num_rows(self) -> int:
        """Records, without header lines."""
        return len(self.records)

    def order(self, seed: int | None) -> np.ndarray:
        """Any order is as good as any other."""
        return shuffled(self.num_rows, seed)

    def lines(self, order: np.ndarray) -> Iterator[bytes]:
        """Rows as JSON objects."""
        return (json.dumps(row, ensure_ascii=False).encode("utf-8") for row in self._rows(order))

    def tables(self, order: np.ndarray) -> Iterator[Any]:
        """Columns of strings."""
        return tables_of(self._rows(order), self.schema)

    def texts(self, order: np.ndarray) -> Iterator[Piece]:
        """The column."""
        return ((row[self.column], True) for row in self._rows(order) if self.column is not None)

    def _rows(self, order: np.ndarray) -> Iterator[Row]:
        for record in self.records.read(order):
            values = next(values for values in csv.reader(io.StringIO(record.decode("utf-8"), newline="")) if values)
            yield dict(zip(self.names, values, strict=True))


def open_csv(files: Sequence[Path], column: str | None, names: Sequence[str] | None, with_schema: bool) -> CsvRows:
    """Read all files once: every record must have the columns of the header, or `names` where there is no header."""
    csv.field_size_limit(_LONGEST_FIELD)  # texts are longer than what the csv module takes for a mistake
    found = [_index_csv(path, tuple(names) if names is not None else None) for path in files]
    header = found[0][0]
    for path, (other, _) in zip(files, found, strict=True):
        if other != header:
            raise UserError(f"SRC: {path}: has columns {', '.join(other)}, and {files[0]} has {', '.join(header)}")
    if column is not None:
        check_text(dict.fromkeys(header, ""), column, str(files[0]))
    schema = None
    if with_schema:
        arrow = require("pyarrow", "--format", "parquet")
        schema = arrow.schema([(name, arrow.string()) for name in header])
    return CsvRows(Records(files, [starts for _, starts in found]), column, header, schema)


def _index_csv(path: Path, names: tuple[str, ...] | None) -> tuple[tuple[str, ...], np.ndarray]:
    """The columns, and where the records begin; a record may go over several lines."""
    starts = array("q")
    position, line = 0, 1
    with path.open("rb") as file:
        position = len(BOM) if file.read(len(BOM)) == BOM else 0
        file.seek(position)

        def lines() -> Iterator[str]:
            nonlocal position
            for content in file:
                position += len(content)
                yield content.decode("utf-8")

        reader = csv.reader(lines(), strict=True)
        start = position
        try:
            for values in reader:  # which takes no more lines than the record has
                if values and names is None:
                    names = _header(values, path)
                elif values:
                    if len(values) != len(names or ()):
                        expected = f"{len(names or ())} ({', '.join(names or ())})"
                        raise UserError(
                            f"SRC: {path}: line {line} has {len(values)} columns, not {expected}; correct it"
                        )
                    starts.append(start)
                start, line = position, reader.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            kind = "CSV" if isinstance(error, csv.Error) else "UTF-8"
            remedy = "correct it or convert the file"
            raise UserError(f"SRC: {path}: line {line} is not {kind} ({error}); {remedy}") from error
    return names or (), np.frombuffer(starts, dtype=np.int64) if starts else np.zeros(0, np.int64)


def _header(values: list[str], path: Path) -> tuple[str, ...]:
    if len(set(values)) < len(values) or not all(values):
        raise UserError(
            f"SRC: {path}: its first line does not name the columns, each once; add such a line, or give --columns"
        )
    return tuple(values)
