import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.data import csv_text
from shoal.data.csv_text import distinct_labels, draw_rows, encode_words, load_csv_text, read_rows
from shoal.data.section import CsvText

from ..fake_data import csv_text_rows, write_csv_text
from .file_server import serve

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def section(folder, **changes):
    return CsvText(**{"name": "agnews", "dir": str(folder), "download": False, **changes})


@pytest.mark.parametrize("gzipped", [True, False])
@pytest.mark.parametrize("place", [".", "agnews", "ag_news"])
def test_rows_become_tokens_and_classes_from_zero(tmp_path, gzipped, place):
    write_csv_text(tmp_path / place, rows=200, val_rows=50, gzipped=gzipped)
    data = load_csv_text(section(tmp_path))
    assert (len(data.train), len(data.val)) == (200, 50)
    assert data.spec.num_classes == 4 and data.spec.context is None
    tokens, labels = data.train.batch(np.arange(200), 0)
    assert tokens.dtype == torch.int64 and labels.dtype == torch.int64
    assert labels[:5].tolist() == [0, 1, 2, 3, 0]
    # 5 words for each of 4 topics, 8 fillers, "quoted" and "more"; padding and unknown.
    assert data.spec.vocab_size == 32 and int(tokens.max()) == 31
    # The most frequent word of all is in every row: once "quoted", once "more"; "more" comes first in the alphabet.
    assert ((tokens == 2).sum(1) == 1).all() and ((tokens == 3).sum(1) == 1).all()
    last_two = [row[row != 0][-2:].tolist() for row in tokens]
    assert last_two == [[3, 2]] * 200


def test_a_batch_is_as_wide_as_its_longest_row(tmp_path):
    write_csv_text(tmp_path)
    data = load_csv_text(section(tmp_path))
    lengths = (data.train.tensors[0] != 0).sum(1)
    assert lengths.min() < lengths.max() < 64
    for rows in (np.array([int(lengths.argmin())]), np.array([int(lengths.argmin()), int(lengths.argmax())])):
        assert data.train.batch(rows, 0)[0].shape[1] == int(lengths[rows].max())
    short = load_csv_text(section(tmp_path, max_tokens=3))
    assert short.train.batch(np.arange(10), 0)[0].shape == (10, 3)
    rows = np.arange(10)
    assert torch.equal(pickle.loads(pickle.dumps(data.train)).batch(rows, 0)[0], data.train.batch(rows, 0)[0])


def test_the_vocabulary_is_that_of_the_training_rows():
    tokens, num_ids = encode_words(["The cat THE dog", "a cat\\don't", ""], ["the bird", "!?"], 100, 4)
    # the, cat: twice; a, dog, don't: once
    assert num_ids == 7
    assert tokens.tolist() == [
        [3, 2, 3, 5],
        [4, 2, 6, 0],
        [1, 0, 0, 0],
        [3, 1, 0, 0],
        [1, 0, 0, 0],
    ]
    tokens, num_ids = encode_words(["the cat the dog", "a cat"], [], 3, 8)
    assert num_ids == 3 and tokens[0].tolist() == [1, 2, 1, 1, 0, 0, 0, 0]
    assert encode_words(["", ""], [], 10, 2)[0].tolist() == [[1, 0], [1, 0]]


@given(
    num_rows=st.integers(2, 300),
    seed=st.integers(-(2**40), 2**40),
    shares=st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)),
)
def test_drawn_rows_are_disjoint_and_the_validation_rows_stay(num_rows, seed, shares):
    num_val = max(1, int(shares[0] * num_rows) - 1)
    num_train = max(1, int(shares[1] * (num_rows - num_val)))
    train, val = draw_rows(num_rows, num_train, num_val, seed)
    assert len(train) == num_train and len(val) == num_val
    assert len({*train.tolist(), *val.tolist()}) == num_train + num_val
    assert max(train.max(), val.max()) < num_rows
    rest, same = draw_rows(num_rows, None, num_val, seed)
    assert np.array_equal(val, same) and len(rest) == num_rows - num_val


def test_splitting_validation_rows_off(tmp_path):
    write_csv_text(tmp_path, rows=100)
    split = {"val_file": None, "val_samples": 20}
    data = load_csv_text(section(tmp_path, **split, train_samples=50))
    assert (len(data.train), len(data.val)) == (50, 20)
    assert torch.equal(data.val.tensors[1], load_csv_text(section(tmp_path, **split)).val.tensors[1])
    other = load_csv_text(section(tmp_path, **split, split_seed=1))
    assert len(other.train) == 80 and not torch.equal(other.val.tensors[0], data.val.tensors[0])
    with pytest.raises(UserError, match=r"data.train_samples: 81 rows to train on and 20 .* the file has 100"):
        load_csv_text(section(tmp_path, **split, train_samples=81))
    with pytest.raises(UserError, match=r"data.train_samples: all other rows to train on and 100 .* the file has 100"):
        load_csv_text(section(tmp_path, val_file=None, val_samples=100))
    assert len(load_csv_text(section(tmp_path, train_samples=7)).train) == 7


def test_val_samples_and_val_file_exclude_each_other(tmp_path):
    write_csv_text(tmp_path)
    for changes in ({"val_file": None}, {"val_samples": 5}):
        with pytest.raises(UserError, match=r"^data.val_samples: "):
            load_csv_text(section(tmp_path, **changes))


