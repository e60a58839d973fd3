"""Shards looked at byte by byte: whether they are what their index says, and an index where there is none."""

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shoal.core.errors import UserError
from shoal.data.shards.folder import MARKER, Folder, RemoteFolder, failures_told, open_folder
from shoal.data.shards.index import INDEX, Shard, ShardIndex, parse_index
from shoal.data.shards.opened import OPEN, RowError
from shoal.data.shards.write import SUFFIXES

_CHUNK = 1 << 20
_BLOCK = tarfile.BLOCKSIZE
_ZEROS = b"\0"
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """What is wrong with a file."""

    file: str
    problem: str


@dataclass(frozen=True)
class Verified:
    """One folder of shards, read whole."""

    folder: str
    shards: int
    rows: int
    num_bytes: int
    problems: tuple[Problem, ...]

    def to_record(self) -> dict[str, Any]:
        """For JSON."""
        facts = {"folder": self.folder, "shards": self.shards, "rows": self.rows, "bytes": self.num_bytes}
        return {**facts, "problems": [asdict(problem) for problem in self.problems]}


def verify(address: str, tell: Tell) -> list[Verified]:
    """Read every byte of the shards in a folder, or in its `train` and `val`; `tell` hears of each file."""
    with failures_told("DIR"):
        found = dict(_parts(address, lambda names: INDEX in names, INDEX))
        if "" not in found:  # a part whose writer was killed has no index, and is no less a part
            found |= {part: folder for part, folder in _unwritten(address) if part not in found}
        return [_verify(found[name], name, tell) for name in sorted(found)]


def _unwritten(address: str) -> Iterator[tuple[str, Folder]]:
    root = open_folder(address, "DIR")
    for part in sorted(root.names() & {"train", "val"}):
        names = root.at(part).names()
        if MARKER in names or _has_shards(names):
            yield part, root.at(part)


def make_indexes(
    address: str, tell: Tell, *, dtype: str | None = None, vocab_size: int | None = None, overwrite: bool = False
) -> dict[str, ShardIndex]:
    """Write an index for the shards in a folder, or in its `train` and `val`; all are made before one is written."""
    kinds = ", ".join(f"*{suffix}" for suffix in SUFFIXES.values())
    with failures_told("DIR"):
        found = list(_parts(address, _has_shards, kinds))
        indexes = {}
        for name, folder in found:
            if not overwrite and INDEX in folder.names():
                raise UserError(f"DIR: {folder.address} already has an {INDEX}; --overwrite makes it again")
            indexes[name] = _make_index(folder, tell, dtype, vocab_size)
        for name, folder in found:
            folder.write(INDEX, indexes[name].to_json())
    return indexes


def _parts(address: str, has: Callable[[set[str]], bool], what: str) -> Iterator[tuple[str, Folder]]:
    """The folder itself if it has what is looked for, else its `train` and `val`."""
    root = open_folder(address, "DIR")
    names = root.names()
    if not names:
        raise UserError(f"DIR: {root.address} is not there, or nothing is in it; give a folder of shards")
    if has(names):
        yield "", root
        return
    parts = [(part, root.at(part)) for part in ("train", "val") if part in names]
    parts = [(part, folder) for part, folder in parts if has(folder.names())]
    if not parts:
        remedy = "; shoal data index DIR makes one" if what == INDEX else ""
        raise UserError(f"DIR: no {what} in {root.address}, nor in train or val below it{remedy}")
    yield from parts


def _verify(folder: Folder, part: str, tell: Tell) -> Verified:
    content = folder.read(INDEX)
    if content is None:
        missing = Problem(f"{part}/{INDEX}", "is not there: the shards were not written to their end; make them again")
        return Verified(folder.address, 0, 0, 0, (missing,))
    index = parse_index(content, f"{folder.address}/{INDEX}")
    there = folder.names() if isinstance(folder, RemoteFolder) else None
    problems = []
    for shard in index.shards:
        # Asking a store for what is not there takes long: it is asked again and again.
        gone = there is not None and "/" not in shard.file and shard.file not in there
        problem = "is not there" if gone else _problem(folder, shard, index)
        if problem is not None:
            problems.append(Problem(f"{part}/{shard.file}".removeprefix("/"), problem))
        tell(f"{shard.file}: {problem or 'whole'}")
    return Verified(folder.address, len(index.shards), index.num_rows, index.num_bytes, tuple(problems))


def _problem(folder: Folder, shard: Shard, index: ShardIndex) -> str | None:
    """What is wrong with a shard, in words."""
    with folder.here(shard.file) as path:
        try:
            size = path.stat().st_size
            if size != shard.bytes:
                return f"has {size:,} bytes instead of {shard.bytes:,}"
            if shard.xxh3_128 is not None and hash_file(path) != shard.xxh3_128:
                return "its bytes are not those that were written: the checksum differs"
            rows = count_rows(path, index.format, index.about.get("dtype"))
        except FileNotFoundError:
            return "is not there"
        except (RowError, OSError) as error:
            return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return f"has {rows:,} rows instead of {shard.rows:,}" if rows != shard.rows else None


