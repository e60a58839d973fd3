from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.recipe.merge import is_override, merge, overlay_of, parse_overrides


@pytest.mark.parametrize(
    ("word", "override"),
    [
        ("optim.lr=3e-4", True),
        ("model=mlp", True),
        ("a=", True),
        ("=3", True),
        ("data.dir=/some/where", True),
        ("x=y.yaml", True),
        ("digits", False),
        ("my.yaml", False),
        ("dir/a=b.yaml", False),
        ("a.yaml=b", False),
    ],
)
def test_an_override_is_told_from_a_recipe(word: str, override: bool) -> None:
    assert is_override(word) is override


def test_overrides_are_read_by_path_and_a_later_one_wins() -> None:
    found = parse_overrides(["optim.lr=3e-4", "a.b.c=[1, x]", "optim.lr=0.5", "data.dir=a=b", "x="])
    assert found == {("optim", "lr"): 0.5, ("a", "b", "c"): [1, "x"], ("data", "dir"): "a=b", ("x",): None}


@pytest.mark.parametrize("word", ["=3", ".lr=3", "optim.=3", "optim..lr=3", "a b=3", "3a=1", "a[0]=1", "é?=1"])
def test_a_key_that_is_none_is_told_with_an_example(word: str) -> None:
    with pytest.raises(
        UserError, match=r"an override looks like section.field=value, for example optim.lr=3e-4"
    ) as caught:
        parse_overrides([word])
    assert repr(word) in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "tree"),
    [
        ({("a", "b"): 1, ("a", "c"): 2}, {"a": {"b": 1, "c": 2}}),
        ({("model",): "mlp", ("model", "hidden"): [4]}, {"model": {"name": "mlp", "hidden": [4]}}),
        ({("model", "hidden"): [4], ("model",): "mlp"}, {"model": {"name": "mlp", "hidden": [4]}}),
        ({("optim",): {"lr": 1}, ("optim", "name"): "sgd"}, {"optim": {"lr": 1, "name": "sgd"}}),
        ({("task",): "a:b", ("task", "args", "x"): 1}, {"task": {"name": "a:b", "args": {"x": 1}}}),
        ({("track", "wandb"): True, ("track", "wandb", "mode"): "offline"}, {"track": {"wandb": {"mode": "offline"}}}),
        ({}, {}),
    ],
)
def test_overrides_become_one_tree_in_whatever_order(
    overrides: dict[tuple[str, ...], Any], tree: dict[str, Any]
) -> None:
    assert overlay_of(overrides) == tree


@pytest.mark.parametrize(
    "overrides",
    [
        {("optim",): "adam", ("optim", "lr"): 1},
        {("a", "b"): 3, ("a", "b", "c"): 1},
        {("a",): None, ("a", "b"): 1},
        {("train", "compile"): True, ("train", "compile", "mode"): 1},
        {("track", "wandb"): False, ("track", "wandb", "mode"): "offline"},
    ],
)
def test_a_field_inside_what_is_no_section_is_refused(overrides: dict[tuple[str, ...], Any]) -> None:
    with pytest.raises(UserError, match=r"cannot be set inside \S+=(\"adam\"|3|null|true|false); leave out one"):
        overlay_of(overrides)


@pytest.mark.parametrize(
    ("base", "over", "merged"),
    [
        # sections merge field by field
        ({"optim": {"lr": 1, "name": "sgd"}}, {"optim": {"lr": 2}}, {"optim": {"lr": 2, "name": "sgd"}}),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 3}}}, {"a": {"b": {"c": 3, "d": 2}}}),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        # all else is replaced
        ({"a": {"b": [1, 2]}}, {"a": {"b": [3]}}, {"a": {"b": [3]}}),
        ({"early_stop": {"patience": 2}}, {"early_stop": None}, {"early_stop": None}),
        ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        # a section by its name alone
        ({"model": "mlp"}, {"model": {"hidden": [4]}}, {"model": {"name": "mlp", "hidden": [4]}}),
        ({"model": {"name": "mlp", "hidden": [4]}}, {"model": "mlp"}, {"model": {"name": "mlp", "hidden": [4]}}),
        # another name makes another section, because its fields differ
        ({"model": {"name": "mlp", "hidden": [4]}}, {"model": "gpt"}, {"model": {"name": "gpt"}}),
        (
            {"data": {"name": "mnist", "dir": "x"}},
            {"data": {"name": "tokens", "context": 8}},
            {"data": {"name": "tokens", "context": 8}},
        ),
        # but not elsewhere: optim's fields are the same whatever its name
        ({"optim": {"name": "sgd", "lr": 1}}, {"optim": {"name": "adam"}}, {"optim": {"name": "adam", "lr": 1}}),
        # steps and epochs say the same thing, so one replaces the other
        ({"train": {"epochs": 3, "seed": 1}}, {"train": {"steps": 9}}, {"train": {"seed": 1, "steps": 9}}),
        ({"train": {"steps": 3, "epochs": None}}, {"train": {"epochs": 9}}, {"train": {"epochs": 9}}),
        ({"train": {"epochs": 3}}, {"train": {"epochs": 4, "steps": 9}}, {"train": {"epochs": 4, "steps": 9}}),
        ({"train": {"epochs": 3}}, {"train": {"steps": None}}, {"train": {"epochs": 3, "steps": None}}),
        # a tracker that is switched on keeps its fields, and one that is switched off does not
        ({"track": {"otlp": {"endpoint": "x"}}}, {"track": {"otlp": True}}, {"track": {"otlp": {"endpoint": "x"}}}),
        ({"track": {"otlp": {"endpoint": "x"}}}, {"track": {"otlp": False}}, {"track": {"otlp": False}}),
        ({"track": {"otlp": True}}, {"track": {"otlp": {"endpoint": "x"}}}, {"track": {"otlp": {"endpoint": "x"}}}),
    ],
)
def test_one_recipe_is_laid_over_another(base: dict[str, Any], over: dict[str, Any], merged: dict[str, Any]) -> None:
    before = repr((base, over))
    assert merge(base, over) == merged
    assert repr((base, over)) == before, "neither of the two is changed"
