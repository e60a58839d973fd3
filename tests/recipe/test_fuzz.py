"""Mutated recipes: loading gives a checked recipe or a `UserError` of plain words, never another exception."""

import copy
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.recipe.load import LoadedRecipe, load_recipe, shipped_recipes
from shoal.recipe.schema import Recipe

VALID = {name: load_recipe([name]).tree() for name in shipped_recipes()}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["${env:PATH}", "${env:", "${x}", "a:b", "module:name", "adamw", "../..", "0", "1e5", "null"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def paths(tree: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    found: list[tuple[Any, ...]] = []
    for key, value in items:
        found += [(*prefix, key), *paths(value, (*prefix, key))]
    return found


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A shipped recipe with one to three things removed, replaced, renamed, added or moved."""
    tree = copy.deepcopy(VALID[draw(st.sampled_from(sorted(VALID)))])
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(paths(tree) or [("task",)]))
        parent: Any = tree
        for part in path[:-1]:
            parent = parent[part]
        if not isinstance(parent, dict) or path[-1] not in parent:
            continue
        kind = draw(st.sampled_from(["remove", "replace", "rename", "add", "move"]))
        if kind == "remove":
            del parent[path[-1]]
        elif kind == "replace":
            parent[path[-1]] = draw(values)
        elif kind == "rename":
            parent[draw(st.text(string.ascii_lowercase, min_size=1, max_size=8))] = parent.pop(path[-1])
        elif kind == "add":
            parent[draw(st.text(max_size=8) | st.integers() | st.none())] = draw(values)  # type: ignore[index]
        else:
            tree[path[-1]] = parent[path[-1]]
    return tree


def check(loaded: Any) -> None:
    try:
        result = loaded()
    except UserError as error:
        assert str(error).strip()
        for line in str(error).splitlines():
            assert ": " in line and "pydantic" not in line and "Traceback" not in line
    else:
        assert isinstance(result, LoadedRecipe) and isinstance(result.recipe, Recipe)
        assert load_recipe([result.tree()]).recipe == result.recipe, "the resolved recipe must load to itself"


@settings(max_examples=200)
@given(tree=mutated())
def test_a_mutated_recipe_loads_or_is_refused_in_words(tree: dict[str, Any]) -> None:
    check(lambda: load_recipe([tree]))


@settings(max_examples=200)
@given(tree=mutated())
def test_a_mutated_file_loads_or_is_refused_in_words(
    tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    try:
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    except (UnicodeEncodeError, yaml.YAMLError):
        return
    check(lambda: load_recipe([file]))


@settings(max_examples=150)
@given(text=st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
@example(text=b"a: &a [*a]")
@example(text=b"train: &t {epochs: *t}")
@example(text=b"? [1]\n: 2")
@example(text=b"<<: 3")
@example(text=b"a: 0x")
@example(text=b"name: 2026-01-01")
@example(text=b"1: 2")
def test_any_bytes_as_a_file_are_refused_in_words(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "bytes.yaml"
    file.write_bytes(text)
    check(lambda: load_recipe([file]))


@settings(max_examples=150)
@given(
    key=st.sampled_from([".".join(map(str, path)) for path in paths(VALID["cifar10_vit"])])
    | st.text(string.ascii_lowercase + "._-", max_size=12),
    value=st.text(max_size=12) | scalars.map(str),
)
def test_any_override_is_taken_or_refused_in_words(key: str, value: str) -> None:
    check(lambda: load_recipe(["cifar10_vit"], [f"{key}={value}"]))


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(tree=mutated(), word=st.text(max_size=10))
@example(tree=VALID["cifar10_vit"], word="~0")
def test_the_command_ends_with_0_or_2_and_never_a_traceback(
    tree: dict[str, Any], word: str, tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str]
) -> None:
    file = Path(tmp_path_factory.getbasetemp()) / "command.yaml"
    try:
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    except (UnicodeEncodeError, yaml.YAMLError):
        return
    words = [word] if word and not word.startswith("-") and "\0" not in word else []
    status = run(["train", str(file), *words, "--dry-run"])
    err = capfd.readouterr().err
    assert status in (0, 2) and "Traceback" not in err
