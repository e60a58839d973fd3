"""The classes of rows: found when shards are made, kept in the index, learned without another word."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shoal.core.errors import UserError
from shoal.data.section import TextShards
from shoal.data.shards import labels
from shoal.data.shards.index import ShardIndex
from shoal.data.shards.make import Request, make_shards
from shoal.data.text_shards import load_text_shards

NAMES = ["Sports", "World", "Ärzte"]
ROWS = [{"text": f"news {n}", "label": NAMES[n * 2 % 3]} for n in range(60)]


def make(source: Path, target: Path, **changes: Any) -> dict[str, ShardIndex]:
    remark = changes.pop("remark", print)
    return make_shards(Request(source, str(target), 500, **changes), lambda shard: None, remark)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_names_are_learned_as_they_are(suffix: str, format_: str, tmp_path: Path) -> None:
    source = write(tmp_path / f"news{suffix}", ROWS)
    made = make(source, tmp_path / "out", format=format_, val_fraction=0.2)
    assert [index.about["classes"] for index in made.values()] == [NAMES, NAMES]
    assert sorted(made["train"].about["columns"]) == ["label", "text"]
    data = load_text_shards(TextShards(name="text_shards", dir=str(tmp_path / "out")))
    assert data.spec.num_classes == 3 and data.val is not None
    for part in (data.train, data.val):
        ids, found = part.batch(np.arange(len(part)), 0)
        texts = [bytes((row[row > 0] - 1).tolist()).decode() for row in ids]
        assert [f"news {n}" for n in range(60) if f"news {n}" in texts] == sorted(texts, key=lambda text: int(text[5:]))
        assert [NAMES[label] for label in found] == [ROWS[int(text[5:])]["label"] for text in texts]


@pytest.mark.parametrize(
    ("values", "classes"),
    [
        (["b", "a", "b"], ["a", "b"]),
        ([3, 1], ["0", "1", "2", "3"]),
        (["10", "9"], [str(number) for number in range(11)]),
        (["007", "1"], ["007", "1"]),
        ([True, False], ["False", "True"]),
        ([-1, 1], ["-1", "1"]),
        ([0.5, 1.5], None),
        ([["a"], ["b"]], None),
        ([10**12, 1], None),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_what_are_classes(values: list[Any], classes: list[str] | None, suffix: str, tmp_path: Path) -> None:
    source = write(tmp_path / f"rows{suffix}", [{"kind": value} for value in values])
    if classes is None:
        with pytest.raises(UserError, match=r"^--label: .*'kind' (is|holds) "):
            make(source, tmp_path / "out", label="kind")
        assert not (tmp_path / "out").exists()
        return
    assert make(source, tmp_path / "out", label="kind")[""].about["classes"] == classes
    assert "classes" not in make(source, tmp_path / "unasked")[""].about


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([*range(11), "2 "], "'label' holds '2 ', which is not the number of a class, and 0, which is; if all are"),
        ([-1, 0, 1], "'label' holds '-1', which is not the number of a class"),
        (["0.14", "0.15"], "'label' holds '0.14', which is not the number of a class; if all are names: --label label"),
        (["y", "x" * 257], "has more than 256 characters, which is no class"),
        ([f"an answer to question {number}" for number in range(1500)], "1,500 different values in 1,500 rows"),
    ],
)
def test_what_is_only_called_a_label_may_be_none(values: list[Any], told: str, tmp_path: Path) -> None:
    source = write(tmp_path / "rows.jsonl", [{"text": "x", "label": value} for value in values])
    remarks: list[str] = []
    (index,) = make(source, tmp_path / "out", remark=remarks.append).values()
    assert index.num_rows == len(values) and not {"classes", "label"} & index.about.keys()
    assert "the index lists no classes: " in remarks[0] and told in remarks[0]


def test_numbers_that_begin_with_1_are_told(tmp_path: Path) -> None:
    remarks: list[str] = []
    source = write(tmp_path / "rows.jsonl", [{"text": "x", "label": number} for number in (1, 2, 3, 4)])
    (index,) = make(source, tmp_path / "out", remark=remarks.append).values()
    assert index.about["classes"] == ["0", "1", "2", "3", "4"]
    assert remarks == ["no row is of class 0, which numbers begin with; there are 5 classes with it"]


def test_the_column_is_found_again(tmp_path: Path) -> None:
    rows = [{"text": row["text"], "topic": row["label"], "label": n % 2} for n, row in enumerate(ROWS)]
    made = make(write(tmp_path / "news.jsonl", rows), tmp_path / "out", label="topic", val_fraction=0.2)
    assert made["train"].about["label"] == "topic"
    train = load_text_shards(TextShards(name="text_shards", dir=str(tmp_path / "out"))).train
    ids, found = train.batch(np.arange(len(train)), 0)
    numbers = [int(bytes((row[row > 0] - 1).tolist())[5:]) for row in ids]
    assert [NAMES[label] for label in found] == [rows[number]["topic"] for number in numbers]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_there_are_not_too_many(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MOST_CLASSES", 2)
    source = write(tmp_path / f"news{suffix}", ROWS)
    with pytest.raises(UserError, match=r"--label: .*'label' has more than 2 different values; .* leave this out"):
        make(source, tmp_path / "out", label="label")
    assert not (tmp_path / "out").exists()


def test_a_row_without_a_class_is_told(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [*ROWS, {"text": "news", "label": None}]
    for suffix, where in ((".jsonl", "line 61"), (".parquet", "row group 8")):
        source = write(tmp_path / f"news{suffix}", rows)
        with pytest.raises(UserError, match=f"--label: .*{where}: 'label' is null, which is no class"):
            make(source, tmp_path / "out", label="label")
        remarks: list[str] = []
        (index,) = make(source, tmp_path / f"out{suffix}", remark=remarks.append).values()
        assert "classes" not in index.about and index.num_rows == 61
        assert len(remarks) == 1 and "the index lists no classes" in remarks[0] and where in remarks[0]


def test_what_is_only_validated_on_cannot_be_learned(tmp_path: Path) -> None:
    write(tmp_path / "in" / "train" / "a.jsonl", ROWS)
    write(tmp_path / "in" / "val" / "a.jsonl", [{"text": "x", "label": "Sports"}])
    made = make(tmp_path / "in", tmp_path / "out")
    assert made["train"].about["classes"] == made["val"].about["classes"] == NAMES
    write(tmp_path / "in" / "val" / "a.jsonl", [{"text": "x", "label": "Fish"}])
    with pytest.raises(UserError, match="--label: 'label' of val has classes that train has not: Fish"):
        make(tmp_path / "in", tmp_path / "more", label="label")
    assert "classes" not in make(tmp_path / "in", tmp_path / "more")["train"].about


@pytest.mark.parametrize("field", ["text", "label"])
def test_a_wrong_name_of_a_column_is_told_before_training(field: str, tmp_path: Path) -> None:
    make(write(tmp_path / "news.jsonl", ROWS), tmp_path / "out", val_fraction=0.2)
    section = TextShards(name="text_shards", dir=str(tmp_path / "out"), **{field: f"{field}s"})
    with pytest.raises(UserError, match=f"data.{field}: .* has no column '{field}s'.*did you mean {field}?"):
        load_text_shards(section)
