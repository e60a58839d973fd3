"""What the documents tell people to type is taken by the command line, and what they quote is what the code says."""

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.parallel.deepspeed_config import Decided, build_config
from shoal.parallel.section import DeepSpeedSection, OptimSection
from shoal.parallel.tensor_plan import WORDS
from shoal.recipe.load import shipped_recipes

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"^ {4}shoal ((?:train|plan) (?:[a-z0-9_]+) .*[^\\,\n])$", re.MULTILINE)
STRATEGIES = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
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


def test_links_inside_the_documents_lead_somewhere() -> None:
    files = {file.name: file.read_text(encoding="utf-8") for file in (ROOT / "docs").glob("*.md")}
    headings = {name: re.findall(r"^#+ (.*)$", text, re.MULTILINE) for name, text in files.items()}
    for name, text in files.items():
        for page, anchor in re.findall(r"\]\(([\w-]+\.md)?#([\w-]+)\)", text):
            there = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings[page or name]}
            assert anchor in there, f"{name}: {page}#{anchor}"


def fenced(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def counting(here: Path) -> Iterator[None]:
    """The files of the example that every strategy can divide, as a reader copies them."""
    after = STRATEGIES.split("## A model of your own, for all of them")[1]
    (here / "counting.py").write_text(fenced(after, "python")[0])
    (here / "counting.yaml").write_text(fenced(after, "yaml")[0])
    sys.modules.pop("counting", None)
    yield
    sys.modules.pop("counting", None)  # others have modules of that name


def counting_loss(command: str, capsys: pytest.CaptureFixture[str]) -> float:
    """What a command of the example comes to in two epochs."""
    short = ["train.epochs=2", "cluster.threads_per_worker=1", "cluster.gpus_per_worker=0", "--launcher", "local"]
    status = run([*shlex.split(command), *short, "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    loss: float = json.loads(printed.out.splitlines()[-1])["metrics"]["val_loss"]
    return loss


@pytest.mark.parametrize(
    "strategy", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "pipeline")), "tensor"]
)
def test_the_model_for_all_strategies_is_trained_alike(
    strategy: str, counting: None, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, *others = re.findall(r"^ {4}shoal (train counting\.yaml.*)$", STRATEGIES, re.MULTILINE)
    (command,) = [other for other in others if f"parallel.strategy={strategy} --workers 2" in other]
    assert alone == "train counting.yaml"
    first = counting_loss(f"{alone} --run-dir alone", capsys)
    assert counting_loss(f"{command} --run-dir many", capsys) == pytest.approx(first, rel=1e-4)
    assert first < 2.4


def test_every_word_of_a_tensor_plan_is_told() -> None:
    for word, meaning in WORDS.items():
        assert f"| `{word}` | {meaning} |" in STRATEGIES


def test_the_ds_config_is_taken(here: Path) -> None:
    (example,) = fenced(STRATEGIES, "json")
    (here / "ds_config.json").write_text(example)
    section = DeepSpeedSection(stage=3, config="ds_config.json")
    config = build_config(Decided(section, OptimSection(), "bf16", 1.0, 64, 4, 4, 1_000_000, 1000))
    assert config["zero_optimization"]["overlap_comm"] is True


def texts_of_the_code() -> Iterator[str]:
    """Every text in the code, with `...` for what is put into it."""
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
            elif isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)


def test_messages_are_quoted_as_they_are() -> None:
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8").split("\n## Strategies\n")[1]
    quoted = re.findall(r"\*\*`(.*?)`\*\*", page)
    assert len(quoted) == page.count("**`") > 30, "a quotation goes over the end of a line"
    texts = list(texts_of_the_code())
    for message in quoted:
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))))
        assert any(pattern.search(text) for text in texts), message
