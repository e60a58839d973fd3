import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.storage import expand_home, read_json_lines, to_json_line, write_atomically

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
records = st.dictionaries(st.text(), json_values, max_size=4)


def test_the_home_of_nobody_is_a_path_like_any_other() -> None:
    assert expand_home("~/data") == Path.home() / "data"
    assert expand_home("~0/data") == Path("~0/data") and expand_home(Path("a")) == Path("a")


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_atomically(file, "old\n")
    write_atomically(file, "nęw\n")
    assert file.read_text(encoding="utf-8") == "nęw\n"
    assert list(tmp_path.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new" * 10_000 + "\ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    contents = {letter * 200_000 for letter in "ab"}
    write_atomically(file, "a" * 200_000)
    seen: set[str] = set()
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            seen.add(file.read_text())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(20):
        for content in sorted(contents):
            write_atomically(file, content)
    done.set()
    reader.join()
    assert seen <= contents and seen


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _with_null_for_not_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_null_for_not_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_null_for_not_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(records)
def test_any_record_is_one_line_of_strict_json(record: dict[str, Any]) -> None:
    line = to_json_line(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line, parse_constant=_refuse) == _with_null_for_not_finite(record)


def test_what_is_not_a_number_becomes_null_at_any_depth() -> None:
    line = to_json_line({"a": math.nan, "b": [1.5, -math.inf], "c": {"d": (math.inf, "x")}})
    assert json.loads(line) == {"a": None, "b": [1.5, None], "c": {"d": [None, "x"]}}


@given(st.lists(records, max_size=5), st.data())
def test_a_file_cut_anywhere_gives_its_whole_records(
    tmp_path_factory: pytest.TempPathFactory, written: list[dict[str, Any]], data: st.DataObject
) -> None:
    content = "".join(to_json_line(record) + "\n" for record in written).encode()
    cut = data.draw(st.integers(0, len(content)))
    file = tmp_path_factory.getbasetemp() / "cut.jsonl"
    file.write_bytes(content[:cut])
    read = list(read_json_lines(file))
    whole = content[:cut].count(b"\n")
    expected = [_with_null_for_not_finite(record) for record in written]
    # A record whose newline alone is missing is whole too.
    assert read in (expected[:whole], expected[: whole + 1])


def test_lines_that_are_no_records_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"a": 1}\n\n[1, 2]\n"text"\n\xff\xfe\x00\n{"b": \n{"c": 3}')
    assert list(read_json_lines(file)) == [{"a": 1}, {"c": 3}]


def test_a_file_that_is_not_there_has_no_records(tmp_path: Path) -> None:
    assert list(read_json_lines(tmp_path / "nothing.jsonl")) == []
    assert list(read_json_lines(tmp_path)) == []
