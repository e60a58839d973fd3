from typing import Annotated, Any, Literal

import pytest
from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError

from shoal.core.section import CUSTOM, Section, name_tag, nearest, one_of


class Example(Section):
    size: Annotated[int, Field(gt=0)] = 4
    """How large."""
    share: float = 0.5
    flag: bool = False
    word: str | None = None


@pytest.mark.parametrize(
    "values",
    [
        {"sise": 4},
        {"size": "4"},
        {"size": 4.0},
        {"size": True},
        {"size": 0},
        {"share": "0.5"},
        {"share": float("nan")},
        {"share": float("inf")},
        {"flag": 1},
        {"flag": "true"},
        {"word": 3},
    ],
    ids=str,
)
def test_what_is_not_exactly_right_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Example.model_validate(values)


def test_a_whole_number_will_do_where_a_number_is_asked_for() -> None:
    assert Example.model_validate({"share": 1}).share == 1.0


def test_values_do_not_change_after_loading() -> None:
    section = Example()
    with pytest.raises(ValidationError):
        section.size = 5  # type: ignore[misc]
    assert section.size == 4


def test_a_default_that_the_field_itself_would_refuse_is_refused() -> None:
    class Wrong(Section):
        size: Annotated[int, Field(gt=0)] = 0

    with pytest.raises(ValidationError):
        Wrong()


def test_the_words_under_a_field_describe_it_in_the_schema() -> None:
    assert Example.model_json_schema()["properties"]["size"]["description"] == "How large."


@pytest.mark.parametrize(
    ("value", "tag"),
    [
        ({"name": "gpt"}, "gpt"),
        ({"name": "my.module:build"}, CUSTOM),
        ({"name": 3}, None),
        ({}, None),
        (None, None),
        ("gpt", None),
    ],
)
def test_a_section_is_told_apart_by_its_name(value: Any, tag: str | None) -> None:
    assert name_tag(value) == tag


def test_a_section_that_is_already_loaded_is_told_apart_too() -> None:
    class Built(Section):
        name: Literal["built"]

    class Own(Section):
        name: str

    union = Annotated[Annotated[Built, Tag("built")] | Annotated[Own, Tag(CUSTOM)], Discriminator(name_tag)]
    adapter: TypeAdapter[Any] = TypeAdapter(union)
    assert adapter.validate_python(Built(name="built")) == Built(name="built")
    assert adapter.validate_python({"name": "a:b"}) == Own(name="a:b")


@pytest.mark.parametrize(
    ("name", "guess"), [("resnet19", "resnet18"), ("adm", "adam"), ("zzz", None), ("", None), ("adam", "adam")]
)
def test_the_nearest_name_is_guessed_only_if_one_is_close(name: str, guess: str | None) -> None:
    assert nearest(name, ["adam", "sgd", "resnet18", "gpt"]) == guess


def test_a_message_lists_what_is_allowed_in_order_and_then_guesses() -> None:
    assert one_of("sdg", {"sgd", "adam"}) == "allowed: adam, sgd; did you mean sgd?"
    assert one_of("lion", {"sgd", "adam"}) == "allowed: adam, sgd"
