"""Files: written so that a crash leaves the old one or the new one, never half of one; and where they are."""

import errno
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""What may be over in a while: a full disk, a quota, a disk or server that fails."""


_CHECKPOINT = re.compile(r"step-\d{8,}", re.ASCII)


def expand_home(path: str | Path) -> Path:
    """`~` and `~NAME` as home folders; the name of nobody stays as it is, and is then found or not."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is that of a checkpoint, whole or not: it holds a recipe, as a run's folder does."""
    return bool(_CHECKPOINT.fullmatch(path.name)) and path.is_dir() and not (path / "checkpoints").is_dir()


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` in one step: a reader sees the old content or the new one, also after a power cut."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make renames inside `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json_line(record: dict[str, Any]) -> str:
    """One line of strict JSON: a value that JSON cannot hold (nan, inf) becomes null."""
    try:
        return json.dumps(record, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file; a last line that a crash cut short is left out."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                yield record
