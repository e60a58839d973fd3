"""Text files as documents, read piece by piece, and pieces of text as one row of token ids."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.core.errors import UserError
from shoal.data.shards.records import Piece, shuffled
from shoal.data.tokenizer import Tokenizer

PIECE_BYTES = 1 << 20
_BATCH_CHARACTERS = 16 << 20
_BATCH_TEXTS = 4096
_MOST_BYTES_OF_A_CHARACTER = 4


@dataclass(frozen=True)
class Document:
    """A text file, or a part of one."""

    path: Path
    start: int
    end: int


@dataclass(frozen=True)
class TextFiles:
    """Each file is a document."""

    documents: tuple[Document, ...]

    @property
    def num_rows(self) -> int:
        """The documents."""
        return len(self.documents)

    def order(self, seed: int | None) -> np.ndarray:
        """Documents are shuffled; what is in them is not."""
        return shuffled(self.num_rows, seed)

    def texts(self, order: np.ndarray) -> Iterator[Piece]:
        """The documents in pieces that fit in memory."""
        for number in order:
            yield from _pieces(self.documents[number])


def open_texts(files: Sequence[Path]) -> TextFiles:
    """A document for each file that is not empty."""
    found = [Document(path, 0, path.stat().st_size) for path in files]
    return TextFiles(tuple(document for document in found if document.end > 0))


def split_tail(document: Document, fraction: float) -> tuple[TextFiles, TextFiles]:
    """The first part of a text and its tail, cut where a line begins, or at least a character."""
    wanted = document.start + round((document.end - document.start) * (1 - fraction))
    with document.path.open("rb") as file:
        file.seek(wanted)
        following = file.read(PIECE_BYTES)
    cut = wanted + following.find(b"\n") + 1
    if not document.start < cut < document.end or b"\n" not in following:
        cut = wanted + next((n for n, byte in enumerate(following) if byte & 0xC0 != 0x80), 0)
    if not document.start < cut < document.end:
        raise UserError(f"--val-fraction: {document.path} is too short to split {fraction:g} off")
    head, tail = Document(document.path, document.start, cut), Document(document.path, cut, document.end)
    return TextFiles((head,)), TextFiles((tail,))


def _pieces(document: Document) -> Iterator[Piece]:
    """Cut after a line that is not blank and before one that does not begin blank, where there is such a place.

    A byte-level BPE never joins letters over such a place, so the pieces have the ids that the whole has.
    """
    rest = b""
    with document.path.open("rb") as file:
        file.seek(document.start)
        position = document.start
        while position < document.end:
            content = rest + file.read(min(PIECE_BYTES, document.end - position))
            position = min(position + PIECE_BYTES, document.end)
            if position == document.end:
                yield _decoded(content, document.path), True
                return
            cut = _place_to_cut(content)
            yield _decoded(content[:cut], document.path), False
            rest = content[cut:]


def _place_to_cut(content: bytes) -> int:
    end = len(content) - 1
    while (end := content.rfind(b"\n", 1, end)) > 0:
        if not content[end - 1 : end].isspace() and not content[end + 1 : end + 2].isspace():
            return end + 1
    # One endless line: wherever a character begins.
    for cut in range(len(content) - 1, len(content) - 1 - _MOST_BYTES_OF_A_CHARACTER, -1):
        if content[cut] & 0xC0 != 0x80:
            return cut
    return len(content)


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"SRC: {path}: is not UTF-8 (byte 0x{content[error.start]:02x}); "
            f"convert it, for example: iconv -f latin1 -t utf-8 {path.name}"
        ) from error


def encode_pieces(
    pieces: Iterable[Piece], tokenizer: Tokenizer, end_of_text: int | None, dtype: str
) -> Iterator[np.ndarray]:
    """The ids of all pieces in their order, and `end_of_text` after each document; many are encoded at once."""
    ending = np.zeros(0, dtype) if end_of_text is None else np.array([end_of_text], dtype)
    for batch in _batches(pieces):
        for ids, (_, ends) in zip(tokenizer.encode([text for text, _ in batch]), batch, strict=True):
            yield ids.astype(dtype)
            if ends:
                yield ending


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