def test_any_labels_and_any_number_of_text_columns(tmp_path):
    (tmp_path / "train.csv").write_text('pos,"good, very"\nneg,bad\n\nneutral,so so\n', encoding="utf-8")
    (tmp_path / "test.csv").write_text("neutral,good bad\n", encoding="utf-8")
    data = load_csv_text(section(tmp_path, name="csv_text"))
    assert data.spec.num_classes == 3
    assert data.train.tensors[1].tolist() == [2, 0, 1] and data.val.tensors[1].tolist() == [1]
    (tmp_path / "test.csv").write_text("pos,x\nmeh,good bad\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"test.csv: line 2 has class 'meh', which is none of neg, neutral, pos"):
        load_csv_text(section(tmp_path, name="csv_text"))


def test_numbers_sort_as_numbers():
    assert distinct_labels(["10", "9", "10", "-1"]) == ["-1", "9", "10"]
    assert distinct_labels(["10", "9", "b"]) == ["10", "9", "b"]


def test_lines_count_from_where_a_row_starts(tmp_path):
    path = tmp_path / "train.csv"
    path.write_text('1,"two\nlines",x\n2,y,z\n', encoding="utf-8")
    assert read_rows(path).lines == [1, 3]
    assert read_rows(path).texts == ["two\nlines x", "y z"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"\n\n", "has no rows"),
        (b"1,a,b\n2,a\n", r"line 2 has 2 columns, not 3 \(class,text\[,text...\]\)"),
        (b"1,a,b\n2,a,b,c\n", "line 2 has 4 columns, not 3"),
        (b'1,"a\nb",c\n1\n', "line 3 has 1 columns, not 3"),
        (b'1,a,b\n2,"a,b\n', r"line 2 is not CSV \(unexpected end of data\)"),
        (b'1,a,b\n2,"a"b,c\n', "line 2 is not CSV"),
        (b"5,a,b\n", "line 1 has class '5', which is none of 1, 2, 3, 4"),
        (b"class,title,description\n", r"line 1 has class 'class', .* \(a header line is not expected\)"),
        (b"1,a,b\n1,\xff,b\n", "line 2 is not UTF-8 .*iconv"),
        (gzip.compress(b"1,a,b\n" * 1000, mtime=0)[:-12], "gzip data ends too early"),
    ],
)
def test_broken_files(tmp_path, content, problem):
    write_csv_text(tmp_path)
    (tmp_path / "train.csv").write_bytes(content)
    with pytest.raises(UserError, match=problem) as caught:
        load_csv_text(section(tmp_path, download=True))
    assert str(caught.value).startswith(f"data.dir: {tmp_path / 'train.csv'}: ")


def test_remedies_differ(tmp_path):
    (tmp_path / "train.csv").write_text("x\n", encoding="utf-8")
    with pytest.raises(UserError, match="delete it to download it again"):
        load_csv_text(section(tmp_path, download=True))
    with pytest.raises(UserError, match="replace it with a whole copy"):
        load_csv_text(section(tmp_path, name="csv_text", download=True))


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match=r"train.csv not found in .* Fetch https://raw.*/ag_news_csv/train.csv and put"):
        load_csv_text(section(tmp_path))
    with pytest.raises(UserError, match=rf"mine.csv not found in .* Put it in {tmp_path}\.$"):
        load_csv_text(section(tmp_path, train_file="mine.csv", download=True))
    with pytest.raises(UserError, match=rf"train.csv not found in .*/csv_text\). Put it in {tmp_path}\.$"):
        load_csv_text(section(tmp_path, name="csv_text", download=True))


def test_download(tmp_path, monkeypatch):
    write_csv_text(tmp_path / "origin")
    with serve() as server:
        for name in ("train.csv", "test.csv"):
            content = (tmp_path / "origin" / name).read_bytes()
            server.files[f"ag/{name}"] = content
            monkeypatch.setitem(csv_text.AG_NEWS_CHECKSUMS, name, "md5:" + hashlib.md5(content).hexdigest())
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(csv_text, "AG_NEWS_URL", server.url("ag/"))
        data = load_csv_text(section(tmp_path / "data", download=True))
    assert (len(data.train), len(data.val)) == (200, 50)
    assert sorted(path.name for path in (tmp_path / "data" / "agnews").iterdir()) == ["test.csv", "train.csv"]


def test_the_generated_rows_are_learnable():
    rows = csv_text_rows(8)
    assert [row[0] for row in rows] == ["1", "2", "3", "4"] * 2


@pytest.mark.skipif(not (SHARED / "ag_news").is_dir(), reason="no AG News in ../shared/data")
def test_the_real_file():
    data = load_csv_text(
        section(SHARED, download=True, train_file="test.csv", val_file=None, train_samples=6600, val_samples=1000)
    )
    assert (len(data.train), len(data.val)) == (6600, 1000)
    assert data.spec.num_classes == 4 and 15_000 < data.spec.vocab_size < 30_000
    labels = torch.cat([data.train.tensors[1], data.val.tensors[1]])
    assert torch.bincount(labels).tolist() == [1900] * 4
    tokens = data.train.tensors[0]
    assert float((tokens == 1).sum() / (tokens > 0).sum()) == 0  # every training word fits in the vocabulary
