"""The page that lists every field says what the code does."""

import re
import subprocess
import sys
from pathlib import Path

from shoal.recipe.field_tables import to_text
from shoal.recipe.json_schema import recipe_json_schema

TEXT = to_text()
PAGE = Path(__file__).parents[2] / "docs" / "recipe-reference.md"


def row(heading: str, field: str) -> str:
    """The line of a field in the table below a heading."""
    below = TEXT.split(f"\n{heading}\n")[1].split("\n#")[0]
    return next(line for line in below.splitlines() if line.startswith(f"| `{field}` |"))


def test_the_page_in_the_docs_is_that_of_the_code() -> None:
    assert PAGE.read_text(encoding="utf-8") == TEXT, "run make schema"


def test_every_field_of_every_section_has_a_line() -> None:
    fields = {field for section in recipe_json_schema()["$defs"].values() for field in section["properties"]}
    listed = set(re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE))
    assert fields <= listed


def test_a_line_tells_default_and_what_is_allowed() -> None:
    assert row("## train", "seed").startswith(
        "| `seed` | `0` | whole number >= 0, < 4294967296 | Fixes initial weights"
    )
    assert row("## train", "micro_batch").startswith("| `micro_batch` | `null` | whole number > 0; `auto`; `null` |")
    assert row("## optim", "betas").startswith("| `betas` | `null` | list of 2: number >= 0, < 1; `null` |")
    assert row("## parallel.fsdp", "cpu_offload").startswith("| `cpu_offload` | `false` | `true`, `false` |")
    assert row("### model: `mlp`", "hidden").startswith("| `hidden` | `[512, 512]` | list: whole number > 0 |")
    assert row("## nccl", "environment").startswith("| `environment` | `{}` | mapping |")


def test_what_every_alternative_has_is_said_once() -> None:
    assert row("## data", "workers")
    assert TEXT.split("\n## data\n")[1].split("\n## ")[0].count("| `workers` |") == 1


def test_tables_are_whole_and_links_lead_somewhere() -> None:
    for line in TEXT.splitlines():
        if line.startswith("| `"):
            assert len(re.findall(r"(?<!\\)\|", line)) in (3, 5), line
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ")) for line in TEXT.splitlines() if line.startswith("#")}
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= headings


def test_the_module_writes_the_file(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "shoal.recipe.field_tables", tmp_path / "r.md"], check=True, timeout=60)
    assert (tmp_path / "r.md").read_text(encoding="utf-8") == TEXT
