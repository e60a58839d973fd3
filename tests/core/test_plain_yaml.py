"""YAML for people, which every reader of YAML takes for the same."""

import pytest
import yaml

from shoal.core.plain_yaml import dump


@pytest.mark.parametrize("text", ["1e5", "1e6", "+1e3", ".5", "0o17", "1.", "12", "true", "null", "~", "1:30", "0x1f"])
def test_a_text_that_some_readers_take_for_a_number_is_quoted(text: str) -> None:
    assert dump({"tag": text}) in (f"tag: '{text}'\n", f'tag: "{text}"\n')


@pytest.mark.parametrize("text", ["v1.2.3", "1e5x", "fs-0e1", "16Gi", "500m", "a b"])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert dump({"tag": text}) == f"tag: {text}\n"


def test_what_is_read_is_what_was_written() -> None:
    value = {"a": ["1e5", 1e5, "x\ny\n", None, {"b": ""}], "c": {}}
    assert yaml.safe_load(dump(value)) == value
