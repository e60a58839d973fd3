"""What the documents tell people to type is taken by the command line."""

import re
import shlex
from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.recipe.load import shipped_recipes

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^ {4}shoal ((?:train|plan) (?:[a-z0-9_]+) .*[^\\,\n])$", re.MULTILINE)
ONLY_OF_PLAN = re.compile(r" --(gpu-memory \S+|check|json)")


def told() -> list[str]:
    """Commands with a recipe that ships and nothing that a reader has to fill in, without remarks."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [line for file in files for line in COMMAND.findall(file.read_text(encoding="utf-8"))]
    commands = [re.sub(r" +#.*", "", line) for line in found]
    return [command for command in dict.fromkeys(commands) if command.split()[1] in shipped_recipes()]


def test_there_are_some() -> None:
    assert {"plan gpt2 --workers 8 --gpu-memory 80GiB", "train gpt2 parallel.strategy=fsdp --workers 8"} <= set(told())


@pytest.mark.parametrize("command", told())
def test_a_command_of_the_documents_is_taken(command: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if "my_model:" in command:
        pytest.skip("it names a file that the reader writes")
    words = shlex.split(ONLY_OF_PLAN.sub("", command.replace("plan ", "train ", 1)))
    assert run([*words, "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", shipped_recipes())
def test_a_recipe_that_ships_goes_with_so_many_workers(name: str, workers: int, here: Path) -> None:
    assert run(["train", name, f"cluster.workers={workers}", "--dry-run"]) == 0
