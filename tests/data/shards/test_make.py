"""From files as people have them to shards: nothing is lost, nothing comes twice, and what is wrong is told first."""

import csv
import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.data.shards import texts
from shoal.data.shards.index import INDEX, ShardIndex, parse_index
from shoal.data.shards.make import Request, make_shards, train_tokenizer
from shoal.data.shards.parquet_rows import ParquetRows
from shoal.data.tokenizer import Bpe, Characters, load_tokenizer

ROWS = [{"id": n, "text": f'Line {n}, "quoted"\nand ünï', "score": n / 4 if n % 3 else None} for n in range(3000)]


def make(source: Path, target: Path, **changes: Any) -> dict[str, ShardIndex]:
    return make_shards(Request(source, str(target), changes.pop("shard_bytes", 20_000), **changes), lambda shard: None)


def index_of(folder: Path) -> ShardIndex:
    return parse_index((folder / INDEX).read_bytes(), str(folder))


def json_rows(folder: Path) -> list[dict[str, Any]]:
    files = [folder / shard.file for shard in index_of(folder).shards]
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def parquet_rows(folder: Path) -> list[dict[str, Any]]:
    return [row for shard in index_of(folder).shards for row in pq.read_table(folder / shard.file).to_pylist()]


def tokens(folder: Path) -> np.ndarray:
    index = index_of(folder)
    assert all(shard.bytes == shard.rows * np.dtype(index.about["dtype"]).itemsize for shard in index.shards)
    return np.concatenate([np.fromfile(folder / shard.file, index.about["dtype"]) for shard in index.shards])