def hash_file(path: Path) -> str:
    """The xxh3_128 of all bytes, in hex."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def count_rows(path: Path, format_: str, dtype: str | None) -> int:
    """The rows that a reader will find; RowError where the file is damaged."""
    if format_ == "tokens":
        size, item_bytes = path.stat().st_size, np.dtype(dtype or "uint16").itemsize
        if size % item_bytes:
            raise RowError(f"{size:,} bytes is not a whole number of {dtype} tokens")
        return size // item_bytes
    if format_ == "tar":
        check_tar(path)
    shard = OPEN[format_](path)
    try:
        return len(shard)
    finally:
        shard.close()


def check_tar(path: Path) -> list[str]:
    """That a tar is whole to its end mark; returns what its `.cls` members say."""
    classes: list[str] = []
    try:
        with tarfile.open(path, "r:") as tar:
            end = 0
            for member in tar:
                end = member.offset_data + (-(-member.size // _BLOCK) * _BLOCK if member.isreg() else 0)
                if member.name.lower().endswith(".cls") and (content := tar.extractfile(member)) is not None:
                    classes.append(content.read().decode("utf-8", "replace").strip())
    except tarfile.TarError as error:
        raise RowError(f"is not a whole tar ({error})") from error
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read(2 * _BLOCK)
        if len(rest) < 2 * _BLOCK or rest.strip(_ZEROS):
            raise RowError(f"is not a whole tar: after byte {end:,} comes neither a member nor the end mark")
    return classes


def _has_shards(names: set[str]) -> bool:
    return any(_format_of(name) for name in names)


def _format_of(name: str) -> str | None:
    return next((form for form, end in SUFFIXES.items() if name.endswith(end) and not name.startswith(".")), None)


def _make_index(folder: Folder, tell: Tell, dtype: str | None, vocab_size: int | None) -> ShardIndex:
    files = {name: form for name in sorted(folder.names()) if (form := _format_of(name)) is not None}
    formats = sorted(set(files.values()))
    if len(formats) > 1:
        raise UserError(f"DIR: {folder.address} holds {' and '.join(formats)} files; an index is of one format")
    (format_,) = formats
    is_tokens = format_ == "tokens"
    for option, value in (("--dtype", dtype), ("--vocab-size", vocab_size)):
        if is_tokens and value is None:
            raise UserError(f"{option}: needed for .bin files, which do not say it themselves")
        if not is_tokens and value is not None:
            raise UserError(f"{option}: is for .bin files, and {folder.address} holds {format_}; leave it out")
    shards: list[Shard] = []
    classes: set[str] | None = set()
    for name in files:
        with folder.here(name) as path:
            shard, found = _look(path, name, format_, dtype, vocab_size)
        shards.append(shard)
        # A sample without a class makes the classes of the others useless.
        classes = classes | set(found) if classes is not None and len(found) == shard.rows else None
        tell(f"{name}: {shard.rows:,} rows")
    about: dict[str, Any] = {"dtype": dtype, "vocab_size": vocab_size} if is_tokens else {}
    if format_ == "tar" and classes and all(name.isascii() and name.isdigit() for name in classes):
        about = {"classes": [str(number) for number in range(1 + max(map(int, classes)))]}
    return ShardIndex(format_, tuple(shards), about)


def _look(path: Path, name: str, format_: str, dtype: str | None, vocab_size: int | None) -> tuple[Shard, list[str]]:
    """What the index says of a file, and the classes that it names."""
    try:
        rows = count_rows(path, format_, dtype)
        classes = check_tar(path) if format_ == "tar" else []
    except RowError as error:
        raise UserError(f"DIR: {name}: {error}; replace the file or take it away") from error
    if rows == 0:
        raise UserError(f"DIR: {name}: holds no rows; take it away")
    if dtype is not None and vocab_size is not None and (largest := _largest_id(path, dtype)) >= vocab_size:
        raise UserError(
            f"--vocab-size: {name} holds the id {largest:,}, and ids must be below {vocab_size:,}; "
            "give a larger one, or another --dtype"
        )
    return Shard(name, rows, path.stat().st_size, hash_file(path)), classes


def _largest_id(path: Path, dtype: str) -> int:
    ids = np.memmap(path, dtype=np.dtype(dtype).newbyteorder("<"), mode="r")
    return max(int(ids[start : start + _CHUNK].max()) for start in range(0, len(ids), _CHUNK))
