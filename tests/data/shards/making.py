"""Small shards, made by other means than Shoal's own."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from PIL import Image

from shoal.data.shards.index import INDEX, Shard, ShardIndex


def picture(number: int, size: tuple[int, int] = (24, 18), kind: str = "JPEG") -> bytes:
    """An image that is a color of its own."""
    color = (number * 37 % 256, number * 91 % 256, number * 53 % 256)
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, kind)
    return file.getvalue()


def write_tar(path: Path, rows: Sequence[dict[str, bytes]], form: int = tarfile.USTAR_FORMAT, prefix: str = "") -> None:
    with tarfile.open(path, "w", format=form) as tar:
        for number, row in enumerate(rows):
            for column, content in row.items():
                about = tarfile.TarInfo(f"{prefix}{number:06d}.{column}")
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))


def write_index(folder: Path, form: str, rows: Sequence[int], about: dict[str, Any] | None = None) -> ShardIndex:
    """The index of all files in a folder, which are in the order of their names."""
    files = sorted(path for path in folder.iterdir() if path.name != INDEX and not path.name.startswith("."))
    shards = [
        Shard(path.name, count, path.stat().st_size, xxhash.xxh3_128_hexdigest(path.read_bytes()))
        for path, count in zip(files, rows, strict=True)
    ]
    index = ShardIndex(form, tuple(shards), about or {})
    (folder / INDEX).write_text(index.to_json())
    return index


def write_json_lines(folder: Path, rows: Sequence[int], **about: Any) -> ShardIndex:
    """Rows {"text": "sample N", "label": N % 2, "id": N}, numbered through all shards."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, count in enumerate(rows):
        ids = range(first, first + count)
        lines = [json.dumps({"text": f"sample {i}", "label": i % 2, "id": i}) + "\n" for i in ids]
        (folder / f"shard-{number:05d}.jsonl").write_text("".join(lines))
        first += count
    return write_index(folder, "jsonl", rows, about)


def write_images(
    folder: Path, rows: Sequence[int], num_classes: int = 2, size: tuple[int, int] = (24, 18)
) -> ShardIndex:
    """Images numbered through all shards, of class N % num_classes."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, count in enumerate(rows):
        ids = range(first, first + count)
        content = [{"jpg": picture(i, size), "cls": str(i % num_classes).encode()} for i in ids]
        write_tar(folder / f"shard-{number:05d}.tar", content)
        first += count
    return write_index(folder, "tar", rows, {"classes": [f"class {number}" for number in range(num_classes)]})


def write_tokens(folder: Path, rows: Sequence[int], dtype: str = "uint16") -> ShardIndex:
    """Ids 0, 1, 2, ... through all shards, modulo 50,000."""
    folder.mkdir(parents=True, exist_ok=True)
    first = 0
    for number, count in enumerate(rows):
        ids = np.arange(first, first + count) % 50_000
        (folder / f"shard-{number:05d}.bin").write_bytes(ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
        first += count
    return write_index(folder, "tokens", rows, {"dtype": dtype, "vocab_size": 50_000})
