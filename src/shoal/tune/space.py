"""A space: which fields of a recipe a search may set, to what, and when. Read from a file, checked before all else."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import UserError
from shoal.core.section import one_of
from shoal.recipe.yaml_tree import parse_value, read_yaml
from shoal.tune.domains import KINDS, Domain, Options, make_domain

Config = dict[str, Any]
"""dotted field -> value: one point of a space."""

FIRST, SETTINGS = "first", "tune"
"""Keys of a space file that are not fields of a recipe."""
_CALL = re.compile(r"\s*(?P<kind>[A-Za-z_]\w*)\s*\((?P<arguments>.*?)\)\s*(?:if\s+(?P<condition>.+?)\s*)?", re.DOTALL)
_CONDITION = re.compile(r"(?P<key>[\w.]+)\s*(?P<operator>==|!=|\bin\b)\s*(?P<value>.+)", re.DOTALL)
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z0-9_]+)+")
_QUOTED = re.compile(r"""(?<=[(\[,\s])("(?:\\.|[^"\\])*"|'(?:''|[^'])*')(?=\s*[)\],]|\s*$)""", re.DOTALL)
_LINE = f"optim.lr: {KINDS['loguniform']}"
_EXAMPLE = f"for example {KINDS['loguniform']}"


@dataclass(frozen=True)
class Condition:
    """A setting is there only if another has one of some values."""

    key: str
    values: tuple[Any, ...]
    is_negated: bool = False

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Whether it does in these settings; not where the other is not there itself."""
        return self.key in config and (Options(self.values).holds(config[self.key]) != self.is_negated)


@dataclass(frozen=True)
class Setting:
    """A field of a recipe that a search sets."""

    key: str
    domain: Domain
    condition: Condition | None = None


@dataclass(frozen=True)
class Space:
    """All of them, each after those that its condition asks for."""

    settings: tuple[Setting, ...]
    first: tuple[Config, ...] = ()
    """Points to try before any other; what they leave open is proposed."""
    tune: Mapping[str, Any] = field(default_factory=dict)
    """How to search, where the file says: the fields of `TuneSection`."""

    def __iter__(self) -> Iterator[Setting]:
        return iter(self.settings)

    def open_settings(self, config: Mapping[str, Any]) -> Iterator[Setting]:
        """Those whose condition holds, one after the other, as `config` is filled by whoever asks."""
        for setting in self.settings:
            if setting.condition is None or setting.condition.holds(config):
                yield setting

    def domain(self, key: str) -> Domain:
        """What a field may be."""
        return next(setting.domain for setting in self.settings if setting.key == key)

    @property
    def keys(self) -> list[str]:
        """The fields."""
        return [setting.key for setting in self.settings]

    def grid(self) -> list[Config]:
        """Every combination of lists, the last field moving fastest, without fields whose condition does not hold."""
        points: list[Config] = [{}]
        for setting in self.settings:
            assert isinstance(setting.domain, Options)
            values = setting.domain.values
            points = [
                point | ({} if value is _LEFT_OUT else {setting.key: value})
                for point in points
                for value in (values if setting.condition is None or setting.condition.holds(point) else [_LEFT_OUT])
            ]
        return points


_LEFT_OUT = object()


def read_space(source: str | Path | Mapping[str, Any]) -> Space:
    """The space in a file, or in a mapping of the same form; a `UserError` names all that is wrong with it."""
    if isinstance(source, Mapping):
        return parse_space(source)
    file = Path(source).expanduser()
    if not file.is_file():
        what = "is a folder" if file.is_dir() else "no such file"
        raise UserError(
            f"space {str(source)!r}: {what}; give a .yaml file with lines like optim.lr: {KINDS['loguniform']}"
        )
    try:
        tree, _ = read_yaml(file)
    except UserError as error:
        told = str(error).replace("recipe ", "space ", 1).replace("sections such as `train:`", f"lines such as {_LINE}")
        raise UserError(told + (f"; write lines such as {_LINE}" if told.endswith("is empty") else "")) from error
    return parse_space(tree)


def parse_space(tree: Mapping[str, Any]) -> Space:
    """The space that a mapping describes."""
    wrong: list[str] = []
    settings: dict[str, Setting] = {}
    rest = _dotted({key: value for key, value in tree.items() if key not in (FIRST, SETTINGS)}, wrong)
    for key, value in rest.items():
        try:
            settings[key] = _parse_setting(key, value)
        except UserError as error:
            given = "" if str(value) in str(error) else f" (given: {value})"
            wrong.append(f"space: {key}: {error}{given}")
    if not rest and not wrong:
        wrong.append(f"space: has no fields to search over; write lines like optim.lr: {KINDS['loguniform']}")
    wrong += _condition_problems(settings, rest)
    if wrong:
        raise UserError("\n".join(wrong))
    ordered = _ordered(settings)
    tune = {} if tree.get(SETTINGS) is None else tree[SETTINGS]
    if not isinstance(tune, Mapping):
        raise UserError(
            f"space: {SETTINGS}: should hold settings of the search, for example {SETTINGS}: {{trials: 20}}"
        )
    space = Space(tuple(ordered), tune=tune)
    return Space(space.settings, tuple(_parse_first(tree.get(FIRST), space)), tune)


def _dotted(tree: Mapping[str, Any], wrong: list[str]) -> dict[str, Any]:
    """`optim: {lr: ...}` is the same as `optim.lr: ...`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        is_section = isinstance(value, Mapping) and value
        below = {f"{key}.{name}": inner for name, inner in _dotted(value, wrong).items()} if is_section else {}
        for name, inner in (below if is_section else {str(key): value}).items():
            if name in found:
                wrong.append(f"space: {name}: is given twice")
            found[name] = inner
    return found


