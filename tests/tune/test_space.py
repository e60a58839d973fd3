"""A space file is read as it is meant, or refused in one line that names the field."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.recipe.yaml_tree import read_yaml, to_yaml
from shoal.tune.domains import Options, Range
from shoal.tune.folder import space_tree
from shoal.tune.space import Condition, Config, Setting, Space, parse_space, read_space
from tests.tune.test_domains import domains, options

TREE: dict[str, Any] = {
    "optim.lr": "loguniform(1e-5, 1e-2)",
    "optim.name": "choice(adamw, sgd)",
    "optim.momentum": "uniform(0.5, 0.99) if optim.name == sgd",
    "model.layers": "randint(1, 4)",
    "model.hidden": "grid([64], [64, 32])",
}


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Some settings, of which later ones may hang on earlier ones that are lists."""
    found: list[Setting] = []
    for index in range(draw(st.integers(1, 5))):
        above = [setting for setting in found if isinstance(setting.domain, Options)]
        condition = None
        is_bound: bool = draw(st.booleans())
        if above and is_bound:
            other = draw(st.sampled_from(above))
            assert isinstance(other.domain, Options)
            values = draw(st.lists(st.sampled_from(other.domain.values), min_size=1, max_size=3))
            condition = Condition(other.key, tuple(values), draw(st.booleans()))
            if not any(condition.holds({other.key: value}) for value in other.domain.values):
                condition = Condition(other.key, tuple(values))
        domain = draw(st.one_of(domains, options()))
        found.append(Setting(f"section{index % 2}.field{index}", domain, condition))
    return Space(tuple(found))


def refused(tree: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        parse_space(tree)
    return str(caught.value)


def test_a_space_is_read_as_written() -> None:
    space = parse_space(TREE)
    assert space.keys == ["optim.lr", "optim.name", "model.layers", "model.hidden", "optim.momentum"]
    assert space.domain("optim.lr") == Range(1e-5, 1e-2, is_log=True)
    assert space.domain("optim.name") == Options(("adamw", "sgd"))
    assert space.domain("model.layers") == Range(1.0, 4.0, is_whole=True)
    assert space.domain("model.hidden") == Options(([64], [64, 32]), is_grid=True)
    assert [setting.condition for setting in space if setting.condition] == [Condition("optim.name", ("sgd",))]
    assert space.first == () and space.tune == {}


def test_sections_may_be_nested_or_dotted() -> None:
    nested = {
        "optim": {"lr": TREE["optim.lr"], "name": TREE["optim.name"], "momentum": TREE["optim.momentum"]},
        "model": {"layers": TREE["model.layers"], "hidden": TREE["model.hidden"]},
    }
    assert parse_space(nested) == parse_space(TREE)
    points = [{"optim": {"lr": 1e-3, "name": "sgd"}}]
    assert parse_space(nested | {"first": points}).first == ({"optim.lr": 1e-3, "optim.name": "sgd"},)
    deep = parse_space({"a": {"b": {"c": "choice(1, 2)"}, "b.d": "choice(1, 2)"}})
    assert deep.keys == ["a.b.c", "a.b.d"]


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("== sgd", Condition("optim.name", ("sgd",))),
        ("  ==  'sgd'  ", Condition("optim.name", ("sgd",))),
        ("!= adamw", Condition("optim.name", ("adamw",), is_negated=True)),
        ("in (adamw, sgd)", Condition("optim.name", ("adamw", "sgd"))),
        ("in [sgd]", Condition("optim.name", ("sgd",))),
        ('in ("sgd")', Condition("optim.name", ("sgd",))),
    ],
)
def test_every_form_of_a_condition(text: str, condition: Condition) -> None:
    space = parse_space({"optim.name": "choice(adamw, sgd)", "a.b": f"uniform(0, 1) if optim.name {text}"})
    assert space.settings[1].condition == condition


@pytest.mark.parametrize(
    ("condition", "config", "holds"),
    [
        (Condition("a", (1, 2)), {"a": 1}, True),
        (Condition("a", (1, 2)), {"a": 3}, False),
        (Condition("a", (1, 2)), {}, False),
        (Condition("a", (1,)), {"a": True}, False),
        (Condition("a", (1,), is_negated=True), {"a": 1}, False),
        (Condition("a", (1,), is_negated=True), {"a": True}, True),
        (Condition("a", (1,), is_negated=True), {}, False),
        (Condition("a", (None,)), {"a": None}, True),
        (Condition("a", ([1, 2],)), {"a": [1, 2]}, True),
    ],
)
def test_when_a_condition_holds(condition: Condition, config: Config, holds: bool) -> None:
    assert condition.holds(config) is holds


