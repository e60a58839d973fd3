"""The page on searches says what the code does."""

import re
from pathlib import Path

import yaml

from shoal.tune.domains import KINDS
from shoal.tune.field_table import with_table
from shoal.tune.section import SCHEDULERS, SEARCHES, TuneSection
from shoal.tune.setup import set_up

PAGE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text(encoding="utf-8")


def test_the_table_in_the_docs_is_that_of_the_code() -> None:
    assert with_table(PAGE) == PAGE, "run make schema"
    for name in TuneSection.model_fields:
        assert f"\n| `{name}` |" in PAGE


def test_everything_that_can_be_chosen_is_told() -> None:
    for name in (*SCHEDULERS, *SEARCHES):
        assert f"\n| `{name}` |" in PAGE
    for example in KINDS.values():
        assert f"`{example}`" in PAGE


def test_every_space_of_the_page_is_one() -> None:
    spaces = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(spaces) == 3
    for text in spaces:
        set_up(["digits"], [], yaml.load(text, Loader=yaml.BaseLoader) if "first" not in text else _read(text), {})


def _read(text: str) -> dict[str, object]:
    return {key: value for key, value in yaml.safe_load(text).items() if key != "first"}
