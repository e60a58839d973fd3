"""Text classification from CSV rows `class,text[,text...]`, such as AG News."""

import csv
import io
import re
from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.data.dataset import Datasets, MemoryDataset
from shoal.data.download import PublicFile, find_or_fetch, search_folders
from shoal.data.files import broken_file, read_utf8
from shoal.data.section import CsvText

AG_NEWS_URL = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
AG_NEWS_CHECKSUMS = {
    "train.csv": "md5:b1a00f826fdfbd249f79597b59e1dc12",
    "test.csv": "md5:d52ea96a97a2d943681189a97654912d",
}
AG_NEWS_FOLDER = "ag_news"
AG_NEWS_CLASSES = ["1", "2", "3", "4"]
AG_NEWS_COLUMNS = 3

PADDING = 0
UNKNOWN = 1
NUM_RESERVED = 2

WORD = re.compile(r"\w+(?:'\w+)?")
"""A word; all else separates words, also the backslash that AG News writes for a line break."""


@dataclass(frozen=True)
class Rows:
    """The rows of a CSV file: class, all its text, and the line it starts on."""

    path: Path
    labels: list[str]
    texts: list[str]
    lines: list[int]


def load_csv_text(section: CsvText) -> Datasets:
    """Rows as int64 token ids, cut to `max_tokens`; a batch is as wide as its longest row, 0 is padding."""
    if (section.val_file is None) != (section.val_samples is not None):
        raise UserError(
            "data.val_samples: the rows to split off train_file for validation; needed with data.val_file: null, "
            "and only then"
        )
    rows = _read_part(section, section.train_file)
    train, held_out = draw_rows(len(rows.texts), section.train_samples, section.val_samples, section.split_seed)
    # Classes come from the whole file: a class that the drawn rows happen to miss is still one.
    classes = AG_NEWS_CLASSES if section.name == "agnews" else distinct_labels(rows.labels)
    val_rows, val = rows, held_out
    if section.val_file is not None:
        val_rows = _read_part(section, section.val_file)
        val = np.arange(len(val_rows.texts))
    train_words = [rows.texts[row] for row in train]
    val_words = [val_rows.texts[row] for row in val]
    tokens, num_ids = encode_words(train_words, val_words, section.vocab_size, section.max_tokens)
    labels = _encode_labels(rows, classes)[train]
    val_labels = _encode_labels(val_rows, classes)[val]
    return Datasets(
        train=MemoryDataset(tokens[: len(train)], labels, transform=trim_padding, trims=True),
        val=MemoryDataset(tokens[len(train) :], val_labels, transform=trim_padding, trims=True),
        spec=DataSpec(num_classes=len(classes), vocab_size=num_ids),
    )