def test_settings_are_opened_as_those_before_them_are_filled() -> None:
    space = parse_space(
        {"c.c": "choice(1, 2) if b.b == 1", "b.b": "choice(1, 2) if a.a == 1", "a.a": "choice(1, 2)"},
    )
    assert space.keys == ["a.a", "b.b", "c.c"], "each after what its condition asks for"
    for values, keys in (((1, 1, 1), "abc"), ((1, 2), "ab"), ((2,), "a")):
        config: Config = {}
        for setting, value in zip(space.open_settings(config), values, strict=True):
            config[setting.key] = value
        assert [key[0] for key in config] == list(keys)


def test_a_grid_is_every_combination_without_what_is_not_there() -> None:
    space = parse_space(
        {"a.a": "grid(1, 2)", "b.b": "choice(x, y) if a.a == 1", "c.c": "grid(1, 2, 3) if b.b == y", "d.d": "grid(0)"}
    )
    assert space.grid() == [
        {"a.a": 1, "d.d": 0, "b.b": "x"},
        {"a.a": 1, "d.d": 0, "b.b": "y", "c.c": 1},
        {"a.a": 1, "d.d": 0, "b.b": "y", "c.c": 2},
        {"a.a": 1, "d.d": 0, "b.b": "y", "c.c": 3},
        {"a.a": 2, "d.d": 0},
    ]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("optim.lr", "logunifrom(1e-5, 1e-2)", "space: optim.lr: logunifrom is unknown; .* mean loguniform?"),
        ("optim.lr", "normal(0, 1)", "space: optim.lr: normal is unknown; allowed: choice, grid, lograndint,"),
        ("optim.lr", "uniform(2, 1)", r"space: optim.lr: uniform\(2, 1\) is empty"),
        ("optim.lr", "uniform(1, 1)", r"space: optim.lr: uniform\(1, 1\) holds one value alone"),
        ("optim.lr", "loguniform(0, 1)", r"space: optim.lr: loguniform\(0, 1\) must begin above 0"),
        ("optim.lr", "choice(1, 2, 1)", "space: optim.lr: choice holds 1 twice"),
        ("optim.lr", "choice()", r"space: optim.lr: choice\(\) has no values"),
        ("optim.lr", "uniform(0 1)", "space: optim.lr: uniform takes two numbers"),
        ("optim.lr", "choice(1, [2)", "space: optim.lr: values: .* is not a valid YAML value"),
        ("optim.lr", "choice(*a)", "space: optim.lr: values: .* is not a valid YAML value"),
        ("optim.lr", "choice({a: 1}, 2)", "space: optim.lr: choice takes words, finite numbers"),
        ("optim.lr", "choice(!!binary aGk=)", "space: optim.lr: choice takes words"),
        ("optim.lr", "choice(!!timestamp 2026-01-01)", "space: optim.lr: choice takes words"),
        ("optim.lr", "choice(.inf, 1)", "space: optim.lr: choice takes words, finite numbers"),
        ("optim.lr", 0.1, "space: optim.lr: 0.1 says no range, for example .*; a fixed value is an override"),
        ("optim.lr", "0.1", "space: optim.lr: '0.1' says no range"),
        ("optim.lr", None, "space: optim.lr: None says no range"),
        ("optim.lr", True, "space: optim.lr: True says no range"),
        ("optim.lr", [1, 2], r"space: optim.lr: \[1, 2\] says no range"),
        ("optim.lr", {}, "space: optim.lr: {} says no range"),
        ("optim.lr", "uniform(0, 1) when a.b == 1", "space: optim.lr: .* says no range"),
        ("optim.lr", "uniform(0, 1", "space: optim.lr: .* says no range"),
        ("lr", "uniform(0, 1)", "space: lr: should be a dotted field of a recipe such as optim.lr"),
        ("optim.", "uniform(0, 1)", r"space: optim\.: should be a dotted field"),
        ("optim lr.x", "uniform(0, 1)", "space: optim lr.x: should be a dotted field"),
        ("x.y", "uniform(0, 1) if optim.name", "space: x.y: condition 'optim.name' should be FIELD == VALUE"),
        ("x.y", "uniform(0, 1) if optim.name = sgd", "space: x.y: condition .* should be FIELD == VALUE"),
        ("x.y", "uniform(0, 1) if optim.name > 3", "space: x.y: condition .* should be FIELD == VALUE"),
        ("x.y", "uniform(0, 1) if optim.name in sgd", r"space: x.y: condition .* should list its values: "),
        ("x.y", "uniform(0, 1) if optim.name in ()", "space: x.y: its condition never holds, whatever optim.name is"),
        ("x.y", "uniform(0, 1) if optim.name != adamw, sgd", "space: x.y: its condition never holds"),
        ("x.y", "uniform(0, 1) if optim.name == adam", "space: x.y: .* optim.name 'adam', which is never so: adamw,"),
        ("x.y", "uniform(0, 1) if optim.name in (sgd, [)", "space: x.y: values: .* is not a valid YAML value"),
        ("x.y", "uniform(0, 1) if optim.nam == sgd", "space: x.y: .* does not set; .* did you mean optim.name?"),
        ("x.y", "uniform(0, 1) if model.layers == 2", "space: x.y: .* model.layers, which must be a choice or a grid"),
        ("x.y", "choice(1, 2) if x.y == 1", "space: the conditions of x.y wait for each other"),
        ("tune", [1], r"space: tune: should hold settings of the search, for example tune: {trials: 20}"),
        ("tune", 0, "space: tune: should hold settings"),
        ("first", {"optim.lr": 1e-3}, r"space: first: should be a list of points, for example "),
        ("first", [3], "space: first: should be a list of points"),
        ("first", [{"optim.lr": 1.0}], r"space: first\[0\]: optim.lr: 1.0 is not in loguniform\(1e-05, 0.01\)"),
        ("first", [{}, {"model.layers": 1.5}], r"space: first\[1\]: model.layers: 1.5 is not in randint\(1, 4\)"),
        ("first", [{"model.layers": math.inf}], r"space: first\[0\]: model.layers: inf is not in"),
        ("first", [{"optim.name": "lion"}], r"space: first\[0\]: optim.name: 'lion' is not in choice\(adamw, sgd\)"),
        ("first", [{"optim.rl": 1e-3}], r"space: first\[0\]: optim.rl: this space does not set it; .* optim.lr?"),
        ("first", [{"optim.name": "adamw", "optim.momentum": 0.9}], r"space: first\[0\]: optim.momentum: its con"),
        ("first", [{"optim.lr": 1e-3, "optim": {"lr": 1e-4}}], r"space: first\[0\]: optim.lr: is given twice"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_in_a_line_that_names_the_field(field: str, value: Any, words: str) -> None:
    told = refused(TREE | {field: value})
    assert re.match(words, told), told
    assert "\n" not in told


def test_a_field_given_twice_is_told_in_whatever_order() -> None:
    assert refused({"optim.lr": "choice(1, 2)", "optim": {"lr": "choice(3, 4)"}}) == "space: optim.lr: is given twice"
    assert refused({"optim": {"lr": "choice(3, 4)"}, "optim.lr": "choice(1, 2)"}) == "space: optim.lr: is given twice"


def test_conditions_in_a_circle_are_told() -> None:
    tree = {"a.a": "choice(1, 2) if c.c == 1", "b.b": "choice(1, 2) if a.a == 1", "c.c": "choice(1, 2) if b.b == 1"}
    told = refused(tree | {"d.d": "choice(1, 2)"})
    assert told == "space: the conditions of a.a, b.b, c.c wait for each other"


def test_a_space_without_fields_is_told() -> None:
    trees: list[dict[str, Any]] = [{}, {"tune": {"trials": 3}}, {"first": []}]
    for tree in trees:
        assert refused(tree).startswith("space: has no fields to search over; write lines like optim.lr: loguniform(")


def test_all_that_is_wrong_is_told_at_once_a_line_each() -> None:
    told = refused({"optim.lr": "unifrm(0, 1)", "model.x": 3, "model.y": "choice(1, 2) if optim.lr == 1"}).splitlines()
    assert [line.split(": ")[1] for line in told] == ["optim.lr", "model.x"], (
        "not that the condition's field is missing"
    )


def test_a_point_may_leave_open_what_its_fields_hang_on() -> None:
    first: list[Config] = [{"optim.momentum": 0.9}, {"model.layers": 2.0, "model.hidden": [64.0]}]
    points = parse_space(TREE | {"first": first}).first
    assert points == ({"optim.momentum": 0.9}, {"model.layers": 2, "model.hidden": [64]})
    layers, hidden = (parse_space(TREE | {"first": first}).first[1][key] for key in ("model.layers", "model.hidden"))
    assert type(layers) is int and type(hidden[0]) is int, "as the space has them"


def test_a_point_whose_field_hangs_on_what_is_not_there_is_told() -> None:
    tree = {"a.a": "choice(1, 2)", "b.b": "choice(1, 2) if a.a == 1", "c.c": "choice(1, 2) if b.b == 1"}
    told = refused(tree | {"first": [{"a.a": 2, "c.c": 1}]})
    assert told == "space: first[0]: c.c: its condition does not hold there; leave it out"


@pytest.mark.parametrize("text", ['choice("a) if b.c == d", "(", e)', "choice('a) if b', \"(\", e)"])
def test_quotes_hide_brackets_and_words(text: str) -> None:
    [setting] = parse_space({"a.b": text})
    assert isinstance(setting.domain, Options) and setting.condition is None
    assert setting.domain.values[1:] == ("(", "e") and setting.domain.values[0].startswith("a) if b")


def test_brackets_and_quotes_inside_words_are_no_matter() -> None:
    [one, other] = parse_space({"a.b": "choice(it's, f(x), b)", "a.c": "choice(1, 2) if a.b in (it's, f(x))"})
    assert one.domain == Options(("it's", "f(x)", "b"))
    assert other.condition == Condition("a.b", ("it's", "f(x)"))


@settings(max_examples=40)
@given(space=spaces())
def test_a_space_written_down_is_read_back_the_same(space: Space, tmp_path_factory: pytest.TempPathFactory) -> None:
    again = parse_space(space_tree(space))
    assert {setting.key: setting for setting in again} == {setting.key: setting for setting in space}
    file = tmp_path_factory.getbasetemp() / "space.yaml"
    try:
        file.write_text(to_yaml(space_tree(space)), encoding="utf-8")
    except UnicodeEncodeError:
        return
    assert parse_space(read_yaml(file)[0]) == again, "and so from a file"
    assert parse_space(yaml.safe_load(file.read_text(encoding="utf-8"))) == again, "by any reader"


def test_points_to_try_first_are_written_down_too() -> None:
    space = parse_space(TREE | {"first": [{"optim.lr": 1e-3}, {"optim": {"name": "sgd", "momentum": 0.9}}]})
    assert parse_space(space_tree(space)) == space


def test_a_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(
        "optim:\n  lr: loguniform(1e-5, 1e-2)\nmodel.hidden: choice([64], [32])\ntune: {trials: 3}\n"
        "first:\n- {optim.lr: 3e-4}\n"
    )
    space = read_space(file)
    assert space.keys == ["optim.lr", "model.hidden"] and space.tune == {"trials": 3}
    assert space.first == ({"optim.lr": 3e-4},)
    assert read_space(str(file)) == space == read_space(yaml.safe_load(file.read_text().replace("3e-4", "3.0e-4")))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file; give a .yaml file with lines like optim.lr: loguniform"),
        ("", "space .*space.yaml: is empty"),
        ("a: [", "space .*space.yaml, line 1: not valid YAML"),
        ("a.b: choice(1)\na.b: choice(2)", "a.b: is given twice in space.yaml, the second time in line 2"),
    ],
)
def test_a_file_that_is_none_is_told(tmp_path: Path, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_space(tmp_path / "space.yaml")
    assert "recipe" not in str(caught.value).replace(str(tmp_path), "")
    with pytest.raises(UserError, match=r"is a folder; give a \.yaml file"):
        read_space(tmp_path)


@given(text=st.text(max_size=30) | st.text("choicegridunform()[]{},'\"=!:if &*#\n1.5-", max_size=40))
def test_any_text_is_a_setting_or_refused_in_words(text: str) -> None:
    try:
        space = parse_space({"a.b": text, "c.d": "choice(1, 2)"})
    except UserError as error:
        assert str(error).startswith("space: ")
    else:
        assert isinstance(space, Space)
