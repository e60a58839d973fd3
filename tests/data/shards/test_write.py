"""Writing shards: killed, out of room, to a store, over what is there; never half of what looks whole."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RunError, UserError
from shoal.data.shards.check import hash_file, verify
from shoal.data.shards.folder import MARKER, LocalFolder, open_folder
from shoal.data.shards.index import INDEX, Shard, ShardIndex, parse_index
from shoal.data.shards.make import Request, make_shards
from shoal.data.shards.write import by_size, write_jsonl, writing

if TYPE_CHECKING:
    from tests.store import Proxy

LINES = [json.dumps({"id": number, "text": "x" * (number % 50)}).encode() for number in range(2000)]


def quiet(shard: Shard) -> None:
    """Hears of a shard."""


def write(
    target: Path | str, lines: list[bytes] = LINES, shard_bytes: int = 4000, overwrite: bool = False
) -> ShardIndex:
    with writing(open_folder(str(target), "DST"), [""], "jsonl", overwrite, quiet) as writers:
        write_jsonl(writers[""], lines, shard_bytes)
    return writers[""].index()


def lines_of(folder: Path) -> list[bytes]:
    index = parse_index((folder / INDEX).read_bytes(), str(folder))
    return [line for shard in index.shards for line in (folder / shard.file).read_bytes().splitlines()]


@given(st.lists(st.integers(0, 20)), st.integers(1, 40))
def test_runs_are_no_larger_than_the_limit(sizes: list[int], limit: int) -> None:
    runs = [list(run) for run in by_size(sizes, lambda size: size, limit)]
    assert [size for run in runs for size in run] == sizes
    assert all(run and (sum(run) <= limit or len([size for size in run if size]) == 1) for run in runs)


def test_all_rows_are_in_the_shards_and_the_index_says_so(tmp_path: Path) -> None:
    index = write(tmp_path / "deep" / "new")
    folder = tmp_path / "deep" / "new"
    assert lines_of(folder) == LINES and index.num_rows == len(LINES)
    assert parse_index((folder / INDEX).read_bytes(), "") == index
    assert len(index.shards) > 10
    for shard in index.shards:
        path = folder / shard.file
        assert shard.bytes == path.stat().st_size <= 4000 and shard.xxh3_128 == hash_file(path)
    assert {path.name for path in folder.iterdir()} == {INDEX, *(shard.file for shard in index.shards)}


def test_what_is_whole_is_only_replaced_when_asked_to(tmp_path: Path) -> None:
    write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=r"already has an index.json; --overwrite replaces"):
        write(tmp_path, LINES[:5])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    write(tmp_path, LINES[:5], overwrite=True)
    assert lines_of(tmp_path) == LINES[:5]
    assert {path.name for path in tmp_path.iterdir()} == {INDEX, "shard-00000.jsonl"}


def test_somebody_elses_shards_are_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "shard-00000.tar").write_bytes(b"precious")
    (tmp_path / "notes.txt").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"holds shard-00000.tar, without an index; --overwrite deletes it"):
        write(tmp_path)
    assert (tmp_path / "shard-00000.tar").read_bytes() == b"precious"
    write(tmp_path, overwrite=True)
    assert not (tmp_path / "shard-00000.tar").exists() and (tmp_path / "notes.txt").exists()


def test_parts_do_not_lie_beside_another_dataset(tmp_path: Path) -> None:
    write(tmp_path)
    with (
        pytest.raises(UserError, match="holds another dataset"),
        writing(LocalFolder(tmp_path), ["train", "val"], "jsonl", True, quiet),
    ):
        raise AssertionError("not reached")


def test_an_error_in_the_middle_takes_everything_away(tmp_path: Path) -> None:
    def lines() -> Iterator[bytes]:
        yield from LINES[:1000]
        raise UserError("line 1001 is bad")

    folder = tmp_path / "new"
    with (
        pytest.raises(UserError, match="line 1001"),
        writing(LocalFolder(folder), [""], "jsonl", False, quiet) as writers,
    ):
        write_jsonl(writers[""], lines(), 4000)
    assert not folder.exists()


def test_two_writers_do_not_share_a_folder(tmp_path: Path) -> None:
    with writing(LocalFolder(tmp_path), [""], "jsonl", False, quiet) as writers:
        with pytest.raises(UserError, match="is being written by another process"):
            write(tmp_path)
        write_jsonl(writers[""], LINES, 4000)
    assert lines_of(tmp_path) == LINES and not (tmp_path / MARKER).exists()


def test_a_killed_writer_leaves_no_index_and_can_be_run_again(tmp_path: Path) -> None:
    source, target = tmp_path / "rows.jsonl", tmp_path / "shards"
    lines = LINES * 10
    source.write_bytes(b"\n".join(lines))
    command = [sys.executable, "-m", "shoal.cli.main", "data", "shard", str(source), str(target), "--shard-size", "400"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(target.glob("shard-*.jsonl"))) < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    left = {path.name for path in target.iterdir()}
    assert process.returncode == -signal.SIGKILL and INDEX not in left and MARKER in left
    make_shards(Request(source, str(target), 1 << 20, seed=None), quiet)
    assert lines_of(target) == lines
    assert {path.name for path in target.iterdir()} == {INDEX, "shard-00000.jsonl"}
    assert not verify(str(target), lambda line: None)[0].problems


def test_killed_between_two_indexes_it_can_be_run_again(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write(tmp_path / part)
    (tmp_path / "val" / INDEX).unlink()
    with (
        pytest.raises(UserError, match="train already has an"),
        writing(LocalFolder(tmp_path), ["train", "val"], "jsonl", False, quiet),
    ):
        raise AssertionError("not reached")
    (tmp_path / "val" / MARKER).touch()
    with writing(LocalFolder(tmp_path), ["train", "val"], "jsonl", False, quiet) as writers:
        for writer in writers.values():
            write_jsonl(writer, LINES[:3], 4000)
    assert lines_of(tmp_path / "train") == lines_of(tmp_path / "val") == LINES[:3]


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_a_full_disk_is_told_and_nothing_is_left(small_disk: Path, tmp_path: Path, format_: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps({"text": os.urandom(5000).hex()}) + "\n" for _ in range(500)))
    request = Request(source, str(small_disk / "shards"), 300_000, format=format_)
    with pytest.raises(RunError, match=r"DST: .*No space left on device; no index was written. Make room"):
        make_shards(request, quiet)
    assert list(small_disk.iterdir()) == []


def test_shards_go_to_a_store_that_fails_now_and_then(s3: "Proxy", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.core.remote._FIRST_DELAY_S", 0.01)
    faults = iter(["ok", "error", "ok", "reset", "ok", "late error"])
    s3.draw = lambda: next(faults, "ok")
    index = write("s3://bucket/some/rows", shard_bytes=40_000)
    folder = open_folder("s3://bucket/some/rows", "DST")
    names = folder.names()
    assert names == {INDEX, *(shard.file for shard in index.shards)} and len(index.shards) > 1
    contents = [folder.read(shard.file) or b"" for shard in index.shards]
    assert b"".join(contents).splitlines() == LINES
    with pytest.raises(UserError, match=r"s3://bucket/some/rows already has an"):
        write("s3://bucket/some/rows")
    (checked,) = verify("s3://bucket/some/rows", lambda line: None)
    assert not checked.problems and checked.rows == len(LINES)
    folder.delete(index.shards[1].file)
    (checked,) = verify("s3://bucket/some/rows", lambda line: None)
    assert [(problem.file, problem.problem) for problem in checked.problems] == [(index.shards[1].file, "is not there")]
    write("s3://bucket/some/rows", LINES[:4], overwrite=True)
    assert folder.names() == {INDEX, "shard-00000.jsonl"}


def test_a_store_that_does_not_answer_is_told(s3: "Proxy", monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shoal.core.remote._FIRST_DELAY_S", 0.001)
    s3.draw = lambda: "error"
    source = tmp_path / "rows.jsonl"
    source.write_bytes(b"\n".join(LINES))
    with pytest.raises(RunError, match=r"DST: s3://bucket/rows\S* could not be listed.*try again"):
        make_shards(Request(source, "s3://bucket/rows", 1 << 20), quiet)
