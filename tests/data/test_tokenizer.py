"""Tokenizers: characters, bytes and BPE; what comes back is what went in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.data.section import CharText
from shoal.data.text import load_text
from shoal.data.tokenizer import (
    END_OF_TEXT,
    Bpe,
    Bytes,
    Characters,
    encode_characters,
    find_characters,
    load_tokenizer,
    make_tokenizer,
    train_bpe,
)

TEXTS = [f"The {animal} swims in shoal number {n}, ünïcode 🐟.\n" for n in range(50) for animal in ("cod", "eel")]


@pytest.fixture(scope="module")
def bpe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    path.write_text(train_bpe(iter(TEXTS), 300), encoding="utf-8")
    return path


@given(st.lists(st.text(), min_size=1))
@settings(max_examples=25)  # each makes tables of all of Unicode
def test_characters_come_back(texts: list[str]) -> None:
    tokenizer = Characters(find_characters(texts), separated=True)
    assert list(tokenizer.vocabulary) == sorted(set("".join(texts)))
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert "".join(tokenizer.vocabulary[i] for i in ids) == text
        assert tokenizer.end_of_text not in ids
    assert tokenizer.end_of_text == tokenizer.vocab_size - 1


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_bytes_come_back(texts: list[str]) -> None:
    for text, ids in zip(texts, Bytes().encode(texts), strict=True):
        assert bytes(ids).decode() == text


def test_a_text_whose_characters_are_all_known_has_the_ids_it_always_had() -> None:
    vocabulary, ids = encode_characters("hello\nwörld")
    assert vocabulary == "\ndehlorwö"
    assert ids.dtype == np.uint8 and ids.tolist() == [3, 2, 4, 4, 5, 0, 7, 8, 6, 4, 1]
    assert encode_characters("".join(map(chr, range(257))))[1].dtype == np.int32


def test_bytes_have_one_more_id_where_documents_are_separated() -> None:
    assert (Bytes().vocab_size, Bytes().end_of_text) == (256, None)
    assert (Bytes(separated=True).vocab_size, Bytes(separated=True).end_of_text) == (257, 256)


def test_bpe_gives_every_text_back_also_what_it_never_saw(bpe_file: Path) -> None:
    tokenizer = load_tokenizer(bpe_file)
    assert isinstance(tokenizer, Bpe)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (300, 0)
    texts = [*TEXTS, "", "  \n\t ", "汉字 and ÿ\x00", f"spelled {END_OF_TEXT} in full"]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert tokenizer.decode(ids.tolist()) == text
        assert 0 not in ids  # what is in a text is text
        assert all(ids < tokenizer.vocab_size)
    assert len(tokenizer.encode([TEXTS[0]])[0]) < len(TEXTS[0]) / 2


def test_training_again_gives_the_same_file(bpe_file: Path) -> None:
    code = (
        "import json, sys; from shoal.data.tokenizer import train_bpe\n"
        "sys.stdout.buffer.write(train_bpe(iter(json.load(sys.stdin)), 300).encode())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    texts = json.dumps(TEXTS).encode()
    again = subprocess.run([sys.executable, "-c", code], input=texts, capture_output=True, check=True, env=environment)
    assert again.stdout == bpe_file.read_bytes()


def test_files_say_to_cut_and_fill_up_texts_and_are_not_listened_to(bpe_file: Path, tmp_path: Path) -> None:
    tree = json.loads(bpe_file.read_text(encoding="utf-8"))
    tree["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    path = tmp_path / "cutting.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    assert len(load_tokenizer(path).encode([TEXTS[0]])[0]) == len(load_tokenizer(bpe_file).encode([TEXTS[0]])[0]) > 2


@pytest.mark.parametrize("tokenizer", [Characters("\nab"), Characters("ab", separated=True), Bytes(separated=True)])
def test_what_is_written_is_read(tokenizer: Characters | Bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.to_json(), encoding="utf-8")
    assert load_tokenizer(path) == tokenizer


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a tokenizer that the tokenizers library reads"),
        ('{"shoal": "chars", "vocabulary": "ba"}', "not characters in order"),
        (None, "No such file or directory; give chars, bytes or the JSON file"),
    ],
)
def test_what_is_no_tokenizer_is_told(content: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=says) as caught:
        make_tokenizer(str(path), [], separated=False)
    assert str(caught.value).startswith(f"--tokenizer: {path}: ")


def test_what_cannot_be_encoded_is_told(bpe_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'c' is none of its 2 characters"):
        Characters("ab").encode(["abc"])
    for separated in (False, True):
        with pytest.raises(
            UserError, match=r"--end-of-text: .* has no token '<eos>'; its special tokens: <\|endoftext"
        ):
            make_tokenizer(str(bpe_file), [], separated=separated, end_of_text="<eos>")
    other = tmp_path / "other.json"
    other.write_text(bpe_file.read_text(encoding="utf-8").replace(END_OF_TEXT, "<eos>"), encoding="utf-8")
    with pytest.raises(UserError, match=r"has no <\|endoftext\|> to end documents with; .* it has: --end-of-text"):
        make_tokenizer(str(other), [], separated=True)
    assert make_tokenizer(str(other), [], separated=True, end_of_text="<eos>").end_of_text == 0
    with pytest.raises(UserError, match="--vocab-size: 256 is too few"):
        train_bpe(iter(TEXTS), 256)
    path = tmp_path / "one.json"
    path.write_text(Characters("ab").to_json(), encoding="utf-8")
    with pytest.raises(UserError, match="take chars"):
        make_tokenizer(str(path), [], separated=True)
    with pytest.raises(UserError, match=r"--end-of-text: .* is of chars, which has no such token; leave it out"):
        make_tokenizer(str(path), [], separated=False, end_of_text="<eos>")


def test_a_recipe_can_name_a_tokenizer(bpe_file: Path, tmp_path: Path) -> None:
    text = "".join(TEXTS)
    (tmp_path / "input.txt").write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer.json").write_bytes(bpe_file.read_bytes())

    def load(tokenizer: str) -> tuple[int, list[int]]:
        data = load_text(CharText(name="text", dir=str(tmp_path), context=16, stride=1, tokenizer=tokenizer))
        inputs = data.train.batch(np.arange(0, len(data.train), 16), 0)[0]
        return data.spec.vocab_size or 0, inputs.flatten().tolist()

    for name, expected in (("chars", encode_characters(text)[1]), ("bytes", np.frombuffer(text.encode(), np.uint8))):
        size, ids = load(name)
        assert size == (len(set(text)) if name == "chars" else 256) and ids == expected[: len(ids)].tolist()
    size, ids = load("tokenizer.json")
    assert size == 300 and text.startswith(Bpe(bpe_file.read_text(encoding="utf-8"), "").decode(ids))
    with pytest.raises(UserError, match=r"data.tokenizer: other.json not found in .*Put it in"):
        load("other.json")
