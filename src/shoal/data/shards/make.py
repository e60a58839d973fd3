"""From files as people have them to shards: what is asked for is checked, all of it, before anything is written."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import UserError
from shoal.core.storage import write_atomically
from shoal.data.packing import cut_row
from shoal.data.shards.csv_rows import open_csv
from shoal.data.shards.folder import failures_told, open_folder
from shoal.data.shards.images import Images, list_classes, open_images
from shoal.data.shards.index import Shard, ShardIndex
from shoal.data.shards.labels import Labels, common_classes
from shoal.data.shards.parquet_rows import ParquetRows
from shoal.data.shards.records import Piece, Rows, open_json, shuffled
from shoal.data.shards.source import Source, find_parts
from shoal.data.shards.texts import TextFiles, encode_pieces, open_texts, split_tail
from shoal.data.shards.write import (
    TOKENIZER,
    ShardWriter,
    write_jsonl,
    write_parquet,
    write_tar,
    write_tokens,
    writing,
)
from shoal.data.tokenizer import Tokenizer, load_tokenizer, make_tokenizer, train_bpe

Content = Images | TextFiles | Rows
_MOST_COLUMNS = 1000
"""More are not listed in the index; JSON lines may have others in every row."""


@dataclass(frozen=True)
class Request:
    """What `shoal data shard` was asked for."""

    source: Path
    target: str
    shard_bytes: int
    format: str | None = None
    """jsonl or parquet; otherwise what the source is."""
    seed: int | None = 0
    """Rows are shuffled by it; None keeps their order."""
    resize: int | None = None
    tokenizer: str | None = None
    column: str | None = None
    """Where the text is in rows; `text` if not given."""
    label: str | None = None
    """Where the class is in rows; `label`, where rows have that, if not given."""
    columns: tuple[str, ...] | None = None
    """Of CSV files without a header."""
    end_of_text: str | None = None
    """What ends a document, of a tokenizer's file."""
    val_fraction: float | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Part:
    """Rows that go into one folder of shards."""

    content: Content
    order: np.ndarray


@dataclass(frozen=True)
class Opened:
    """All that is written, read once and found good."""

    parts: dict[str, Part]
    about: dict[str, Any]
    """For the index: classes, and of rows, the column that they are the values of."""
    remark: str | None
    """What the user might not expect of it."""


def make_shards(
    request: Request, tell: Callable[[Shard], None], remark: Callable[[str], None] = lambda line: None
) -> dict[str, ShardIndex]:
    """Write the shards of each part: "", or `train` and `val`.

    Args:
        request: What, and where to.
        tell: Hears of each file.
        remark: Hears what the user might not expect.
    """
    sources = find_parts(request.source)
    kind = next(iter(sources.values())).kind
    format_ = choose_format(request, kind)
    _check_apart(request)
    opened = _open_parts(request, sources, kind, format_)
    fill = _filler(request, opened, kind, format_)
    target = open_folder(request.target, "DST")
    for line in (_left_out(sources.values()), opened.remark):
        if line is not None:
            remark(line)
    with failures_told("DST"), writing(target, opened.parts, format_, request.overwrite, tell) as writers:
        for name, part in opened.parts.items():
            fill(writers[name], part)
    return {name: writer.index() for name, writer in writers.items()}


def _left_out(sources: Iterable[Source]) -> str | None:
    others = [file for source in sources for file in source.others]
    if not others:
        return None
    names = [str(file) if str(file).isprintable() else ascii(str(file)) for file in others[:3]]
    named = ", ".join(names) + (", ..." if len(others) > 3 else "")
    return f"left out: {named} ({len(others):,} in all)"


def choose_format(request: Request, kind: str) -> str:
    """What is written: tar for images, tokens with a tokenizer, else jsonl or parquet."""
    allowed: tuple[str, ...]
    if kind == "images":
        format_, allowed = "tar", ("tar",)
    elif request.tokenizer is not None:
        format_, allowed = "tokens", ("tokens",)
    elif kind == "text" or request.format == "tokens":
        raise UserError("--tokenizer: needed to make tokens of text; give chars, bytes or the JSON file of a tokenizer")
    else:
        format_, allowed = ("parquet" if kind == "parquet" else "jsonl"), ("jsonl", "parquet")
    if request.format is not None and request.format not in allowed:
        raise UserError(f"--format: {request.format} cannot be made of {kind}; allowed: {', '.join(allowed)}")
    is_tokens = format_ == "tokens"
    text, classes = "the text of rows", "the class of rows"
    wrong = {
        "--tokenizer": (request.tokenizer, kind != "images", "text"),
        "--resize": (request.resize, kind == "images", "images"),
        "--column": (request.column, is_tokens and kind != "text", text if is_tokens else f"{text}, with --tokenizer"),
        "--label": (
            request.label,
            kind != "images" and not is_tokens,
            f"{classes}, without --tokenizer" if is_tokens else classes,
        ),
        "--columns": (request.columns, kind == "csv", "CSV files"),
    }
    for option, (given, fits, what) in wrong.items():
        if given is not None and not fits:
            raise UserError(f"{option}: is for {what}, and {request.source} holds {kind}; leave it out")
    return request.format or format_


def _check_apart(request: Request) -> None:
    """Shards among the files that they are made of would be read as such the next time."""
    if "://" in request.target:
        return
    target, source = Path(request.target).expanduser().resolve(), request.source.resolve()
    if target == source or source in target.parents:
        raise UserError(f"DST: {request.target} is in {request.source}, which is read; give a folder outside it")


