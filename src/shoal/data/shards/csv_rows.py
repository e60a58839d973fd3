"""Rows of CSV files: a record may go over several lines, and all values are text."""

import csv
import io
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.data.shards.labels import Labels, no_column
from shoal.data.shards.records import FileRows, Records, Row, open_at_text

_LONGEST_FIELD = 2**31 - 1
Columns = tuple[str, ...]


class _Record(NamedTuple):
    line: int
    start: int
    """In bytes."""
    values: list[str]


def open_csv(
    files: Sequence[Path], column: str | None, labels: Labels | None, columns: Columns | None, with_schema: bool
) -> FileRows:
    """Read all files once: every record must have the columns of the header, or `columns` where there is no header."""
    csv.field_size_limit(_LONGEST_FIELD)  # texts are longer than what the csv module takes for a mistake
    # Empty files have no columns, and no rows either.
    named, names = next(((path, found) for path in files if (found := _open_file(path, columns)[0])), (files[0], ()))
    remedy = "; if its first line is a row and no header, give --columns" if columns is None else ""
    if column is not None and column not in names:
        raise no_column("--column", str(named), column, names, remedy)
    if labels is not None and not labels.has(names, str(named), remedy):
        labels = None
    starts = [_index(path, names, labels, columns) for path in files]
    schema = None
    if with_schema:
        arrow = require("pyarrow", "--format", "parquet")
        schema = arrow.schema([(name, arrow.string()) for name in names])
    parse = partial(_row, names)
    return FileRows(Records(files, starts), names, parse, lambda record: _to_json(parse(record)), column, schema)


def _row(names: Columns, record: bytes) -> Row:
    values = next(values for values in csv.reader(io.StringIO(record.decode("utf-8"), newline="")) if values)
    return dict(zip(names, values, strict=True))


def _to_json(row: Row) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8")


def _index(path: Path, names: Columns, labels: Labels | None, columns: Columns | None) -> "array[int]":
    """Where the records begin."""
    found, records = _open_file(path, columns)
    if found and found != names:
        raise UserError(f"SRC: {path}: has columns {', '.join(found)}, and others have {', '.join(names)}")
    remedy = "correct it" if columns is None else "correct it, or --columns"
    starts = array("q")
    for line, start, values in records:
        if len(values) != len(names):
            expected = f"{len(names)} ({', '.join(names)})"
            raise UserError(f"SRC: {path}: line {line} has {len(values)} columns, not {expected}; {remedy}")
        if labels is not None:
            labels.add(values[names.index(labels.column)], f"{path}: line {line}")
        starts.append(start)
    return starts


def _open_file(path: Path, columns: Columns | None) -> tuple[Columns, Iterator[_Record]]:
    """The names of the columns, and the records without a header."""
    records = _records(path)
    first = next(records, None)
    if first is None:
        return columns or (), records
    if columns is None:
        return _header(first.values, path), records
    in_place = sum(_folded(name) == _folded(value) for name, value in zip(columns, first.values, strict=False))
    if 2 * in_place > len(columns):
        raise UserError(
            f"--columns: {path}: its first line is {','.join(first.values)[:60]}, a header of the same names; leave "
            "--columns out, or take that line out"
        )
    return columns, chain([first], records)


def _header(values: list[str], path: Path) -> Columns:
    number = next(filter(_is_number, values), None)
    if number is not None:
        raise UserError(
            f"SRC: {path}: its first line holds {number}, so it is a row and no header; name the columns: --columns. "
            "If it is a header, write words there"
        )
    if len(set(values)) == len(values) and sum(map(bool, values)) == len(values) - 1 > 0:
        raise UserError(
            f"SRC: {path}: column {values.index('') + 1} has no name in its first line; write one there, as in "
            f"{','.join(value or 'number' for value in values)[:60]}; or, if that line is a row, give --columns"
        )
    if len(set(values)) < len(values) or not all(values):
        raise UserError(
            f"SRC: {path}: its first line does not name the columns, each once; add such a line, or give --columns"
        )
    return tuple(values)


def _folded(name: str) -> str:
    return name.strip().casefold()


def _is_number(value: str) -> bool:
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def _records(path: Path) -> Iterator[_Record]:
    """All that are not empty."""
    with open_at_text(path) as file:
        line, start = 1, file.tell()
        position = start

        def lines() -> Iterator[str]:
            nonlocal position
            for content in file:
                position += len(content)
                yield content.decode("utf-8")

        reader = csv.reader(lines(), strict=True)
        try:
            for values in reader:  # which takes no more lines than the record has
                if values:
                    yield _Record(line, start, values)
                line, start = reader.line_num + 1, position
        except (csv.Error, UnicodeDecodeError) as error:
            kind = "CSV" if isinstance(error, csv.Error) else "UTF-8"
            raise UserError(
                f"SRC: {path}: line {line} is not {kind} ({error}); correct it or convert the file"
            ) from error
