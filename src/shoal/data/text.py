"""Language modelling over one text file."""

from collections.abc import Sequence
from pathlib import Path

from shoal.core.errors import NoDataError, UserError
from shoal.core.spec import DataSpec
from shoal.data.dataset import Datasets
from shoal.data.download import PublicFile, find_file, find_or_fetch, not_found, search_folders
from shoal.data.files import read_utf8
from shoal.data.section import CharText
from shoal.data.tokenizer import Tokenizer, make_tokenizer
from shoal.data.windows import WindowDataset

SHAKESPEARE = PublicFile(
    name="input.txt",
    checksum="sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    urls=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)
SHAKESPEARE_FOLDER = "tinyshakespeare"


def load_text(section: CharText) -> Datasets:
    """Training windows over the first part of the file, validation windows over the last `val_fraction` of it.

    The validation windows do not overlap, and each token of the last part is predicted exactly once: the first one
    from the token before it, and the last window is filled up with targets that do not count (`IGNORE`).
    """
    known = section.name == "shakespeare"
    public = SHAKESPEARE if known and section.file == SHAKESPEARE.name else None
    folders = search_folders(section.dir, section.name, *([SHAKESPEARE_FOLDER] if known else []))
    path = find_or_fetch(folders, (section.file, f"{section.file}.gz"), public, section.download)
    text = read_utf8(path, can_download=public is not None and section.download)
    tokenizer = _tokenizer(section.tokenizer, text, folders)
    (ids,) = tokenizer.encode([text])
    num_val = max(1, round(len(ids) * section.val_fraction))
    num_train = len(ids) - num_val
    if num_train <= section.context:
        unit = "characters" if section.tokenizer == "chars" else "tokens"
        raise UserError(
            f"data.context: {section.context} {unit} do not fit in the {num_train:,} that {path} has for training "
            f"(one more than the context is needed); take a smaller context or a longer file"
        )
    return Datasets(
        train=WindowDataset(ids[:num_train], section.context, section.stride or section.context, keep_last=False),
        val=WindowDataset(ids[num_train - 1 :], section.context, section.context, keep_last=True),
        spec=DataSpec(vocab_size=tokenizer.vocab_size, context=section.context),
    )


def _tokenizer(name: str, text: str, folders: Sequence[Path]) -> Tokenizer:
    if name not in ("chars", "bytes"):
        found = find_file(folders, [name])
        if found is None:
            raise NoDataError(f"data.tokenizer: {str(not_found(name, folders)).removeprefix('data.dir: ')}")
        name = str(found)
    return make_tokenizer(name, [text], separated=False, field="data.tokenizer")
