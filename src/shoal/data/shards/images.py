"""Images in one folder per class, as samples of a tar: the bytes as they are, or made smaller."""

import io
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.core.errors import UserError
from shoal.core.imports import require
from shoal.data.shards.records import shuffled
from shoal.data.shards.source import IMAGES, visible_files
from shoal.data.shards.write import Sample

JPEG_QUALITY = 95
_AT_ONCE = 256


@dataclass(frozen=True)
class Images:
    """Files and the numbers of their classes."""

    files: tuple[Path, ...]
    labels: tuple[int, ...]
    resize: int | None
    """Shorter sides that are longer than this become this."""

    @property
    def num_rows(self) -> int:
        """The images."""
        return len(self.files)

    def order(self, seed: int | None) -> np.ndarray:
        """Any order is as good as any other."""
        return shuffled(self.num_rows, seed)

    def samples(self, order: np.ndarray) -> Iterator[Sample]:
        """The image and the number of its class as text."""
        if self.resize is None:
            yield from (self._sample(int(number)) for number in order)
            return
        require("PIL", "--resize", "images")
        # Threads: Pillow lets go of Python while it decodes, scales and encodes.
        with ThreadPoolExecutor() as pool:
            for start in range(0, len(order), _AT_ONCE):
                yield from pool.map(self._sample, order[start : start + _AT_ONCE].tolist())

    def _sample(self, number: int) -> Sample:
        path = self.files[number]
        content, suffix = path.read_bytes(), path.suffix.lower()
        if not content:
            raise UserError(f"SRC: {path}: is empty; replace the image or delete it")
        if self.resize is not None:
            content, suffix = shrink(content, suffix, self.resize, path)
        return [(suffix, content), (".cls", str(self.labels[number]).encode())]


def list_classes(folder: Path) -> list[str]:
    """The sorted names of the folders in `folder`, without hidden ones."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def open_images(folder: Path, classes: Sequence[str], resize: int | None) -> Images:
    """All images of the classes; a folder of another class is an error."""
    unknown = sorted(set(list_classes(folder)) - set(classes))
    if unknown:
        raise UserError(
            f"SRC: {folder} has classes that train has not: {', '.join(unknown[:10])}; "
            "remove them or add images to train on"
        )
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        if (folder / name).is_dir():
            images = [path for path in visible_files(folder / name) if path.suffix.lower() in IMAGES]
            files.extend(images)
            labels.extend([label] * len(images))
    return Images(tuple(files), tuple(labels), resize)


def shrink(content: bytes, suffix: str, size: int, path: Path) -> tuple[bytes, str]:
    """The image with its shorter side scaled down to `size`, as JPEG; as it is, if it is not larger."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content)) as file:
            if min(file.size) <= size:
                file.load()  # a damaged image is found now
                return content, suffix
            image = file.convert("RGB")
    except UnidentifiedImageError as error:  # whose words name an object in memory, not the file
        raise UserError(f"SRC: {path}: is no image that Pillow knows; replace it or delete it") from error
    except Exception as error:
        # Pillow's decoders raise many kinds of errors on damaged files.
        raise UserError(f"SRC: {path}: cannot be decoded ({error}); replace the image or delete it") from error
    scale = size / min(image.size)
    width, height = (max(size, round(side * scale)) for side in image.size)
    out = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(out, "JPEG", quality=JPEG_QUALITY)
    return out.getvalue(), ".jpg"
