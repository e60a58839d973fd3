"""Every command of docs/shards.md, as it stands there, one after the other."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shoal.cli.main import run
from tests.data.shards.making import picture, write_tar

if TYPE_CHECKING:
    from tests.store import Proxy

PAGE = (Path(__file__).parents[2] / "docs" / "shards.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ {4}(?:\$ )?shoal (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
SMALL = {
    "imagenet": "model.name=resnet18 data.size=16 train.epochs=null train.steps=1 train.global_batch=2 "
    "train.precision=fp32",
    "gpt2": "data.context=4 model.layers=1 model.heads=1 model.dim=8 train.steps=1 train.global_batch=2 "
    "train.micro_batch=null train.precision=fp32 train.compile=false",
    "agnews": "model.embed=4 model.hidden=4 train.epochs=1 train.global_batch=2",
}
"""What makes a recipe that ships so small that it trains here."""


def make_photos() -> None:
    for part, number in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            folder = Path("photos", part, name)
            folder.mkdir(parents=True)
            for image in range(number):
                (folder / f"{image}.jpg").write_bytes(picture(image, (300, 280)))


def make_rows() -> None:
    rows = [("good" if n % 2 else "bad", f"Story {n} of the sea.") for n in range(100)]
    lines = [f"{label},{text}\n" for label, text in rows]
    Path("reviews.csv").write_text("".join(["label,text\n", *lines]))
    Path("bare.csv").write_text("".join(lines))
    stories = "".join(json.dumps({"text": text}) + "\n" for _, text in rows)
    Path("stories.jsonl").write_text(stories)
    Path("stories").mkdir()
    Path("stories/1.jsonl").write_text(stories)
    Path("book.txt").write_text("".join(f"{text}\n" for _, text in rows))


def make_shards_of_others() -> None:
    Path("imagenet-wds").mkdir()
    write_tar(Path("imagenet-wds/0.tar"), [{"jpg": picture(n), "cls": b"%d" % n} for n in range(3)])
    Path("openwebtext").mkdir()
    np.arange(1000, dtype="<u2").tofile("openwebtext/train.bin")


INPUTS: tuple[Callable[[], None], ...] = (make_photos, make_rows, make_shards_of_others)


def test_the_page_can_be_typed(here: Path, s3: "Proxy", capfd: pytest.CaptureFixture[str]) -> None:
    for make in INPUTS:
        make()
    commands = [shlex.split(command) for command in COMMANDS]
    in_general = [words for words in commands if any(re.fullmatch("SRC|DIR", word) for word in words)]
    assert {words[1] for words in in_general} == {"shard", "index", "verify", "tokenizer"}
    for words in in_general:
        assert run([*words[:2], "--help"]) == 0
    to_type = [words for words in commands if words not in in_general]
    assert len(to_type) > 10
    for words in to_type:
        if words[0] == "train":
            words += [*SMALL[words[1]].split(), "cluster.threads_per_worker=1", "--launcher", "local"]
        status = run(words)
        printed = capfd.readouterr()
        assert status == 0, (words, printed.err)
        assert "no classes" not in printed.err, words
