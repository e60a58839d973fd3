"""Language modelling over the characters of one text file."""

import numpy as np

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.data.dataset import Datasets
from shoal.data.download import PublicFile, find_or_fetch, search_folders
from shoal.data.files import read_utf8
from shoal.data.section import CharText
from shoal.data.windows import WindowDataset

SHAKESPEARE = PublicFile(
    name="input.txt",
    checksum="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)
SHAKESPEARE_FOLDER = "tinyshakespeare"
NUM_CODE_POINTS = 0x110000


def load_text(section: CharText) -> Datasets:
    """Training windows over the first part of the file, validation windows over the last `val_fraction` of it.

    The validation windows do not overlap, and each character of the last part is predicted exactly once: the first one
    from the character before it, and the last window is filled up with targets that do not count (`IGNORE`).
    """
    known = section.name == "shakespeare"
    public = SHAKESPEARE if known and section.file == SHAKESPEARE.name else None
    folders = search_folders(section.dir, section.name, *([SHAKESPEARE_FOLDER] if known else []))
    path = find_or_fetch(folders, (section.file, f"{section.file}.gz"), public, section.download)
    vocabulary, ids = encode_characters(read_utf8(path, can_download=public is not None and section.download))
    num_val = max(1, round(len(ids) * section.val_fraction))
    num_train = len(ids) - num_val
    if num_train <= section.context:
        raise UserError(
            f"data.context: {section.context} characters do not fit in the {num_train:,} that {path} has for training "
            f"(one more than the context is needed); take a smaller context or a longer file"
        )
    return Datasets(
        train=WindowDataset(ids[:num_train], section.context, section.stride or section.context, keep_last=False),
        val=WindowDataset(ids[num_train - 1 :], section.context, section.context, keep_last=True),
        spec=DataSpec(vocab_size=len(vocabulary), context=section.context),
    )


def encode_characters(text: str) -> tuple[str, np.ndarray]:
    """The distinct characters in order of their code points, and the text as positions in that string."""
    codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
    present = np.zeros(NUM_CODE_POINTS, dtype=bool)
    present[codes] = True
    vocabulary = np.flatnonzero(present)
    # A table by code point: no sorting of the text, and a byte per character where that is enough.
    table = np.zeros(NUM_CODE_POINTS, dtype=np.uint8 if len(vocabulary) <= 256 else np.int32)
    table[vocabulary] = np.arange(len(vocabulary))
    return "".join(map(chr, vocabulary)), table[codes]
