"""Shards, opened: every row by its number, whatever wrote the file; and files that are not whole."""

import json
import os
import tarfile

import pytest

from shoal.data.shards.opened import FileShard, JsonLinesShard, ParquetShard, RowError, TarShard, line_bounds
from tests.data.shards.making import write_tar

ROWS = [
    {"jpg": os.urandom(length), "cls": str(number).encode()} for number, length in enumerate((0, 1, 511, 512, 5000))
]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("prefix", ["", "train/", "a" * 70 + "/" + "b" * 60 + "/"], ids=["plain", "folder", "long"])
def test_tars_of_every_kind(tmp_path, form, prefix):
    write_tar(tmp_path / "a.tar", ROWS, form, prefix)
    shard = TarShard(tmp_path / "a.tar")
    assert len(shard) == 5 and [shard.row(number) for number in (4, 0, 1, 2, 3)] == [ROWS[n] for n in (4, 0, 1, 2, 3)]
    shard.close()


def test_names_longer_than_a_header_holds(tmp_path):
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        write_tar(tmp_path / "a.tar", ROWS, form, "deep/" * 60)
        shard = TarShard(tmp_path / "a.tar")
        assert [shard.row(number) for number in range(5)] == ROWS
        shard.close()


def test_other_members_are_no_rows(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path, "folder", recursive=False)
        (tmp_path / ".hidden").write_text("x")
        tar.add(tmp_path / ".hidden", ".hidden")
        (tmp_path / "one.JPG").write_bytes(b"1")
        tar.add(tmp_path / "one.JPG", "folder/one.JPG")
    shard = TarShard(tmp_path / "a.tar")
    assert len(shard) == 1 and shard.row(0) == {"jpg": b"1"}
    shard.close()


def test_a_tar_that_is_cut_short_keeps_the_rows_before(tmp_path):
    write_tar(tmp_path / "a.tar", ROWS)
    whole = (tmp_path / "a.tar").read_bytes()
    seen = set()
    for length in range(0, len(whole), 100):
        (tmp_path / "a.tar").write_bytes(whole[:length])
        shard = TarShard(tmp_path / "a.tar")
        readable = 0
        for number, row in enumerate(ROWS):
            try:
                found = shard.row(number)
            except RowError as error:
                assert "ends too early" in str(error)
                break
            if found != row:  # its second member is gone, and nobody can know
                assert found.items() <= row.items() and number == len(shard) - 1
                break
            readable += 1
        seen.add(readable)
        shard.close()
    assert seen == {0, 1, 2, 3, 4, 5}


def test_a_tar_with_a_damaged_header_ends_there(tmp_path):
    write_tar(tmp_path / "a.tar", ROWS)
    content = bytearray((tmp_path / "a.tar").read_bytes())
    second = content.index(b"000001.jpg")
    content[second + 130] ^= 0x01
    (tmp_path / "a.tar").write_bytes(content)
    shard = TarShard(tmp_path / "a.tar")
    assert shard.row(0) == ROWS[0]
    with pytest.raises(RowError, match=r"^the file ends too early, or is damaged, after 1 rows$"):
        shard.row(1)
    shard.close()


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n"])
def test_lines(tmp_path, end):
    rows = [{"text": "ä" * 10, "n": 1}, {"text": "b\\n"}, {}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + end)
    shard = JsonLinesShard(tmp_path / "a.jsonl")
    assert len(shard) == 3 and [shard.row(number) for number in (2, 1, 0)] == rows[::-1]
    with pytest.raises(RowError, match="after 3 rows"):
        shard.row(3)
    shard.close()


def test_lines_longer_than_a_piece(tmp_path):
    rows = [{"text": "x" * 3_000_000}, {"text": "y"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    starts, ends = line_bounds(tmp_path / "a.jsonl")
    assert (ends - starts).tolist() == [len(json.dumps(row)) for row in rows]


@pytest.mark.parametrize(("line", "words"), [('{"text": ', "is not JSON"), ("[1, 2]", "is a list, not an object")])
def test_lines_that_are_no_rows(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + line)
    shard = JsonLinesShard(tmp_path / "a.jsonl")
    assert shard.row(0) == {"a": 1}
    with pytest.raises(RowError, match=words):
        shard.row(1)
    shard.close()


def test_parquet(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [bytes([n]) * 100 for n in range(50)], "label": list(range(50))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    shard = ParquetShard(tmp_path / "a.parquet")
    assert len(shard) == 50
    assert [shard.row(n) for n in (49, 0, 7, 6)] == [{"image": bytes([n]) * 100, "label": n} for n in (49, 0, 7, 6)]
    with pytest.raises(RowError, match="has 50 rows"):
        shard.row(50)
    monkeypatch.setattr("shoal.data.shards.opened.HELD_BYTES", 1)
    for number in range(0, 50, 7):
        shard.row(number)
    assert len(ParquetShard._held) == 4, "no more is held than fits, but for a few"
    shard.close()
    assert not ParquetShard._held
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b.parquet").write_bytes(content[:-20])
    with pytest.raises(RowError, match="is not a whole parquet file"):
        ParquetShard(tmp_path / "b.parquet")
    (tmp_path / "c.parquet").write_bytes(content[:4] + b"\xff" * 300 + content[304:])
    damaged = ParquetShard(tmp_path / "c.parquet")
    with pytest.raises(RowError, match="row group 0 cannot be read"):
        damaged.row(0)
    damaged.close()


def test_a_file_that_is_a_row(tmp_path):
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.jpg").write_bytes(b"x")
    shard = FileShard(tmp_path / "cat" / "1.jpg")
    assert len(shard) == 1 and shard.row(0) == {"content": b"x", "folder": "cat"}
    (tmp_path / "cat" / "1.jpg").unlink()
    assert shard.row(0)["content"] == b"x", "it is in memory, whatever becomes of the file"
    with pytest.raises(FileNotFoundError):
        FileShard(tmp_path / "cat" / "1.jpg")


@pytest.mark.parametrize("size", [b"-0000001000\0", b"77777777777\0", b"\x80" + b"\xff" * 11])
@pytest.mark.parametrize("kind", [b"0", b"5", b"L"])
def test_sizes_that_cannot_be(tmp_path, size, kind):
    write_tar(tmp_path / "a.tar", ROWS)
    content = bytearray((tmp_path / "a.tar").read_bytes())
    content[124:136], content[156:157] = size, kind
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    (tmp_path / "a.tar").write_bytes(content)
    shard = TarShard(tmp_path / "a.tar")
    with pytest.raises(RowError, match="ends too early"):
        shard.row(0)
    shard.close()


def test_rows_of_a_file_that_is_gone_are_not_taken_for_anothers(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number in range(30):
        parquet.write_table(arrow.table({"n": [number] * 3}), tmp_path / f"{number}.parquet")
        assert ParquetShard(tmp_path / f"{number}.parquet").row(1) == {"n": number}
    assert len(ParquetShard._held) <= 1