def read_rows(path: Path, num_columns: int | None = None, can_download: bool = False) -> Rows:
    """The rows of a CSV file without a header; all have `num_columns`, or as many columns as the first one."""
    rows = Rows(path, [], [], [])
    reader = csv.reader(io.StringIO(read_utf8(path, can_download), newline=""), strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                num_columns = num_columns or max(2, len(row))
                if len(row) != num_columns:
                    problem = f"line {line} has {len(row)} columns, not {num_columns} (class,text[,text...])"
                    raise broken_file(path, problem, can_download)
                rows.labels.append(row[0].strip())
                rows.texts.append(" ".join(row[1:]))
                rows.lines.append(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise broken_file(path, f"line {line} is not CSV ({error})", can_download) from error
    if not rows.texts:
        raise broken_file(path, "has no rows", can_download)
    return rows


def draw_rows(
    num_rows: int, train_samples: int | None, val_samples: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to validate on, disjoint, each in the order of the file.

    The validation rows do not depend on `train_samples`, so that runs on more or less data are compared on the same.
    """
    num_val = val_samples or 0
    num_train = train_samples if train_samples is not None else num_rows - num_val
    if num_train < 1 or num_train + num_val > num_rows:
        wanted = f"{train_samples or 'all other'} rows to train on and {num_val:,} to validate on"
        raise UserError(f"data.train_samples: {wanted} are asked for and the file has {num_rows:,}")
    # RandomState's streams are frozen across NumPy versions, so the split is too.
    order = np.random.RandomState(seed & 0xFFFFFFFF).permutation(num_rows)
    return np.sort(order[num_val : num_val + num_train]), np.sort(order[:num_val])


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """Every label once, sorted; as numbers where all of them are whole numbers, so that 10 comes after 9."""
    distinct = sorted(set(labels))
    return sorted(distinct, key=int) if all(re.fullmatch(r"-?[0-9]+", label) for label in distinct) else distinct


def encode_words(
    train: Sequence[str], val: Sequence[str], vocab_size: int, max_tokens: int
) -> tuple[torch.Tensor, int]:
    """Ids `[len(train) + len(val), max_tokens]` of the lowercased words, and the number of ids in use.

    The most frequent words of `train` have ids 2, 3, ... (equally frequent ones by alphabet) as far as `vocab_size`
    reaches; 1 is any other word, and the only token of a text without words; 0 is padding.
    """
    # Words get numbers as they come, ranks follow when all are counted: the words themselves are kept once each.
    numbers: defaultdict[str, int] = defaultdict()
    numbers.default_factory = numbers.__len__
    flat, lengths, num_train_words = array("i"), [], 0
    for row, text in enumerate([*train, *val]):
        words = [numbers[word] for word in WORD.findall(text.lower())]
        flat.extend(words)
        lengths.append(len(words))
        if row < len(train):
            num_train_words = len(flat)
    stream = np.frombuffer(flat, dtype=np.intc) if flat else np.zeros(0, np.intc)
    counts = np.bincount(stream[:num_train_words], minlength=len(numbers))
    seen = [word for word, number in numbers.items() if counts[number]]
    kept = sorted(seen, key=lambda word: (-counts[numbers[word]], word))[: vocab_size - NUM_RESERVED]
    ids = np.full(len(numbers), UNKNOWN, dtype=np.int32)
    ids[[numbers[word] for word in kept]] = np.arange(NUM_RESERVED, NUM_RESERVED + len(kept))

    tokens = np.full((len(lengths), max_tokens), PADDING, dtype=np.int32)
    tokens[:, 0] = UNKNOWN
    rows = np.repeat(np.arange(len(lengths)), lengths)
    columns = np.arange(len(stream)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    inside = columns < max_tokens
    tokens[rows[inside], columns[inside]] = ids[stream[inside]]
    return torch.from_numpy(tokens), NUM_RESERVED + len(kept)


def trim_padding(batch: tuple[torch.Tensor, ...], indices: np.ndarray, epoch: int) -> tuple[torch.Tensor, ...]:
    """A batch without the columns that are padding in all of its rows, as int64."""
    tokens, labels = batch
    width = int((tokens != PADDING).any(dim=0).sum())
    return tokens[:, :width].to(torch.int64), labels


def _read_part(section: CsvText, name: str) -> Rows:
    agnews = section.name == "agnews"
    public = None
    if agnews and name in AG_NEWS_CHECKSUMS:
        public = PublicFile(name, AG_NEWS_CHECKSUMS[name], (AG_NEWS_URL + name,))
    folders = search_folders(section.dir, section.name, *([AG_NEWS_FOLDER] if agnews else []))
    path = find_or_fetch(folders, (name, f"{name}.gz"), public, section.download)
    return read_rows(path, AG_NEWS_COLUMNS if agnews else None, public is not None and section.download)


def _encode_labels(rows: Rows, classes: Sequence[str]) -> torch.Tensor:
    ids = {label: number for number, label in enumerate(classes)}
    for label, line in zip(rows.labels, rows.lines, strict=True):
        if label not in ids:
            known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
            raise UserError(
                f"data.dir: {rows.path}: line {line} has class {label!r}, which is none of {known}; "
                "correct it (a header line is not expected)"
            )
    return torch.tensor([ids[label] for label in rows.labels], dtype=torch.int64)
