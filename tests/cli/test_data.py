"""`shoal data`: what it prints, and how it ends."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shoal.cli.main import run

if TYPE_CHECKING:
    from tests.store import Proxy

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def stories(here: Path) -> Path:
    path = here / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": f"Story {n} of the sea. " * 5}) + "\n" for n in range(300)))
    return path


def in_json(capfd: Capture) -> dict[str, Any]:
    """The last line on stdout, which must be the only one."""
    (line,) = capfd.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


def error(capfd: Capture) -> str:
    """The only line, on stderr."""
    out, err = capfd.readouterr()
    assert out == "" and len(err.splitlines()) == 1, err
    return err


def test_from_rows_to_shards_and_back_to_their_bytes(stories: Path, capfd: Capture) -> None:
    assert run(["data", "shard", "stories.jsonl", "out", "--shard-size", "10kB", "--json"]) == 0
    made = in_json(capfd)
    assert made["rows"] == 300 and made["shards"] > 2 and made["format"] == "jsonl" and made["seconds"] > 0
    assert made["bytes"] == sum(path.stat().st_size for path in Path("out").glob("shard-*"))
    assert run(["data", "verify", "out"]) == 0
    assert capfd.readouterr().out == f"out: {made['shards']} shards, 300 rows, {made['bytes'] / 1000:.1f} kB: whole\n"
    Path("out/index.json").unlink()
    assert run(["data", "index", "out", "--json"]) == 0
    assert in_json(capfd)["rows"] == 300


def test_damage_is_told_by_file_and_is_status_1(stories: Path, capfd: Capture) -> None:
    assert run(["data", "shard", "stories.jsonl", "out", "--shard-size", "10kB"]) == 0
    capfd.readouterr()
    Path("out/shard-00001.jsonl").write_bytes(b"x" * Path("out/shard-00001.jsonl").stat().st_size)
    assert run(["data", "verify", "out"]) == 1
    assert "shard-00001.jsonl: its bytes are not those that were written" in capfd.readouterr().out
    assert run(["data", "verify", "out", "--json"]) == 1
    found = in_json(capfd)
    assert found["whole"] is False and found["rows"] == 300
    assert [problem["file"] for problem in found["parts"][0]["problems"]] == ["shard-00001.jsonl"]


def test_a_tokenizer_is_trained_and_used(stories: Path, capfd: Capture) -> None:
    assert run(["data", "tokenizer", "stories.jsonl", "-o", "tok.json", "--vocab-size", "300", "--json"]) == 0
    assert in_json(capfd)["vocab_size"] == 300
    assert run("data shard stories.jsonl out --tokenizer tok.json --val-fraction 0.1 --json".split()) == 0
    made = in_json(capfd)
    assert made["format"] == "tokens" and set(made["parts"]) == {"train", "val"}
    assert sum(part["rows"] for part in made["parts"].values()) == made["rows"] == made["bytes"] / 2
    assert run(["data", "verify", "out"]) == 0
    assert len(capfd.readouterr().out.splitlines()) == 2


def test_shards_go_to_a_store(stories: Path, s3: "Proxy", capfd: Capture) -> None:
    assert run(["data", "shard", "stories.jsonl", "s3://bucket/stories", "--json"]) == 0
    assert in_json(capfd)["rows"] == 300
    assert run(["data", "verify", "s3://bucket/stories"]) == 0
    assert run(["data", "shard", "stories.jsonl", "s3://bucket/stories"]) == 2
    assert "s3://bucket/stories already has an index.json" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("shard nothing out", "SRC: nothing is not there"),
        ("shard stories.jsonl out --shard-size 64furlongs", "--shard-size: '64furlongs' is not a size; give one such"),
        ("shard stories.jsonl out --shard-size 0", "--shard-size: '0' is not a size"),
        ("shard stories.jsonl out --val-fraction 1.5", "--val-fraction: 1.5 is not between 0 and 1"),
        ("shard stories.jsonl out --columns a,,b", "--columns: 'a,,b' should be names with commas"),
        ("shard stories.jsonl out --tokenizer chars --end-of-text X", "--end-of-text: is for a tokenizer from a file"),
        ("shard stories.jsonl stories.jsonl/out", "DST: stories.jsonl/out is in stories.jsonl"),
        ("shard stories.jsonl /proc/out", "DST: /proc/out: No such file or directory; give a folder that can be"),
        ("shard stories.jsonl ftp://host/out", "DST: ftp:// is not a kind of storage"),
        ("verify nothing", "DIR: nothing is not there, or nothing is in it"),
        ("index nothing", "DIR: nothing is not there, or nothing is in it"),
        ("tokenizer stories.jsonl -o no/tok.json", "-o: there is no folder no; make it first"),
        ("tokenizer stories.jsonl -o stories.jsonl", "-o: stories.jsonl is already there; --overwrite replaces it"),
        ("tokenizer stories.jsonl -o t.json --vocab-size 9", "--vocab-size: 9 is too few"),
        ("tokenizer stories.jsonl -o t.json --column body", "--column: stories.jsonl: line 1: has no column 'body'"),
        (
            "shard stories.jsonl out --tokenizer bytes --column txt",
            "--column: stories.jsonl: line 1: has no column 'txt'",
        ),
        (
            "shard stories.jsonl out --label tect",
            "--label: stories.jsonl: line 1: has no column 'tect'; it has: text; did",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(arguments: str, says: str, stories: Path, capfd: Capture) -> None:
    assert run(["data", *arguments.split()]) == 2
    assert f"error: {says}" in error(capfd)
    assert [path.name for path in Path().iterdir()] == ["stories.jsonl"]


def test_a_folder_in_a_file_is_refused(stories: Path, capfd: Capture) -> None:
    Path("book.txt").write_text("a book")
    assert run("data shard stories.jsonl book.txt/out/more".split()) == 2
    assert f"error: DST: {Path('book.txt').absolute()} is a file; give a folder" in error(capfd)


def test_an_end_that_the_tokenizer_does_not_know_is_refused_also_where_none_is_needed(
    here: Path, capfd: Capture
) -> None:
    Path("book.txt").write_text("One text, by itself.\n" * 50)
    assert run("data tokenizer book.txt -o tok.json --vocab-size 300".split()) == 0
    capfd.readouterr()
    assert run("data shard book.txt out --tokenizer tok.json --end-of-text <eos>".split()) == 2
    assert "error: --end-of-text: tok.json has no token '<eos>'; its special tokens: <|endoftext|>" in error(capfd)
    assert not Path("out").exists()


@pytest.mark.parametrize("arguments", ["photos", "book.txt --column text"])
def test_training_a_tokenizer_speaks_of_options_that_it_has(arguments: str, here: Path, capfd: Capture) -> None:
    Path("photos/cat").mkdir(parents=True)
    Path("photos/cat/1.jpg").write_bytes(b"x")
    Path("book.txt").write_text("text")
    assert run(["data", "tokenizer", *arguments.split(), "-o", "tok.json"]) == 2
    assert "--tokenizer" not in error(capfd)


def test_columns_and_classes_are_printed(here: Path, capfd: Capture) -> None:
    Path("news.csv").write_text("World,war\nSports,a game\n")  # no header, and nothing in it that tells
    assert run("data shard news.csv out".split()) == 0
    assert capfd.readouterr().out.endswith("; columns: World, war\n")
    assert run("data shard news.csv out --columns label,text --overwrite".split()) == 0
    assert capfd.readouterr().out.endswith("; columns: label, text; 2 classes\n")
    Path("news.csv").write_text("World,war\n,a game\n")
    assert run("data shard news.csv out --columns label,text --overwrite".split()) == 0
    assert (
        capfd.readouterr().err == "the index lists no classes: news.csv: line 2: 'label' is \"\", which is no class\n"
    )
