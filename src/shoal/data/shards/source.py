"""What lies in the folder or file that shards are to be made of."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from shoal.core.errors import UserError

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
"""How the names of images end."""
_KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
_PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_KNOWN = "images in one folder per class, or .jsonl, .csv, .parquet or .txt files"


@dataclass(frozen=True)
class Source:
    """Files of one kind."""

    root: Path
    kind: str
    """images, jsonl, csv, parquet or text."""
    files: tuple[Path, ...]
    """Sorted by path; for images, empty."""
    others: tuple[Path, ...] = ()
    """Files beside them that are of another kind, or of none that is known; or folders beside those of the parts."""


def find_parts(path: Path) -> dict[str, Source]:
    """`train` and `val` where a folder has these, else all there is as the part without a name."""
    if not path.exists():
        raise UserError(f"SRC: {path} is not there; give a file, or a folder with {_KNOWN}")
    if not path.is_dir() or not (path / "train").is_dir():
        return {"": find_source(path)}
    names = [name for name in ("train", "val") if (path / name).is_dir()]
    parts = {name: find_source(path / name) for name in names}
    beside = sorted(found for found in path.iterdir() if found.name not in names and not found.name.startswith("."))
    parts["train"] = replace(parts["train"], others=(*beside, *parts["train"].others))
    kinds = {source.kind for source in parts.values()}
    if len(kinds) > 1:
        raise UserError(f"SRC: {path}: train holds {parts['train'].kind} and val holds {parts['val'].kind}")
    return parts


def find_source(path: Path) -> Source:
    """A file by its ending; a folder by what is in it and below: rows first, then images in folders, then text."""
    if path.is_file():
        kind = _KINDS.get(path.suffix.lower())
        if kind is None:
            remedy = "unpack it first" if path.suffix.lower() in _PACKED else f"give {_KNOWN}"
            raise UserError(f"SRC: {path} is of no kind that is known; {remedy}")
        return Source(path, kind, (path,))
    found: dict[str, list[Path]] = {}
    for file in visible_files(path):
        suffix = file.suffix.lower()
        has_class = suffix in IMAGES and file.parent != path
        kind = "images" if has_class else "packed" if suffix in _PACKED else _KINDS.get(suffix, "unknown")
        found.setdefault(kind, []).append(file)
    rows = [kind for kind in ("jsonl", "csv", "parquet") if kind in found]
    if len(rows) > 1:
        raise UserError(f"SRC: {path} holds {' and '.join(rows)} files; give a folder, or a file, of one kind")
    for kind in (*rows, "images", "text"):
        if kind in found:
            if kind == "text" and (packed := _packed_rows(found)) is not None:
                raise UserError(f"SRC: {packed} is packed; unpack it first, or give the text files alone")
            files = found.pop(kind)
            others = tuple(sorted(chain.from_iterable(found.values())))
            return Source(path, kind, () if kind == "images" else tuple(files), others)
    remedy = f"; unpack {found['packed'][0].name} and its like first" if "packed" in found else ""
    if any(file.suffix.lower() in IMAGES for file in found.get("unknown", ())):
        remedy = "; its images are in no folder of a class: give the folder above it"
    raise UserError(f"SRC: {path} holds nothing to make shards of{remedy}. What can be read: {_KNOWN}")


def _packed_rows(found: dict[str, list[Path]]) -> Path | None:
    """A file of rows that is packed: text beside it is rarely what is meant."""
    return next(
        (f for f in found.get("packed", ()) if _KINDS.get(f.with_suffix("").suffix.lower(), "text") != "text"), None
    )


def visible_files(folder: Path) -> Iterator[Path]:
    """All files below a folder in a fixed order, without those that are hidden or in hidden folders."""
    for where, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(where) / name for name in sorted(names) if not name.startswith("."))
