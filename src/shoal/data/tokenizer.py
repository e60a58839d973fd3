"""From text to token ids and back to a file: characters, bytes, or byte-level BPE."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.core.storage import expand_home

END_OF_TEXT = "<|endoftext|>"
"""The token of a BPE that ends a document."""
NUM_BYTES = 256
SMALLEST_BPE = NUM_BYTES + 1
"""Every byte, and the end of a text."""
NUM_CODE_POINTS = 0x110000
_KEY = "shoal"


class Tokenizer(Protocol):
    """What turns texts into ids."""

    @property
    def name(self) -> str:
        """`chars`, `bytes` or `bpe`."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def end_of_text(self) -> int | None:
        """The id that ends a document; none where documents are not separated."""

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without any end of text."""

    def to_json(self) -> str:
        """What `load_tokenizer` reads."""


@dataclass(frozen=True)
class Characters:
    """One id for each character, in order of their code points; where documents are separated, one more."""

    vocabulary: str
    separated: bool = False

    @property
    def name(self) -> str:
        """`chars`"""
        return "chars"

    @property
    def vocab_size(self) -> int:
        """The characters, and the end of text where documents are separated."""
        return len(self.vocabulary) + self.separated

    @property
    def end_of_text(self) -> int | None:
        """The id after the last character."""
        return len(self.vocabulary) if self.separated else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Positions in the vocabulary, a byte each where that is enough."""
        return [self._encode(_code_points(text)) for text in texts]

    def to_json(self) -> str:
        """The vocabulary as one string."""
        return json.dumps({_KEY: self.name, "vocabulary": self.vocabulary, "separated": self.separated}) + "\n"

    def _encode(self, codes: np.ndarray) -> np.ndarray:
        known, table = self._tables
        if not (found := known[codes]).all():
            character = chr(codes[int(np.argmin(found))])
            raise UserError(
                f"--tokenizer: {character!r} is none of its {len(self.vocabulary)} characters; "
                "take --tokenizer chars, which finds them, or bytes"
            )
        return np.asarray(table[codes])

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray]:
        """By code point: whether it has an id, and which. No sorting of the text, and no look-up by hash."""
        codes = _code_points(self.vocabulary)
        known = np.zeros(NUM_CODE_POINTS, dtype=bool)
        known[codes] = True
        table = np.zeros(NUM_CODE_POINTS, dtype=np.uint8 if self.vocab_size <= NUM_BYTES else np.int32)
        table[codes] = np.arange(len(codes))
        return known, table


@dataclass(frozen=True)
class Bytes:
    """One id for each byte of UTF-8; where documents are separated, 256 ends one."""

    separated: bool = False

    @property
    def name(self) -> str:
        """`bytes`"""
        return "bytes"

    @property
    def vocab_size(self) -> int:
        """256, or 257."""
        return NUM_BYTES + self.separated

    @property
    def end_of_text(self) -> int | None:
        """256, or none."""
        return NUM_BYTES if self.separated else None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def to_json(self) -> str:
        """Only that it is bytes."""
        return json.dumps({_KEY: self.name, "separated": self.separated}) + "\n"


class Bpe:
    """A tokenizer of the `tokenizers` library. What is in a text is text, also where it spells a special token."""

    def __init__(self, content: str, where: str, end_of_text: str = END_OF_TEXT) -> None:
        library = require("tokenizers", where, "text")
        try:
            self._tokenizer = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises bare Exceptions
            raise UserError(
                f"{where}: is not a tokenizer that the tokenizers library reads ({error}); "
                "train one: shoal data tokenizer"
            ) from error
        # The file is for inference too, and may say to cut or to fill up texts; here all of a text counts.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        self._content = content
        self._end_of_text: int | None = self._tokenizer.token_to_id(end_of_text)

    @property
    def name(self) -> str:
        """`bpe`"""
        return "bpe"

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id; there may be holes."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def end_of_text(self) -> int | None:
        """The id of the token that ends a document, if there is such a token."""
        return self._end_of_text

    @property
    def special_tokens(self) -> list[str]:
        """Those that are not made of text, by their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return [token.content for _, token in sorted(added.items()) if token.special]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """All texts at once, on all cores."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in found]

    def to_json(self) -> str:
        """The content of its file, as it was."""
        return self._content

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text


