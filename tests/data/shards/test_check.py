"""Shards looked at byte by byte: what is damaged is found, and an index is made where there is none."""

import io
import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.core.errors import UserError
from shoal.data.shards.check import make_indexes, verify
from shoal.data.shards.index import INDEX, ShardIndex, parse_index

ROWS = 40


def quiet(line: str) -> None:
    """Hears of a file."""


def write_tar(path: Path, first: int, label: str | None = None) -> None:
    with tarfile.open(path, "w") as tar:
        for number in range(first, first + ROWS):
            content = {".jpg": b"x" * (number % 7 * 300), ".cls": (label or str(number % 5)).encode()}
            for suffix, data in content.items():
                member = tarfile.TarInfo(f"n{number}{suffix}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def write_folder(folder: Path, format_: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(3):
        path = folder / f"data-{number}"
        rows = [{"id": n, "text": "y" * n} for n in range(ROWS)]
        match format_:
            case "tar":
                write_tar(path.with_suffix(".tar"), number * 100)
            case "jsonl":
                path.with_suffix(".jsonl").write_text("\n\n".join(map(json.dumps, rows)))
            case "parquet":
                pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
            case _:
                np.arange(ROWS, dtype="<u2").tofile(path.with_suffix(".bin"))
    return folder


def index(folder: Path, format_: str, **changes: object) -> ShardIndex:
    given = {"dtype": "uint16", "vocab_size": 100} if format_ == "tokens" else {}
    return make_indexes(str(folder), quiet, **{**given, **changes})[""]  # type: ignore[arg-type]


@pytest.mark.parametrize("format_", ["tar", "jsonl", "parquet", "tokens"])
def test_files_of_any_format_get_an_index_that_they_are_whole_by(format_: str, tmp_path: Path) -> None:
    found = index(write_folder(tmp_path, format_), format_)
    assert found.format == format_ and found.rows.tolist() == [ROWS] * 3
    assert parse_index((tmp_path / INDEX).read_bytes(), "") == found
    about = {"tar": {"classes": list("01234")}, "tokens": {"dtype": "uint16", "vocab_size": 100}}
    assert found.about == about.get(format_, {})
    (checked,) = verify(str(tmp_path), quiet)
    assert not checked.problems and (checked.shards, checked.rows) == (3, 3 * ROWS)
    with pytest.raises(UserError, match=r"already has an index.json; --overwrite makes it again"):
        index(tmp_path, format_)
    assert index(tmp_path, format_, overwrite=True) == found


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (flip, "the checksum differs"),
    (cut, "bytes instead of"),
    (Path.unlink, "is not there"),
]


@pytest.mark.parametrize("format_", ["tar", "jsonl", "parquet", "tokens"])
@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_what_is_damaged_is_found(damage: Callable[[Path], None], says: str, format_: str, tmp_path: Path) -> None:
    for part in ("train", "val"):
        index(write_folder(tmp_path / part, format_), format_)
    broken = sorted((tmp_path / "val").glob("data-*"))[1]
    damage(broken)
    train, val = verify(str(tmp_path), quiet)
    assert not train.problems
    (problem,) = val.problems
    assert problem.file == f"val/{broken.name}" and says in problem.problem


@pytest.mark.parametrize("part", ["train", "val"])
def test_a_part_without_an_index_is_not_whole(part: str, tmp_path: Path) -> None:
    for name in ("train", "val"):
        index(write_folder(tmp_path / name, "jsonl"), "jsonl")
    (tmp_path / part / INDEX).unlink()
    found = {checked.folder.rpartition("/")[2]: checked.problems for checked in verify(str(tmp_path), quiet)}
    (problem,) = found.pop(part)
    assert problem.file == f"{part}/{INDEX}" and problem.problem.startswith("is not there")
    assert list(found.values()) == [()]


def test_rows_are_counted_also_where_the_bytes_are_right(tmp_path: Path) -> None:
    index(write_folder(tmp_path, "jsonl"), "jsonl")
    tree = json.loads((tmp_path / INDEX).read_text())
    tree["shards"][0]["rows"], tree["shards"][1]["rows"] = ROWS + 1, ROWS - 1
    (tmp_path / INDEX).write_text(json.dumps(tree))
    (checked,) = verify(str(tmp_path), quiet)
    assert [problem.problem for problem in checked.problems] == [
        "has 40 rows instead of 41",
        "has 40 rows instead of 39",
    ]


@pytest.mark.parametrize("keep", [0.5, 0.93])
def test_a_tar_that_was_cut_short_gets_no_index(keep: float, tmp_path: Path) -> None:
    path = write_folder(tmp_path, "tar") / "data-1.tar"
    content = path.read_bytes()
    blocks = len(content.rstrip(b"\0")) // 512 + 1
    path.write_bytes(content[: int(blocks * keep) * 512])
    with pytest.raises(UserError, match=r"DIR: data-1.tar: is not a whole tar.*; replace the file or take it away"):
        index(tmp_path, "tar")
    assert not (tmp_path / INDEX).exists()


def test_classes_that_are_no_numbers_are_not_guessed(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", 0, label="cat")
    assert index(tmp_path, "tar").about == {}


def test_wrong_use_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"DIR: .* is not there, or nothing is in it"):
        index(tmp_path, "tar")
    (tmp_path / "notes.md").touch()
    with pytest.raises(UserError, match=r"DIR: no \*.tar, \*.jsonl, \*.parquet, \*.bin in"):
        index(tmp_path, "tar")
    with pytest.raises(UserError, match=r"DIR: no index.json in .*; shoal data index DIR makes one"):
        verify(str(tmp_path), quiet)
    write_folder(tmp_path / "bin", "tokens")
    with pytest.raises(UserError, match=r"--dtype: needed for .bin files"):
        make_indexes(str(tmp_path / "bin"), quiet)
    with pytest.raises(UserError, match=r"--vocab-size: data-0.bin holds the id 39, and ids must be below 39"):
        index(tmp_path / "bin", "tokens", vocab_size=39)
    cut(tmp_path / "bin" / "data-0.bin")
    (tmp_path / "bin" / "data-0.bin").open("ab").write(b"x")
    with pytest.raises(UserError, match="is not a whole number of uint16 tokens"):
        index(tmp_path / "bin", "tokens")
    write_folder(tmp_path / "rows", "jsonl")
    with pytest.raises(UserError, match=r"--dtype: is for .bin files"):
        index(tmp_path / "rows", "jsonl", dtype="uint16")
    shutil.copy(tmp_path / "bin" / "data-1.bin", tmp_path / "rows")
    with pytest.raises(UserError, match="holds jsonl and tokens files; an index is of one format"):
        index(tmp_path / "rows", "jsonl")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file; give a folder"):
        verify(str(tmp_path / "file"), quiet)
