import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.recipe.references import environment, hide_values, resolve_references, restore_references

VALUES = {
    "NUMBER": "3",
    "FLOAT": "3e-4",
    "FLAG": "true",
    "WORD": "horse",
    "LIST": "[1, two]",
    "EMPTY": "",
    "AT": "@x: y: [",
    "TRICKY": "${env:WORD}",
    "DOLLAR": "pa$$word",
}


@pytest.mark.parametrize(
    ("given_", "value"),
    [
        ("${env:NUMBER}", 3),
        ("${env:FLOAT}", 3e-4),
        ("${env:FLAG}", True),
        ("${env:WORD}", "horse"),
        ("${env:LIST}", [1, "two"]),
        ("${env:EMPTY}", None),
        ("a ${env:WORD} of ${env:NUMBER}", "a horse of 3"),
        ("${env:NUMBER}${env:NUMBER}", "33"),
        # what YAML cannot read is a text: a password may hold anything
        ("${env:AT}", "@x: y: ["),
        ("${env:DOLLAR}", "pa$$word"),
        # what comes out of the environment is not looked into again
        ("${env:TRICKY}", "${env:WORD}"),
        ("x ${env:TRICKY}", "x ${env:WORD}"),
        ("plain", "plain"),
        ("$HOME and $", "$HOME and $"),
        (5, 5),
        (None, None),
    ],
)
def test_a_reference_becomes_the_value_it_names(given_: Any, value: Any) -> None:
    resolved, references = resolve_references({"a": {"b": given_}}, VALUES)
    assert resolved == {"a": {"b": value}}
    assert references == ({("a", "b"): given_} if isinstance(given_, str) and "${" in given_ else {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("${env:GONE}", "environment variable GONE is not set; export it or put GONE=... in .env"),
        ("${env:}", "does not name an environment variable"),
        ("${env:2X}", "does not name an environment variable"),
        ("${env:A B}", "does not name an environment variable"),
        ("${HOME}", "'${HOME}' is not a reference; write ${env:NAME}"),
        ("${env:WORD", "'${env:WORD' is not a reference"),
        ("x ${oc.env:WORD}", "is not a reference"),
        ("${}", "is not a reference"),
    ],
)
def test_what_is_no_reference_is_told_with_its_field(text: str, says: str) -> None:
    for tree, field in (({"a": {"b": text}}, "a.b: "), ({"a": ["x", text]}, "a.1: ")):
        with pytest.raises(UserError) as caught:
            resolve_references(tree, VALUES)
        assert str(caught.value).startswith(field) and says in str(caught.value)


keys = st.text("abc", min_size=1, max_size=2)
leaves = st.sampled_from(["${env:WORD}", "x-${env:NUMBER}", "${env:LIST}", "plain", 3, None])
trees = st.dictionaries(
    keys,
    st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)),
    max_size=3,
)


@given(trees)
def test_references_are_put_back_where_they_stood(tree: dict[str, Any]) -> None:
    resolved, references = resolve_references(tree, VALUES)
    assert "${" not in repr(resolved)
    assert restore_references(resolved, references) == tree


def test_quoted_texts_in_a_message_give_way_to_their_references() -> None:
    tree: dict[str, Any] = {"a": {1: "${env:WORD}"}, "b": ["${env:NUMBER}", "my ${env:WORD}"]}
    resolved, references = resolve_references(tree, VALUES)
    message = "a.1: 'horse' is wrong and so is 'my horse', but 3 horses are not"
    expected = "a.1: ${env:WORD} is wrong and so is my ${env:WORD}, but 3 horses are not"
    assert hide_values(message, resolved, references) == expected


def test_the_process_environment_goes_before_the_env_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / ".env").write_text(
        "# a comment\nSHOAL_A=from file\nSHOAL_B='quoted $HOME ${SHOAL_A}'\n"
        "export SHOAL_C=3\nSHOAL_D\n\nSHOAL_E=a=b # c\n"
    )
    monkeypatch.setenv("SHOAL_A", "from process")
    found = environment()
    assert found["SHOAL_A"] == "from process"
    assert found["SHOAL_B"] == "quoted $HOME ${SHOAL_A}", "values are taken as they stand"
    assert found["SHOAL_C"] == "3" and found["SHOAL_E"] == "a=b"
    assert "SHOAL_D" not in found


def test_without_an_env_file_the_process_environment_is_all(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_A", "x")
    assert environment()["SHOAL_A"] == "x"
    (here / "below").mkdir()
    (here / ".env").write_text("SHOAL_ABOVE=1\n")
    assert "SHOAL_ABOVE" not in environment(here / "below"), "only the folder itself is looked into"
    (here / "below" / ".env").mkdir()
    assert environment(here / "below")["SHOAL_A"] == "x"


def test_an_env_file_that_is_no_text_is_told(here: Path) -> None:
    (here / ".env").write_bytes(b"SHOAL_A=\xff\xfe secret\n")
    with pytest.raises(UserError, match=r"\.env: cannot be read: UnicodeDecodeError; write NAME=value lines") as caught:
        environment()
    assert "secret" not in str(caught.value)


def test_a_line_of_an_env_file_that_cannot_be_read_is_not_shown(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here / ".env").write_text("SHOAL_A=1\n= secret ' line\nSHOAL_B=2\n")
    with caplog.at_level(logging.DEBUG):
        found = environment()
    assert found["SHOAL_A"] == "1" and found["SHOAL_B"] == "2"
    assert "secret" not in caplog.text
