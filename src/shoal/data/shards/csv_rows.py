"""Rows of CSV files; a record may go over several lines, and all values are text."""

import csv
import io
import json
import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.data.shards.labels import Labels, no_column
from shoal.data.shards.records import FileRows, Records, Row, open_at_text

_LONGEST_FIELD = 2**31 - 1
_NO_HEADER = "; if its first line is a row, name the columns: --columns"


class _Record(NamedTuple):
    line: int
    start: int
    """In bytes."""
    values: list[str]


def open_csv(
    files: Sequence[Path],
    column: str | None,
    labels: Labels | None,
    columns: Sequence[str] | None,
    with_schema: bool,
) -> FileRows:
    """Read all files once: every record must have the columns of the header, or `columns` where there is no header."""
    csv.field_size_limit(_LONGEST_FIELD)  # texts are longer than what the csv module takes for a mistake
    names, starts = list(columns or ()), []
    for path in files:
        records = _records(path)
        found = _columns(next(records, None), columns, path)
        ...
