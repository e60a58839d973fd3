"""What a setting may be: ranges and lists, each of which a number between 0 and 1 picks a value from."""

import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import UserError


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both among them where they are whole."""

    low: float
    high: float
    is_log: bool = False
    """Each power of ten is as likely as another."""
    is_whole: bool = False

    def at(self, place: float) -> float | int:
        """The value at a place between 0 and 1."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_whole else (self.low, self.high)
        if self.is_log:
            value = math.exp(math.log(low) + place * (math.log(high) - math.log(low)))
        else:
            value = low + place * (high - low)
        # exp(log(x)) is not quite x.
        return self.nearest(low if place <= 0 else high if place >= 1 else value)

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1: `at` finds it there again."""
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_whole else (self.low, self.high)
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return 0.5 if high == low else min(max((value - low) / (high - low), 0.0), 1.0)

    def nearest(self, value: float) -> float | int:
        """The value of the range that is nearest to another."""
        value = min(max(value, self.low), self.high)
        return min(max(math.floor(value + 0.5), int(self.low)), int(self.high)) if self.is_whole else float(value)

    def holds(self, value: Any) -> bool:
        """Whether a value is in the range."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        return not self.is_whole or value == int(value)

    def extremes(self) -> list[Any]:
        """Values that a recipe must take if it takes all."""
        return [self.nearest(self.low), self.nearest(self.high)]

    def words(self) -> str:
        """As a space file has it."""
        name = ("log" if self.is_log else "") + ("randint" if self.is_whole else "uniform")
        return f"{name}({self.nearest(self.low)!r}, {self.nearest(self.high)!r})"


@dataclass(frozen=True)
class Options:
    """A few values."""

    values: tuple[Any, ...]
    is_grid: bool = False
    """Each is to be tried as often as the others."""

    def at(self, place: float) -> Any:
        """The value at a place between 0 and 1."""
        return self.values[min(int(place * len(self.values)), len(self.values) - 1)]

    def place(self, value: Any) -> float:
        """Where a value lies, from 0 to 1."""
        return 0.5 if len(self.values) == 1 else self.index(value) / (len(self.values) - 1)

    def index(self, value: Any) -> int:
        """Which of them it is: 1 is not True, and not 1.0 if 1.0 is there too."""
        exact = [i for i, own in enumerate(self.values) if own == value and type(own) is type(value)]
        return exact[0] if exact else next(i for i, own in enumerate(self.values) if _is_same(own, value))

    def nearest(self, value: Any) -> Any:
        """The one that a value is equal to: 1 where 1.0 is given."""
        return self.values[self.index(value)]

    def holds(self, value: Any) -> bool:
        """Whether it is one of them."""
        return any(_is_same(own, value) for own in self.values)

    def extremes(self) -> list[Any]:
        """All of them."""
        return list(self.values)

    def words(self) -> str:
        """As a space file has it."""
        return f"{'grid' if self.is_grid else 'choice'}({', '.join(map(as_text, self.values))})"


def _is_same(own: Any, value: Any) -> bool:
    """Whether two values are the same for a recipe, which tells true from 1."""
    if isinstance(own, list) and isinstance(value, list):
        return len(own) == len(value) and all(map(_is_same, own, value))
    return own == value and isinstance(own, bool) == isinstance(value, bool)


Domain = Range | Options
KINDS = {
    "uniform": "uniform(0.0, 0.5)",
    "loguniform": "loguniform(1e-5, 1e-2)",
    "randint": "randint(1, 8)",
    "lograndint": "lograndint(16, 1024)",
    "choice": "choice(32, 64, 128)",
    "grid": "grid(32, 64, 128)",
}
"""What a space file may call, with an example of each."""


def as_text(value: Any) -> str:
    """A value as a space file has it."""
    if isinstance(value, list):
        return f"[{', '.join(map(as_text, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if re.fullmatch(r"[A-Za-z_]([\w.:/-]*[\w./-])?", value, re.ASCII) and value.lower() not in _TAKEN:
        return value
    return '"' + "".join(map(_escaped, value)) + '"'


_TAKEN = ("true", "false", "null")


def _escaped(char: str) -> str:
    """A character between double quotes, as YAML reads it: unlike JSON, it does not put two halves of one together."""
    if char in '"\\':
        return f"\\{char}"
    return char if char == " " or char.isprintable() else f"\\U{ord(char):08x}"


def make_domain(kind: str, arguments: Sequence[Any]) -> Domain:
    """The domain that `kind(arguments)` means; a `UserError` says what is wrong with it, without the key."""
    if kind in ("choice", "grid"):
        if not arguments:
            raise UserError(f"{kind}() has no values to choose from; for example {KINDS[kind]}")
        values = tuple(arguments)
        if not all(map(_is_plain, values)):
            raise UserError(f"{kind} takes words, finite numbers, true, false, null, and lists of them")
        twice = [value for i, value in enumerate(values) if Options(values[:i]).holds(value)]
        if twice:
            raise UserError(f"{kind} holds {twice[0]!r} twice; give each value once")
        return Options(values, is_grid=kind == "grid")
    is_log, is_whole = kind.startswith("log"), kind.endswith("randint")
    numbers = [value for value in arguments if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(arguments) != 2 or len(numbers) != 2:
        raise UserError(f"{kind} takes two numbers, the least and the largest; for example {KINDS[kind]}")
    low, high = numbers
    if not (_is_plain(low) and _is_plain(high) and math.isfinite(float(high) - float(low))):
        raise UserError(f"{kind} takes finite numbers")
    if is_whole and (low != int(low) or high != int(high)):
        raise UserError(f"{kind} takes whole numbers (given: {low:g}, {high:g}); for other numbers there is uniform")
    if low >= high:
        what = "is empty" if low > high else "holds one value alone"
        raise UserError(f"{kind}({low:g}, {high:g}) {what}; the first number must be the smaller one")
    if is_log and low <= 0:
        raise UserError(f"{kind}({low:g}, {high:g}) must begin above 0, because every power of ten is as likely")
    if is_whole and max(-low, high) > 2**53:
        raise UserError(f"{kind} takes whole numbers up to 2**53 (given: {low:g}, {high:g})")
    return Range(float(low), float(high), is_log=is_log, is_whole=is_whole)


def _is_plain(value: Any) -> bool:
    """Whether a value stays as it is in a journal and in a recipe."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) <= sys.float_info.max
    return value is None or isinstance(value, bool | str)
