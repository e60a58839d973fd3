"""Which class a row of shards is of: by its number, or by its name where the index lists the names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import UserError
from shoal.data.shards.index import ShardIndex
from shoal.data.shards.opened import RowError

_LISTED = 10
_REMEDY = "set data.classes and data.label to what the rows hold, or correct the row"


@dataclass(frozen=True)
class Classes:
    """The classes that a column of rows holds."""

    column: str
    count: int
    names: Mapping[str, int]
    """As the index lists them; empty where it lists none."""
    are_values: bool
    """Whether the names are the values of the column. Otherwise it may hold numbers in their place."""

    def of(self, row: Mapping[str, Any]) -> int:
        """The number of a row's class; raises RowError where it has none."""
        value = row.get(self.column)
        if value is None:
            columns = ", ".join(map(str, row)) or "none"
            raise RowError(
                f"has no column {self.column}; its columns: {columns}", "set data.label to that of the class"
            )
        number = self.names.get(str(value))
        if number is None and not (self.are_values and not self._are_numbers):
            number = _number(value)
        if number is None or not 0 <= number < self.count:
            known = f"numbers from 0 to {self.count - 1}"
            if self.names and not self._are_numbers:
                known = ", ".join(list(self.names)[:_LISTED]) + ", ..." * (len(self.names) > _LISTED)
            raise RowError(f"column {self.column} is {_shown(value)}; the classes are {known}", _REMEDY)
        return number

    @property
    def _are_numbers(self) -> bool:
        return are_numbers(self.names)


def are_numbers(names: Any) -> bool:
    """Whether the names of classes are 0, 1, 2, and so on."""
    return list(names) == [str(number) for number in range(len(names))]


def label_column(given: str | None, train: ShardIndex, usual: str) -> str:
    """The column with the class: as the recipe calls it, as the index does, or as it is usually called."""
    return str(given or train.about.get("label") or usual)


def find_classes(column: str, train: ShardIndex, val: ShardIndex | None, count: int | None) -> Classes:
    """The classes of a column, as the indexes say, and their number, where the recipe says it."""
    of_index = train.about.get("label")
    names = train.about.get("classes") if of_index in (None, column) else None  # those of another column are no use
    if val is not None and names is not None and val.about.get("classes") not in (None, names):
        raise UserError("data.dir: the shards in val have other classes than those in train; shard both together")
    if names is None and count is None:
        raise UserError(
            "data.classes: is required, because the index of the shards names no classes"
            f"{'' if of_index in (None, column) else f' of column {column}'}, for example data.classes=1000"
        )
    if names is not None and count is not None and count != len(names):
        has_room = are_numbers(names) and count > len(names)  # for numbers that no row here has
        if not has_room:
            raise UserError(
                f"data.classes: {count} is not the number of classes in the index, {len(names)}; leave it out"
            )
    by_name = {name: number for number, name in enumerate(names or ())}
    # In tars the class of an image is always its number, and the names are those of the folders they came from.
    is_tar = train.format == "tar"
    return Classes(column, count or len(by_name), {} if is_tar else by_name, of_index is not None and not is_tar)


def _number(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