def find_characters(texts: Iterable[str]) -> str:
    """The distinct characters of all texts in order of their code points."""
    present = np.zeros(NUM_CODE_POINTS, dtype=bool)
    for text in texts:
        present[_code_points(text)] = True
    return "".join(map(chr, np.flatnonzero(present)))


def encode_characters(text: str) -> tuple[str, np.ndarray]:
    """The distinct characters in order of their code points, and the text as positions in that string."""
    vocabulary = find_characters([text])
    return vocabulary, Characters(vocabulary).encode([text])[0]


def make_tokenizer(
    name: str,
    texts: Iterable[str],
    *,
    separated: bool,
    field: str = "--tokenizer",
    end_of_text: str | None = None,
) -> Tokenizer:
    """The tokenizer that a user names: `chars` (whose vocabulary `texts` give), `bytes`, or a file.

    Args:
        name: As given.
        texts: All that will be encoded; only `chars` reads them.
        separated: Whether documents are to be told apart.
        field: Option or field of the recipe, for messages.
        end_of_text: The token of a file's tokenizer that ends a document, if a user named one.
    """
    if name == "chars":
        return Characters(find_characters(texts), separated)
    if name == "bytes":
        return Bytes(separated)
    tokenizer = load_tokenizer(expand_home(name), field, end_of_text or END_OF_TEXT)
    if end_of_text is not None:
        _check_end_of_text(tokenizer, name, end_of_text)
    if separated and tokenizer.end_of_text is None:
        remedy = "name the one that it has: --end-of-text" if isinstance(tokenizer, Bpe) else f"take {tokenizer.name}"
        raise UserError(f"{field}: {name} has no {END_OF_TEXT} to end documents with; {remedy}")
    return tokenizer


def _check_end_of_text(tokenizer: Tokenizer, name: str, token: str) -> None:
    if not isinstance(tokenizer, Bpe):
        raise UserError(f"--end-of-text: {name} is of {tokenizer.name}, which has no such token; leave it out")
    if tokenizer.end_of_text is None:
        special = ", ".join(tokenizer.special_tokens[:10]) or "none"
        raise UserError(f"--end-of-text: {name} has no token {token!r}; its special tokens: {special}")


def load_tokenizer(path: Path, field: str = "--tokenizer", end_of_text: str = END_OF_TEXT) -> Tokenizer:
    """The tokenizer of a JSON file: one of `to_json`, or any of the `tokenizers` library."""
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise UserError(f"{field}: {path}: {why}; give chars, bytes or the JSON file of a tokenizer") from error
    try:
        tree: Any = json.loads(content)
    except ValueError as error:
        raise UserError(f"{field}: {path}: is not JSON ({error}); train one: shoal data tokenizer") from error
    kind = tree.get(_KEY) if isinstance(tree, dict) else None
    if kind == "bytes":
        return Bytes(bool(tree.get("separated")))
    if kind == "chars":
        vocabulary = tree.get("vocabulary")
        if not isinstance(vocabulary, str) or list(vocabulary) != sorted(set(vocabulary)):
            raise UserError(f"{field}: {path}: its vocabulary is not characters in order, each once; make it again")
        return Characters(vocabulary, bool(tree.get("separated")))
    return Bpe(content, f"{field}: {path}", end_of_text)


def train_bpe(texts: Iterator[str], vocab_size: int, field: str = "--vocab-size") -> str:
    """The JSON of a byte-level BPE trained on `texts`; the same texts give the same tokenizer.

    Every byte has an id, so that any text can be encoded; `END_OF_TEXT` has id 0.
    """
    if vocab_size < SMALLEST_BPE:
        raise UserError(f"{field}: {vocab_size} is too few; every byte and the end of a text take {SMALLEST_BPE}")
    library = require("tokenizers", "shoal data tokenizer", "text")
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    content: str = tokenizer.to_str(pretty=True)
    return content + "\n"


def _code_points(text: str) -> np.ndarray:
    # JSON can hold halves of surrogate pairs, which no encoding would take otherwise.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
