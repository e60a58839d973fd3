"""Following a file of JSON lines: each line once, whatever becomes of the file."""

import json
import os
from pathlib import Path

import pytest

from shoal.observe.monitor.tail import Tail


def write(path: Path, numbers: range, mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps({"n": n}) + "\n" for n in numbers)


def read(tail: Tail) -> list[int]:
    found = []
    while True:
        piece = tail.read()
        found += [record["n"] for record in piece.records]
        if not piece.is_behind:
            return found


def test_each_line_is_read_once(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    assert read(tail) == []  # not there yet
    write(tail.path, range(3))
    assert read(tail) == [0, 1, 2] and read(tail) == []
    write(tail.path, range(3, 5))
    assert read(tail) == [3, 4]


def test_a_line_that_is_not_whole_is_read_when_it_is(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    tail.path.write_text('{"n": 1}\n{"n": ')
    assert read(tail) == [1]
    with tail.path.open("a") as file:
        file.write("2}\n")
    assert read(tail) == [2]


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    tail.path.write_bytes(b'{"n": 1}\nnonsense\n[1]\n\xff\xfe\n7\n\n' + b"[" * 5000 + b'\n{"n": 2}\n')
    assert read(tail) == [1, 2]


def test_a_file_without_lines_is_no_trouble(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    tail.path.write_bytes(b"x" * 3_000_000 + b'\n{"n": 2}\n')
    assert read(tail) == [2]


@pytest.mark.parametrize("kept", [range(2), range(5), range(10, 40)])
def test_a_file_that_is_replaced_is_read_anew(tmp_path: Path, kept: range) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    write(tail.path, range(5))
    assert read(tail) == [0, 1, 2, 3, 4]
    write(tmp_path / "new", kept)
    (tmp_path / "new").replace(tail.path)
    piece = tail.read()
    assert piece.is_anew and [record["n"] for record in piece.records] == list(kept)
    assert not tail.read().is_anew


def test_another_content_under_the_same_inode_is_noticed(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    write(tail.path, range(5))
    read(tail)
    inode = tail.path.stat().st_ino
    write(tail.path, range(100, 200), "w")
    assert tail.path.stat().st_ino == inode
    piece = tail.read()
    assert piece.is_anew and piece.records[0] == {"n": 100}


def test_a_file_that_goes_or_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "x.jsonl")
    write(tail.path, range(2))
    read(tail)
    tail.path.unlink()
    assert tail.read().records == [] and not tail.read().is_anew
    os.mkdir(tail.path)  # noqa: PTH102
    assert tail.read().records == []