def _parse_setting(key: str, value: Any) -> Setting:
    # What stands between quotes is hidden meanwhile: choice("a) if b", c).
    match = _CALL.fullmatch(_QUOTED.sub(lambda found: "_" * len(found[0]), value)) if isinstance(value, str) else None
    if match is None:
        hint = "a fixed value is an override: leave it out here and write KEY=VALUE after the recipe"
        raise UserError(f"{value!r} says no range, {_EXAMPLE}; {hint}")
    kind = match["kind"]
    if kind not in KINDS:
        raise UserError(f"{kind} is unknown; {one_of(kind, KINDS)}")
    domain = make_domain(kind, _parse_values(value[slice(*match.span("arguments"))]))
    condition = value[slice(*match.span("condition"))] if match["condition"] else None
    return Setting(key, domain, None if condition is None else _parse_condition(condition))


def _parse_values(text: str) -> list[Any]:
    values = parse_value(f"[{text}]", "values")
    assert isinstance(values, list)
    return values


def _parse_condition(text: str) -> Condition:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UserError(f"condition {text!r} should be FIELD == VALUE, FIELD != VALUE or FIELD in (A, B)")
    inner = match["value"].strip()
    if match["operator"] == "in":
        if not (inner[:1] in "([" and inner[-1:] in ")]"):
            raise UserError(f"condition {text!r} should list its values: {match['key']} in (A, B)")
        return Condition(match["key"], tuple(_parse_values(inner[1:-1])))
    return Condition(match["key"], tuple(_parse_values(inner)), is_negated=match["operator"] == "!=")


def _condition_problems(settings: Mapping[str, Setting], given: Collection[str]) -> list[str]:
    wrong = []
    for key, setting in settings.items():
        if not _KEY.fullmatch(key):
            wrong.append(f"space: {key}: should be a dotted field of a recipe such as optim.lr")
        condition = setting.condition
        if condition is None:
            continue
        other = settings.get(condition.key)
        if other is None and condition.key in given:
            continue  # is wrong itself
        if other is None:
            near = one_of(condition.key, settings)
            wrong.append(f"space: {key}: its condition asks for {condition.key}, which this space does not set; {near}")
        elif not isinstance(other.domain, Options):
            wrong.append(f"space: {key}: its condition asks for {condition.key}, which must be a choice or a grid")
        elif unknown := [value for value in condition.values if not other.domain.holds(value)]:
            allowed = ", ".join(map(str, other.domain.values))
            wrong.append(
                f"space: {key}: its condition asks for {condition.key} {unknown[0]!r}, which is never so: {allowed}"
            )
        elif not any(condition.holds({condition.key: value}) for value in other.domain.values):
            wrong.append(f"space: {key}: its condition never holds, whatever {condition.key} is")
    return wrong


def _ordered(settings: Mapping[str, Setting]) -> list[Setting]:
    """Each after what its condition asks for, else as written."""
    done: dict[str, Setting] = {}
    while len(done) < len(settings):
        ready = [
            setting
            for key, setting in settings.items()
            if key not in done and (setting.condition is None or setting.condition.key in done)
        ]
        if not ready:
            circle = ", ".join(key for key in settings if key not in done)
            raise UserError(f"space: the conditions of {circle} wait for each other")
        done |= {setting.key: setting for setting in ready}
    return list(done.values())


def _parse_first(points: Any, space: Space) -> Iterator[Config]:
    if points is None:
        return
    if not isinstance(points, list) or not all(isinstance(point, Mapping) for point in points):
        raise UserError(f"space: {FIRST}: should be a list of points, for example {FIRST}: [{{optim.lr: 1e-3}}]")
    seen: list[Config] = []
    for number, point in enumerate(points):
        wrong: list[str] = []
        given = _dotted(point, wrong)
        if wrong:
            raise UserError(wrong[0].replace("space:", f"space: {FIRST}[{number}]:", 1))
        for key, value in given.items():
            if key not in space.keys:
                raise UserError(
                    f"space: {FIRST}[{number}]: {key}: this space does not set it; {one_of(key, space.keys)}"
                )
            if not (domain := space.domain(key)).holds(value):
                raise UserError(f"space: {FIRST}[{number}]: {key}: {value!r} is not in {domain.words()}")
            given[key] = domain.nearest(value)
        if closed := [key for key in given if _is_closed(space, key, given)]:
            raise UserError(f"space: {FIRST}[{number}]: {closed[0]}: its condition does not hold there; leave it out")
        if given in seen:
            raise UserError(
                f"space: {FIRST}[{number}]: is the same as {FIRST}[{seen.index(given)}]; give each point once"
            )
        seen.append(given)
        yield given


def _is_closed(space: Space, key: str, given: Mapping[str, Any]) -> bool:
    """Whether a field's condition cannot hold, whatever else is proposed for what the point leaves open."""
    condition = next(setting.condition for setting in space if setting.key == key)
    if condition is None:
        return False
    return (condition.key in given and not condition.holds(given)) or _is_closed(space, condition.key, given)
