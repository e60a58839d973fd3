"""The settings of a search in docs/tuning.md. `python -m shoal.tune.field_table FILE` writes them there."""

import sys
from pathlib import Path

from shoal.recipe.field_tables import field_table
from shoal.tune.section import TuneSection

_BEGIN, _END = "<!-- begin settings -->\n", "<!-- end settings -->"


def with_table(page: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return before + _BEGIN + field_table(TuneSection.model_json_schema()["properties"], [], "tune") + _END + after


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(with_table(file.read_text(encoding="utf-8")), encoding="utf-8")