def _open_parts(request: Request, sources: dict[str, Source], kind: str, format_: str) -> Opened:
    labels = {name: Labels(request.label) for name in sources}
    folders = list_classes(next(iter(sources.values())).root) if kind == "images" else []
    contents = {name: _open(request, source, format_, folders, labels[name]) for name, source in sources.items()}
    for name, content in contents.items():
        if content.num_rows == 0:
            raise UserError(f"SRC: {sources[name].root} holds no rows; there is nothing to write")
    if kind == "images":
        return Opened(_split(request, contents), {"classes": folders}, None)
    classes, remark = common_classes(labels)
    about = {"label": next(iter(labels.values())).column, "classes": classes} if classes else {}
    return Opened(_split(request, contents), about, remark)


def _split(request: Request, contents: dict[str, Content]) -> dict[str, Part]:
    """The rows of each part in the order that they are written in."""
    if request.val_fraction is None:
        return {name: Part(content, content.order(request.seed)) for name, content in contents.items()}
    if "val" in contents:
        raise UserError(f"--val-fraction: {request.source} has a folder val already; leave this out")
    (content,) = contents.values()
    if isinstance(content, TextFiles) and content.num_rows == 1:
        head, tail = split_tail(content.documents[0], request.val_fraction)
        return {"train": Part(head, np.arange(1)), "val": Part(tail, np.arange(1))}
    train, val = split_rows(content, request.val_fraction, request.seed)
    return {"train": Part(content, train), "val": Part(content, val)}


def _open(request: Request, source: Source, format_: str, folders: list[str], labels: Labels | None) -> Content:
    column = None
    if format_ == "tokens":
        column, labels = request.column or "text", None
    match source.kind:
        case "images":
            return open_images(source.root, folders, request.resize)
        case "text":
            return open_texts(source.files)
        case "jsonl":
            return open_json(source.files, column, labels, with_schema=format_ == "parquet")
        case "csv":
            return open_csv(source.files, column, labels, request.columns, with_schema=format_ == "parquet")
        case _:
            return ParquetRows(source.files, column, labels)


def split_rows(content: Content, fraction: float, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The orders of training and of validation: rows drawn by the seed, or without one the last."""
    num_val = max(1, round(content.num_rows * fraction))
    if num_val >= content.num_rows:
        raise UserError(f"--val-fraction: {fraction:g} of {content.num_rows} rows leaves none to train on")
    order = content.order(seed)
    is_val = np.zeros(content.num_rows, dtype=bool)
    # Drawn apart from the order, which for Parquet is not random all through.
    is_val[shuffled(content.num_rows, seed)[-num_val:]] = True
    return order[~is_val[order]], order[is_val[order]]


def _filler(request: Request, opened: Opened, kind: str, format_: str) -> Callable[[ShardWriter, Part], None]:
    """What writes a part."""
    if format_ == "tokens":
        return _token_filler(request, opened.parts, separated=kind != "text" or _num_texts(opened.parts) > 1)

    def fill(writer: ShardWriter, part: Part) -> None:
        content: Any = part.content
        has_columns = format_ != "tar" and len(content.names) <= _MOST_COLUMNS
        writer.about = ({"columns": list(content.names)} if has_columns else {}) | opened.about
        match format_:
            case "tar":
                write_tar(writer, content.samples(part.order), request.shard_bytes)
            case "jsonl":
                write_jsonl(writer, content.lines(part.order), request.shard_bytes)
            case _:
                write_parquet(writer, content.tables(part.order), request.shard_bytes)

    return fill


def _num_texts(parts: dict[str, Part]) -> int:
    """Documents of a part; the head and the tail of one file are not separate documents."""
    return max(len(part.order) for part in parts.values())


def _token_filler(request: Request, parts: dict[str, Part], separated: bool) -> Callable[[ShardWriter, Part], None]:
    assert request.tokenizer is not None
    everything = chain.from_iterable(_pieces(part) for part in parts.values())
    tokenizer = make_tokenizer(
        request.tokenizer, (text for text, _ in everything), separated=separated, end_of_text=request.end_of_text
    )
    dtype = smallest_dtype(tokenizer)
    end_of_text = tokenizer.end_of_text if separated else None
    about = {
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.name,
        "end_of_text": end_of_text,
    }

    def fill(writer: ShardWriter, part: Part) -> None:
        writer.about = about
        writer.beside = {TOKENIZER: tokenizer.to_json()}
        ids = encode_pieces(_pieces(part), tokenizer, end_of_text, dtype)
        write_tokens(writer, cut_row(ids, max(1, request.shard_bytes // np.dtype(dtype).itemsize)))

    return fill


def _pieces(part: Part) -> Iterator[Piece]:
    content: Any = part.content
    texts: Iterator[Piece] = content.texts(part.order)
    return texts


def smallest_dtype(tokenizer: Tokenizer) -> str:
    """uint16 while all ids fit."""
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def train_tokenizer(
    source: Path, target: Path, vocab_size: int, column: str | None, columns: tuple[str, ...] | None
) -> int:
    """Train a byte-level BPE on all text of `source` and write it to `target`; returns its number of ids."""
    sources = find_parts(source)
    part = sources.get("train") or next(iter(sources.values()))  # what is validated on is not learned from
    if part.kind == "images":
        raise UserError(f"SRC: {part.root} holds images; give .txt, .jsonl, .csv or .parquet files")
    request = Request(source, str(target), 1, tokenizer=str(target), column=column, columns=columns)
    choose_format(request, part.kind)
    content = _open(request, part, "tokens", [], None)
    if content.num_rows == 0:
        raise UserError(f"SRC: {part.root} holds no text")
    pieces = _pieces(Part(content, content.order(None)))
    trained = train_bpe((text for text, _ in pieces), vocab_size)
    with failures_told("-o"):
        write_atomically(target, trained)
    return load_tokenizer(target, "-o").vocab_size
