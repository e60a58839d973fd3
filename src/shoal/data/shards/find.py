"""Finding the shards that a recipe names, here or in an object store."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import NoDataError, UserError
from shoal.core.remote import Access, Remote, RemoteError
from shoal.core.storage import expand_home
from shoal.data.download import search_folders
from shoal.data.shards.index import INDEX, Shard, ShardIndex, parse_index
from shoal.data.shards.labels import no_column
from shoal.data.shards.sharded import REMEDY
from shoal.data.shards.source import IMAGES
from shoal.data.shards.store import CachedStore, LocalStore, Store

if TYPE_CHECKING:
    from shoal.data.section import ImageFolder, TextShards, Tokens

_GB = 10**9
_MOST_LOOKED_AT = 20_000
"""Files that are looked at before a run; a file system over a network may take its time for each."""
_LOOSE = ("*.tar", "*.parquet", "*.jsonl")


def is_remote(address: str) -> bool:
    """Whether data is in an object store."""
    return "://" in address and not address.startswith("file://")


def local_folders(section: "ImageFolder | TextShards | Tokens") -> list[Path]:
    """Where files of this machine are looked for."""
    return search_folders(section.dir.removeprefix("file://"), section.name)


def find_shards(section: "ImageFolder | TextShards | Tokens", part: str) -> tuple[ShardIndex, Store] | None:
    """The shards of `part` (train or val) under the section's `dir`; None where there are none."""
    if is_remote(section.dir):
        return _find_remote(section, part)
    for folder in local_folders(section):
        path = folder / part / INDEX
        if path.is_file():
            index = _checked(parse_index(path.read_bytes(), str(path)), str(path))
            if section.on_error == "fail":
                _check_files(index, path.parent)
            return index, LocalStore(path.parent, index)
        if (folder / INDEX).is_file():
            raise UserError(
                f"data.dir: {folder} has an {INDEX} of its own, and no folder {part}; make both parts with shoal data "
                f"shard --val-fraction, or move these shards to {folder}/train"
            )
        if any(next((folder / part).glob(pattern), None) for pattern in _LOOSE):
            raise UserError(
                f"data.dir: {folder / part} has shards and no {INDEX}; make one: shoal data index {folder / part}"
            )
    return None


def _find_remote(section: "ImageFolder | TextShards | Tokens", part: str) -> tuple[ShardIndex, Store] | None:
    url = f"{section.dir.rstrip('/')}/{part}"
    try:
        content = Remote(url, Access("data.dir")).read(INDEX)
    except RemoteError as error:
        raise NoDataError(f"data.dir: {error}; check address and credentials") from error
    index = parse_index(content, f"{url}/{INDEX}") if content is not None else _listed(section, part)
    if index is None:
        return None
    _checked(index, f"{url}/{INDEX}")
    cache_bytes = int(section.cache_gb * _GB)
    of_a_window = min(1.0, section.window / max(1, index.num_rows)) * index.num_bytes
    if of_a_window > cache_bytes and section.name != "tokens":
        raise UserError(
            f"data.cache_gb: a window of {section.window:,} samples is about {of_a_window / _GB:.3g} GB of files, "
            f"which do not fit into {section.cache_gb:g}; raise it, or lower data.window"
        )
    cache = expand_home(section.cache_dir)
    store = CachedStore(url, index, cache=cache, cache_bytes=cache_bytes, patience_s=section.patience_s)
    return index, store


def check_columns(fields: Mapping[str, str | None], parts: Sequence[tuple[ShardIndex, Store]]) -> None:
    """That rows have the columns that fields of the recipe name; a wrong name is told before the run, where the index
    lists the columns."""
    for index, store in parts:
        columns = index.about.get("columns")
        for name, column in fields.items():
            if columns is not None and column is not None and column not in columns:
                raise no_column(name, store.where(0), column, columns)


def _check_files(index: ShardIndex, folder: Path) -> None:
    """That every shard is there and as long as it should be, before anything begins."""
    for shard in index.shards[:_MOST_LOOKED_AT]:
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            what = "is not there" if size is None else f"has {size:,} bytes, and the index says {shard.bytes:,}"
            raise UserError(f"data.dir: {path} {what}; {REMEDY}, or train without those rows: data.on_error=skip")


def _listed(section: "ImageFolder | TextShards | Tokens", part: str) -> ShardIndex | None:
    """Images in one folder per class in a store, each a shard of its own."""
    if section.name != "image_folder":
        return None
    remote = Remote(section.dir, Access("data.dir"))
    classes = sorted(name for name, size in remote.sizes(f"{part}").items() if size is None)
    shards = [
        Shard(f"{name}/{file}", 1, size)
        for name in classes
        for file, size in sorted(remote.sizes(f"{part}/{name}").items())
        if size and file.lower().endswith(IMAGES)
    ]
    return ShardIndex("folder", tuple(shards), {"classes": classes}) if shards else None


def _checked(index: ShardIndex, where: str) -> ShardIndex:
    if not index.num_rows:
        raise UserError(f"data.dir: {where} lists no rows")
    return index
