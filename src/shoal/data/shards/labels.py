"""The classes that a column of rows holds, for the index: training needs to know them before it has read all rows."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.errors import UserError
from shoal.core.section import nearest

MOST_CLASSES = 100_000
DEFAULT = "label"
"""What the column is called where nobody says it; training looks for it under this name too."""
_LONGEST = 256
"""Characters of the name of a class."""
_FEW = 1000
"""So many different values are classes, even if no two rows have the same."""
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_MOST_LISTED = 20


class Labels:
    """The different values of a column.

    A column that was asked for must hold classes. One that is only called so may hold anything: then there are no
    classes, and `problem` says why.
    """

    def __init__(self, asked: str | None) -> None:
        self.column = asked or DEFAULT
        self.is_asked = asked is not None
        self.found: set[str] = set()
        self.problem: str | None = None
        self._num_rows = 0

    def has(self, names: Sequence[str], where: str, remedy: str = "") -> bool:
        """Whether the column is one of these; an error if it was asked for and is not."""
        if self.column in names:
            return True
        if self.is_asked:
            raise no_column("--label", where, self.column, names, remedy)
        return False

    def add_row(self, row: Mapping[str, Any], where: str) -> None:
        """One more row."""
        if self.has(list(row), where):
            self.add(row[self.column], where)
        else:
            self.refuse(f"{where}: has no column {self.column!r}")

    def add(self, value: Any, where: str, num_rows: int = 1) -> None:
        """One more value, of so many rows."""
        self._num_rows += num_rows
        if self.problem is not None:
            return
        if not isinstance(value, str | int) or value == "":
            self.refuse(f"{where}: {self.column!r} is {json.dumps(value, default=str)[:40]}, which is no class")
        elif len(str(value)) > _LONGEST:
            self.refuse(f"{where}: {self.column!r} has more than {_LONGEST} characters, which is no class")
        else:
            self.found.add(str(value))
            if len(self.found) > MOST_CLASSES:
                self.refuse(f"{where}: {self.column!r} has more than {MOST_CLASSES:,} different values")

    def refuse(self, problem: str) -> None:
        """There are no classes."""
        if self.is_asked:
            raise UserError(f"--label: {problem}; correct the rows, or leave this out to have no classes in the index")
        self.problem = self.problem or problem

    def classes(self) -> list[str]:
        """Sorted names; numbers are the numbers of classes, and so begin with 0 and leave none out."""
        numbers = [name for name in self.found if _NUMBER.fullmatch(name)]
        if not self.is_asked:
            self._doubt(numbers)
        if self.problem is not None:
            return []
        if not self.found or len(numbers) < len(self.found):
            return sorted(self.found)
        largest = max(numbers, key=lambda name: (len(name), name))
        if len(largest) > len(str(MOST_CLASSES)) or int(largest) >= MOST_CLASSES:
            self.refuse(f"{self.column!r} holds {largest[:20]}, and numbers of classes are below {MOST_CLASSES:,}")
            return []
        return [str(number) for number in range(int(largest) + 1)]

    def _doubt(self, numbers: Sequence[str]) -> None:
        """What is only called so may be something else: amounts, answers, or numbers of classes with a stray word."""
        others = sorted(self.found - set(numbers))
        odd = next(filter(_is_amount, others), others[0] if others and numbers else None)
        if odd is not None:
            self.refuse(
                f"{self.column!r} holds {odd[:40]!r}, which is not the number of a class"
                f"{'' if not numbers else f', and {min(numbers)}, which is'}; if all are names: --label {self.column}"
            )
        elif len(self.found) > max(_FEW, self._num_rows // 2):
            self.refuse(f"{self.column!r} has {len(self.found):,} different values in {self._num_rows:,} rows")


def _is_amount(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def common_classes(parts: Mapping[str, Labels]) -> tuple[list[str], str | None]:
    """The classes of the first part, which the others must not exceed; none, and a remark, where these are none."""
    first, *others = parts.values()
    classes = first.classes()
    for labels in others:
        unknown = sorted(labels.found - set(classes))
        if unknown and labels.problem is None:
            listed = ", ".join(unknown[:10])
            labels.refuse(f"{labels.column!r} of val has classes that train has not: {listed}")
    problem = next((labels.problem for labels in parts.values() if labels.problem is not None), None)
    if problem is None:
        if "0" in classes and "0" not in first.found:
            return classes, f"no row is of class 0, which numbers begin with; there are {len(classes)} classes with it"
        return classes, None
    # Where not even the first rows have classes, nobody expects any.
    remark = f"the index lists no classes: {problem}" if any(labels.found for labels in parts.values()) else None
    return [], remark


def no_column(option: str, where: str, column: str, names: Sequence[str], remedy: str = "") -> UserError:
    """The error that a column is not there; `remedy` is told where no name is near."""
    guess = nearest(column, map(str, names))
    listed = ", ".join(map(str, names[:_MOST_LISTED])) + (", ..." if len(names) > _MOST_LISTED else "")
    hint = f"; did you mean {guess}?" if guess else remedy
    return UserError(f"{option}: {where}: has no column {column!r}; it has: {listed or 'none'}{hint}")
