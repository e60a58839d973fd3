"""What is in the journal has happened, and what is not has not, whatever happened to the machine."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RunError, UserError
from shoal.tune.journal import NAME, Journal, read_journal


@pytest.fixture
def journal(tmp_path: Path) -> Any:
    made = Journal(tmp_path)
    yield made
    made.close()


def names(folder: Path) -> list[str]:
    return [event["event"] for event in read_journal(folder)]


def test_what_is_added_is_read_back_in_order(journal: Journal, tmp_path: Path) -> None:
    added = [journal.add("trial", trial=0, config={"a": [1, "é\n", None]}), journal.add("run", trial=0, until=2.5)]
    assert journal.read() == read_journal(tmp_path) == added
    assert [event["event"] for event in added] == ["trial", "run"] and all(event["time"] > 0 for event in added)
    assert len((tmp_path / NAME).read_bytes().splitlines()) == 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_returned_as_it_is_read(journal: Journal, value: float) -> None:
    added = journal.add("result", trial=0, metrics={"val_loss": value, "list": [value, 1.5]})
    assert added["metrics"] == {"val_loss": None, "list": [None, 1.5]} and journal.read() == [added]


def test_lists_and_keys_are_returned_as_they_are_read(journal: Journal) -> None:
    assert journal.add("a", pair=(1, 2), by={3: 4})["pair"] == [1, 2]
    assert journal.read()[0]["by"] == {"3": 4}


@pytest.mark.parametrize("kept", range(0, 40, 3))
def test_a_torn_last_line_is_cut_and_the_next_is_whole(tmp_path: Path, kept: int) -> None:
    first = Journal(tmp_path)
    first.add("one")
    size = (tmp_path / NAME).stat().st_size
    first.add("two", words="é" * 10)
    first.close()
    os.truncate(tmp_path / NAME, size + kept)
    assert names(tmp_path) == ["one"], "who only reads leaves it out"
    again = Journal(tmp_path)
    assert (tmp_path / NAME).stat().st_size == size
    again.add("three")
    again.close()
    assert names(tmp_path) == ["one", "three"]


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b'{"event": "sta')
    journal = Journal(tmp_path)
    assert journal.read() == []
    journal.close()
    assert (tmp_path / NAME).read_bytes() == b""


def test_where_there_is_no_journal_there_are_no_events(tmp_path: Path) -> None:
    assert read_journal(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [b"{", b"", b"[]", b"3", b"null", b"{}", b'{"event": 3}', b'"event"', b"\xff\xfe", b'{"event": "a"} {}', b"\0\0"],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_line_is_refused_with_its_number(tmp_path: Path, line: bytes, place: int) -> None:
    lines = [b'{"event": "a"}', b'{"event": "b"}']
    lines.insert(place, line)
    (tmp_path / NAME).write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=rf"{NAME}: line {place + 1} is damaged; bring the file back"):
        read_journal(tmp_path)


@given(cut=st.integers(0, 200), noise=st.binary(max_size=10))
def test_any_end_is_read_or_refused_in_words(cut: int, noise: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    whole = b"".join(json.dumps({"event": f"e{i}", "x": "y" * i}).encode() + b"\n" for i in range(6))
    (folder / NAME).write_bytes(whole[:cut] + noise)
    try:
        events = read_journal(folder)
    except UserError as error:
        assert "is damaged" in str(error) and b"\n" in noise
    else:
        assert [event["event"] for event in events][: whole[:cut].count(b"\n")] == [
            f"e{i}" for i in range(whole[:cut].count(b"\n"))
        ]


def test_a_full_disk_is_told_and_leaves_no_half_line(small_disk: Path) -> None:
    journal = Journal(small_disk)
    with pytest.raises(RunError, match=rf"{NAME} cannot be written: No space left on device; make room, then resume"):
        for number in range(10_000):
            journal.add("result", trial=number, words="x" * 997)
    told = read_journal(small_disk)
    content = (small_disk / NAME).read_bytes()
    assert content.endswith(b"\n") and len(told) == content.count(b"\n") > 100
    assert [event["trial"] for event in told] == list(range(len(told)))
    os.truncate(small_disk / NAME, content.index(b"\n") + 1)
    with pytest.raises(RunError, match="make room, then resume"):
        journal.add("short")  # which would not follow from what is there
    journal.close()
    again = Journal(small_disk)
    again.add("room again")
    again.close()
    assert names(small_disk) == ["result", "room again"]


def test_what_does_not_reach_the_disk_is_taken_back(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    journal.add("one")

    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(RunError, match="cannot be written: Input/output error"):
            journal.add("two")
    with pytest.raises(RunError, match="cannot be written"):
        journal.add("three")
    assert names(journal.path.parent) == ["one"]