def by_id(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: int(row["id"]))


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """A folder of two files, one below the other, with empty lines, a byte order mark, and no last line end."""
    folder = tmp_path / "json"
    (folder / "more").mkdir(parents=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines[:1000]).encode())
    (folder / "more" / "b.jsonl").write_bytes("\r\n".join(lines[1000:]).encode())
    (folder / ".hidden.jsonl").write_bytes(b"nothing")
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    draw = np.random.RandomState(0)
    for part, count in (("train", 12), ("val", 3)):
        for name in ("cat", "dog", "eel"):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = draw.randint(0, 255, (20 + 5 * number, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.v1.{'PNG' if number % 2 else 'jpg'}")
    (tmp_path / "photos" / "train" / "README.txt").write_text("photos")
    return tmp_path / "photos"


def samples(folder: Path) -> list[dict[str, bytes]]:
    found: dict[str, dict[str, bytes]] = {}
    for shard in index_of(folder).shards:
        with tarfile.open(folder / shard.file) as tar:
            before = len(found)
            for member in tar:
                key, _, name = member.name.partition(".")
                content = tar.extractfile(member)
                assert content is not None and name not in found.get(key, {})
                found.setdefault(key, {})[name] = content.read()
            assert len(found) - before == shard.rows
    assert list(found) == sorted(found)
    return list(found.values())


def test_images_keep_their_bytes_and_their_classes(photos: Path, tmp_path: Path) -> None:
    indexes = make(photos, tmp_path / "out", shard_bytes=50_000)
    assert {part: index.num_rows for part, index in indexes.items()} == {"train": 36, "val": 9}
    assert len(indexes["train"].shards) > 1
    for part, index in indexes.items():
        assert index.about == {"classes": ["cat", "dog", "eel"]}
        images = [path for path in (photos / part).rglob("*.*") if path.suffix in (".PNG", ".jpg")]
        wanted = {(path.read_bytes(), path.suffix[1:].lower(), path.parent.name) for path in images}
        found = [(name, sample) for sample in samples(tmp_path / "out" / part) for name in sample if name != "cls"]
        assert {(s[name], name, index.about["classes"][int(s["cls"])]) for name, s in found} == wanted
    labels = [sample["cls"] for sample in samples(tmp_path / "out" / "train")]
    assert labels != sorted(labels)
    make(photos, tmp_path / "sorted", seed=None)
    assert [s["cls"] for s in samples(tmp_path / "sorted" / "train")] == sorted(labels)


def test_the_same_seed_gives_the_same_bytes(photos: Path, tmp_path: Path) -> None:
    made = [make(photos, tmp_path / name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    assert made[0] == made[1] != made[2]


def test_images_are_scaled_down_and_never_up(photos: Path, tmp_path: Path) -> None:
    make(photos, tmp_path / "out", resize=30, seed=None)
    originals = sorted((photos / "train" / "cat").iterdir())
    for path, sample in zip(originals, samples(tmp_path / "out" / "train"), strict=False):
        (name,) = set(sample) - {"cls"}
        with Image.open(path) as before, Image.open(io.BytesIO(sample[name])) as after:
            if min(before.size) <= 30:
                assert sample[name] == path.read_bytes()
            else:
                assert min(after.size) == 30 and name == "jpg" and after.format == "JPEG"
                assert abs(after.size[0] / after.size[1] - before.size[0] / before.size[1]) < 0.05


def test_classes_that_cannot_be_learned_and_images_that_cannot_be_read_are_told(photos: Path, tmp_path: Path) -> None:
    (photos / "val" / "cat" / "bad.jpg").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"SRC: .*bad.jpg: is no image that Pillow knows; ") as caught:
        make(photos, tmp_path / "out", resize=10)
    assert "BytesIO" not in str(caught.value)
    whole = (photos / "val" / "cat" / "0.v1.jpg").read_bytes()
    (photos / "val" / "cat" / "bad.jpg").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"SRC: .*bad.jpg: cannot be decoded"):
        make(photos, tmp_path / "out", resize=10)
    (photos / "val" / "fox").mkdir()
    with pytest.raises(UserError, match="has classes that train has not: fox"):
        make(photos, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_json_lines_stay_as_they_are(jsonl: Path, tmp_path: Path) -> None:
    make(jsonl, tmp_path / "out")
    shuffled = json_rows(tmp_path / "out")
    assert by_id(shuffled) == ROWS and shuffled != ROWS
    # not only within a window: the first rows come from everywhere
    assert max(row["id"] for row in shuffled[:100]) > 2000 > 1000 > min(row["id"] for row in shuffled[:100])
    make(jsonl, tmp_path / "same", seed=None)
    assert json_rows(tmp_path / "same") == ROWS
    line = (tmp_path / "same" / "shard-00000.jsonl").read_bytes().splitlines()[1]
    assert line == json.dumps(ROWS[1], ensure_ascii=False).encode()


def test_a_share_of_the_rows_is_kept_for_validation(jsonl: Path, tmp_path: Path) -> None:
    make(jsonl, tmp_path / "out", val_fraction=0.1)
    train, val = json_rows(tmp_path / "out" / "train"), json_rows(tmp_path / "out" / "val")
    assert len(val) == 300 and by_id(train + val) == ROWS
    assert max(row["id"] for row in val) > 2500 and min(row["id"] for row in val) < 500
    make(jsonl, tmp_path / "tail", val_fraction=0.1, seed=None)
    assert json_rows(tmp_path / "tail" / "val") == ROWS[2700:]


def test_rows_go_from_format_to_format(jsonl: Path, tmp_path: Path) -> None:
    make(jsonl, tmp_path / "parquet", format="parquet")
    assert by_id(parquet_rows(tmp_path / "parquet")) == ROWS
    assert len(index_of(tmp_path / "parquet").shards) > 3
    make(tmp_path / "parquet", tmp_path / "again", seed=3)
    again = parquet_rows(tmp_path / "again")
    assert by_id(again) == ROWS and again != parquet_rows(tmp_path / "parquet")
    make(tmp_path / "parquet", tmp_path / "lines", format="jsonl")
    assert by_id(json_rows(tmp_path / "lines")) == ROWS


def test_parquet_keeps_types_and_is_shuffled_within_bounded_memory(tmp_path: Path) -> None:
    schema = pa.schema([("id", pa.int16()), ("image", pa.binary()), ("when", pa.timestamp("ms"))])
    rows = [{"id": n, "image": bytes([n % 256]) * 50, "when": None} for n in range(1000)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, row_group_size=50)
    make(path, tmp_path / "out")
    assert pq.read_schema(tmp_path / "out" / "shard-00000.parquet") == schema
    assert by_id(parquet_rows(tmp_path / "out")) == rows
    source = ParquetRows([path], None, None, window_bytes=3000)
    order = source.order(0)
    assert sorted(order.tolist()) == list(range(1000)) and order.tolist() != list(range(1000))
    read = [row["id"] for table in source.tables(order) for row in table.to_pylist()]
    assert read == order.tolist()
    with pytest.raises(UserError, match=r"a row cannot be JSON .*; take --format parquet"):
        make(path, tmp_path / "json", format="jsonl")


def test_csv_with_and_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["id", "text"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(ROWS[:200])
    rows = [{"id": str(row["id"]), "text": row["text"]} for row in ROWS[:200]]
    for format_, read in (("jsonl", json_rows), ("parquet", parquet_rows)):
        make(path, tmp_path / format_, format=format_)
        assert by_id(read(tmp_path / format_)) == rows
    (tmp_path / "bare.csv").write_text('3,"a, b"\n\n4,c\n')
    make(tmp_path / "bare.csv", tmp_path / "bare", columns=("label", "text"), seed=None)
    assert json_rows(tmp_path / "bare") == [{"label": "3", "text": "a, b"}, {"label": "4", "text": "c"}]


def test_documents_become_one_row_of_tokens(jsonl: Path, tmp_path: Path) -> None:
    train_tokenizer(jsonl, tmp_path / "bpe.json", 400, None, None)
    for name in ("chars", "bytes", str(tmp_path / "bpe.json")):
        out = tmp_path / f"out-{Path(name).stem}"
        make(jsonl, out, tokenizer=name, seed=None, shard_bytes=5000)
        index, ids = index_of(out), tokens(out)
        assert all(shard.rows == 2500 for shard in index.shards[:-1]) and len(index.shards) > 3
        assert ids.max() < index.about["vocab_size"] and index.about["dtype"] == "uint16"
        tokenizer = load_tokenizer(out / "tokenizer.json")
        assert tokenizer.vocab_size == index.about["vocab_size"] and tokenizer.name == index.about["tokenizer"]
        assert tokenizer.end_of_text == index.about["end_of_text"]
        documents = np.split(ids, np.flatnonzero(ids == index.about["end_of_text"]) + 1)
        assert len(documents) == len(ROWS) + 1 and len(documents[-1]) == 0
        expected = tokenizer.encode([str(row["text"]) for row in ROWS])
        for document, wanted in zip(documents[:-1], expected, strict=True):
            assert document[:-1].tolist() == wanted.tolist()
    assert Path(tmp_path / "bpe.json").read_bytes() == (tmp_path / "out-bpe" / "tokenizer.json").read_bytes()


def test_whole_documents_are_kept_for_validation(jsonl: Path, tmp_path: Path) -> None:
    make(jsonl, tmp_path / "out", tokenizer="chars", val_fraction=0.01)
    tokenizer = load_tokenizer(tmp_path / "out" / "val" / "tokenizer.json")
    assert isinstance(tokenizer, Characters)
    found = []
    for part, count in (("train", 2970), ("val", 30)):
        text = "".join((tokenizer.vocabulary + "\0")[i] for i in tokens(tmp_path / "out" / part))
        assert text.count("\0") == count
        found += text.split("\0")[:-1]
    assert sorted(found) == sorted(str(row["text"]) for row in ROWS)


def test_one_text_file_is_one_document_and_its_tail_is_validated_on(tmp_path: Path) -> None:
    text = "".join(f"Line {n} of ünïcode.\n" + "\n" * (n % 3) for n in range(2000))
    path = tmp_path / "input.txt"
    path.write_text(text, encoding="utf-8")
    make(path, tmp_path / "out", tokenizer="bytes", val_fraction=0.1)
    train, val = (bytes(tokens(tmp_path / "out" / part).astype(np.uint8)).decode() for part in ("train", "val"))
    assert train + val == text and train.endswith("\n") and 0.09 < len(val) / len(text) < 0.11
    about = index_of(tmp_path / "out" / "val").about
    assert about == {"dtype": "uint16", "vocab_size": 256, "tokenizer": "bytes", "end_of_text": None}
    path.write_text("ü" * 100, encoding="utf-8")
    make(path, tmp_path / "one-line", tokenizer="chars", val_fraction=0.115)
    assert len(tokens(tmp_path / "one-line" / "val")) in (11, 12)


def test_a_long_text_read_in_pieces_has_the_ids_of_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"Line {n} ends here. \n" + "\n  " * (n % 3) + "x\n" * (n % 2) for n in range(500)) + "é" * 900
    path = tmp_path / "input.txt"
    path.write_text(text, encoding="utf-8")
    train_tokenizer(path, tmp_path / "bpe.json", 300, None, None)
    bpe = load_tokenizer(tmp_path / "bpe.json")
    assert isinstance(bpe, Bpe)
    monkeypatch.setattr(texts, "PIECE_BYTES", 101)
    make(path, tmp_path / "out", tokenizer=str(tmp_path / "bpe.json"))
    ids = tokens(tmp_path / "out")
    assert bpe.decode(ids.tolist()) == text
    upto = len(bpe.encode([text[:-900]])[0])
    assert ids[: upto - 5].tolist() == bpe.encode([text])[0][: upto - 5].tolist()


def test_several_text_files_are_separate_documents(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(5):
        (tmp_path / "in" / f"{number}.txt").write_text(f"text {number}" if number else "")
    make(tmp_path / "in", tmp_path / "out", tokenizer="bytes", seed=None)
    parts = [bytes(part.astype(np.uint8)).decode() for part in np.split(tokens(tmp_path / "out"), range(7, 28, 7))]
    assert [part[:6] for part in parts] == ["text 1", "text 2", "text 3", "text 4"]
    assert index_of(tmp_path / "out").about["end_of_text"] == 256


def test_half_a_surrogate_pair_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\udc1f"}\n')
    make(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="bytes")
    assert bytes(tokens(tmp_path / "out")[:-1].astype(np.uint8)).decode() == "a\ufffdb 🐟"


def test_empty_csv_files_are_of_no_account(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, content in {"a.csv": "", "b.csv": "label,text\nx,hi\ny,ho\n", "c.csv": ""}.items():
        (tmp_path / "in" / name).write_text(content)
    made = make_shards(Request(tmp_path / "in", str(tmp_path / "out"), 1000), lambda shard: None)
    assert made[""].num_rows == 2 and made[""].about["classes"] == ["x", "y"]


def test_columns_that_utf8_cannot_spell_are_told_all_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jsonl").write_text(r'{"text": "a", "\ud800": 1}')
    assert run(["data", "shard", str(tmp_path / "a.jsonl"), str(tmp_path / "out")]) == 0
    assert r"columns: text, \ud800" in capfd.readouterr().out


def test_parquet_with_a_name_twice_is_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["label", "label"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="several columns of one name; rename them"):
        make_shards(Request(tmp_path / "a.parquet", str(tmp_path / "out"), 1000), lambda shard: None)


@pytest.mark.parametrize(
    ("name", "content", "changes", "says"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": \n', {}, "SRC: .*a.jsonl: line 2 is not JSON"),
        ("a.jsonl", '{"a": 1}\n[1]\n', {}, "line 2 is not a JSON object but a list"),
        ("a.jsonl", "\n\n", {}, "holds no rows"),
        ("a.jsonl", '{"a": 1}\n{"a": "x"}\n', {"format": "parquet"}, "--format: .* does not fit in a Parquet column"),
        ("a.jsonl", '{"a": "x"}\n', {"tokenizer": "chars"}, "--column: .*line 1: has no column 'text'; it has: a$"),
        ("a.jsonl", '{"txt": "x"}\n', {"tokenizer": "chars"}, "it has: txt; did you mean txt?"),
        ("a.jsonl", '{"labels": "x"}\n', {"label": "label"}, "--label: .*line 1: has no column 'label'.* mean labels?"),
        ("a.csv", "text,topic\na,b\n", {"label": "topics"}, "--label: .*has no column 'topics'.*did you mean topic?"),
        ("a.csv", "good,a fish\nbad,b\n", {"tokenizer": "chars"}, "--column: .*is a row and no header, give --columns"),
        ("a.csv", "good,a fish\nbad,b\n", {"label": "x"}, "--label: .*if its first line is a row .* give --columns"),
        ("a.csv", "3,a fish\n4,b\n", {}, "its first line holds 3, so it is a row and no header; .* --columns"),
        ("a.csv", ",a fish\n4,b\n", {}, "column 1 has no name in its first line; .* number,a fish; or, .* --columns"),
        ("a.csv", "a,b\n1,2\n", {"columns": ("a", "b")}, "--columns: .* is a,b, a header of the same names; leave"),
        ("a.csv", " A,B\n1,2\n", {"columns": ("a", "b")}, "--columns: .* a header of the same names; leave"),
        ("a.csv", ",a,b\n0,1,2\n", {"columns": ("n", "a", "b")}, "--columns: .* a header of the same names; leave"),
        ("a.csv", "1,2\n", {"columns": ("a",)}, "line 1 has 2 columns, not 1 .a.; correct it, or --columns"),
        ("a.jsonl", '{"text": "a"}\n', {"tokenizer": "chars", "label": "a"}, "--label: .*, without --tokenizer"),
        ("a.jsonl", '{"text": 3}\n', {"tokenizer": "chars"}, "--column: .*'text' is 3, not text"),
        ("a.jsonl", '{"text": "a"}\n', {"tokenizer": "gpt2"}, "--tokenizer: gpt2: No such file"),
        ("a.jsonl", '{"text": "a"}\n', {"val_fraction": 0.5}, "--val-fraction: 0.5 of 1 rows leaves none to train on"),
        ("a.jsonl", '{"text": "a"}\n', {"resize": 9}, "--resize: is for images, and .* holds jsonl"),
        ("a.jsonl", '{"text": "a"}\n', {"column": "text"}, "--column: is for the text of rows, with --tokenizer"),
        ("a.jsonl", '{"text": "a"}\n', {"format": "tokens"}, "--tokenizer: needed"),
        ("a.jsonl", '{"text": "a"}\n', {"format": "tar"}, "--format: tar cannot be made of jsonl"),
        ("a.csv", "a,b\n1,2\n3\n", {}, "line 3 has 1 columns, not 2"),
        ("a.csv", "a,a\n1,2\n", {}, "its first line does not name the columns, each once"),
        ("a.csv", 'a,b\n1,"2\n', {}, "line 2 is not CSV"),
        ("a.parquet", "PAR1", {}, "is not Parquet, or was cut short"),
        ("a.txt", "abc", {}, "--tokenizer: needed to make tokens of text"),
        ("a.txt", "", {"tokenizer": "bytes"}, "holds no rows"),
        ("a.txt", "a", {"tokenizer": "bytes", "val_fraction": 0.5}, "--val-fraction: .* is too short"),
        ("a.jsonl.gz", "abc", {}, "unpack it first"),
        ("a.docx", "abc", {}, "is of no kind that is known"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_written(
    name: str, content: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=says):
        make(tmp_path / name, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_files_of_other_kinds_are_left_out_and_told(photos: Path, tmp_path: Path) -> None:
    remarks: list[str] = []
    request = Request(photos, str(tmp_path / "out"), 10_000)
    raw = photos / "val" / "cat" / "7.heic"
    raw.write_bytes(b"of a telephone")
    make_shards(request, lambda shard: None, remarks.append)
    readme = photos / "train" / "README.txt"
    assert remarks.pop() == f"left out: {readme}, {raw} (2 in all)"
    readme.unlink()
    odd = raw.rename(raw.with_name("7\n\udce9.heic"))
    (photos / "test").mkdir()
    make_shards(replace(request, target=str(tmp_path / "odd")), lambda shard: None, remarks.append)
    assert remarks.pop() == f"left out: {photos / 'test'}, {str(odd)!a} (2 in all)"
    odd.unlink()
    (photos / "test").rmdir()
    make_shards(replace(request, target=str(tmp_path / "again")), lambda shard: None, remarks.append)
    assert not remarks


def test_folders_that_cannot_be_understood_are_told(tmp_path: Path) -> None:
    source = tmp_path / "in"
    with pytest.raises(UserError, match="is not there; give a file, or a folder"):
        make(source, tmp_path / "out")
    source.mkdir()
    (source / "a.jsonl.gz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"nothing to make shards of; unpack a.jsonl.gz"):
        make(source, tmp_path / "out")
    (source / "classes.txt").write_text("cat")
    with pytest.raises(UserError, match=r"a.jsonl.gz is packed; unpack it first"):
        make(source, tmp_path / "out", tokenizer="bytes")
    (source / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"is in .*, which is read; give a folder outside it"):
        make(source, source / "out")
    (source / "b.csv").write_text("a\n1\n")
    with pytest.raises(UserError, match="holds jsonl and csv files"):
        make(source, tmp_path / "out")
