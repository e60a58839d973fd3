import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.recipe.yaml_tree import dotted, parse_value, read_yaml, to_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("-3", -3),
        ("1_000", 1000),
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("-2e3", -2000.0),
        ("1.5", 1.5),
        ("1.", 1.0),
        (".5", 0.5),
        ("1.0e-3", 1e-3),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1, 2e0, x]", [1, 2.0, "x"]),
        ("{a: 1}", {"a": 1}),
        # words that YAML 1.1 would take for something else
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("2026-01-01", "2026-01-01"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("'3'", "3"),
        ("~/data", "~/data"),
        ("my.module:build", "my.module:build"),
        ("${env:NAME}", "${env:NAME}"),
        ("a=b", "a=b"),
    ],
)
def test_a_value_is_read_as_people_write_it(text: str, value: Any) -> None:
    found = parse_value(text, "optim.lr")
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize("text", ["[1", "{a: ", "a: b: c", "!!python/name:os.system", "@x", "'", "&a [*b]"])
def test_what_is_no_value_is_told_with_its_field(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_value(text, "optim.lr")
    message = str(caught.value)
    assert message.startswith(f"optim.lr: {text!r} is not a valid YAML value") and len(message.splitlines()) == 1


def test_a_file_is_read_with_the_line_of_every_value(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("# a comment\nname: x\n\ntrain:\n  epochs: 3\n  nested: {a: 1,\n           b: 2}\nlist: [{c: 3}]\n")
    tree, lines = read_yaml(file)
    assert tree == {"name": "x", "train": {"epochs": 3, "nested": {"a": 1, "b": 2}}, "list": [{"c": 3}]}
    assert lines == {
        ("name",): "my.yaml, line 2",
        ("train",): "my.yaml, line 4",
        ("train", "epochs"): "my.yaml, line 5",
        ("train", "nested"): "my.yaml, line 6",
        ("train", "nested", "a"): "my.yaml, line 6",
        ("train", "nested", "b"): "my.yaml, line 7",
        ("list",): "my.yaml, line 8",
    }


def test_anchors_and_merge_keys_work(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("a: &base {x: 1, y: 2}\nb: {<<: *base, y: 3}\n")
    assert read_yaml(file)[0] == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "should be sections such as `train:`, but is a list"),
        (b"word\n", "should be sections such as `train:`, but is a str"),
        (b"a: 1\nb: [1,\n", "line 3: not valid YAML"),
        (b"a: 1\n\tb: 2\n", "line 2: not valid YAML"),
        (b"a: 1\na: 2\n", "a: is given twice in bad.yaml, the second time in line 2"),
        (b"a:\n  b: 1\n  c: 2\n  b: 3\n", "a.b: is given twice in bad.yaml, the second time in line 4"),
        (b"a: {b: 1, b: 2}\n", "a.b: is given twice"),
        (b"a: !!python/object/apply:os.getcwd []\n", "line 1: not valid YAML"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a: 1\n---\nb: 2\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_recipe_is_told_with_its_name(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_yaml(file)
    assert says in str(caught.value) and "bad.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone.yaml: cannot be read"):
        read_yaml(tmp_path / "gone.yaml")


# What JSON can hold, with texts that look like numbers, dates and the rest drawn often.
texts = (
    st.text() | st.text("0123456789eE.+-_:xaf", max_size=8) | st.sampled_from(["yes", "null", "~", "1e3", "=", "<<"])
)
trees = st.dictionaries(
    texts,
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


@given(tree=trees)
def test_what_is_written_is_read_back_as_it_was_by_us_and_by_others(
    tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "written.yaml"
    file.write_text(to_yaml(tree), encoding="utf-8")
    assert repr(read_yaml(file)[0]) == repr(tree)
    assert repr(yaml.safe_load(file.read_text(encoding="utf-8"))) == repr(tree)


@pytest.mark.parametrize(
    ("path", "text"), [(("optim", "lr"), "optim.lr"), ((), ""), (("a\x1b[31m",), "a\\x1b[31m"), (("ä", "\n"), "ä.\\n")]
)
def test_a_path_is_named_with_dots_and_garbles_no_terminal(path: tuple[str, ...], text: str) -> None:
    assert dotted(path) == text
