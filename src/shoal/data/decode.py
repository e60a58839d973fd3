"""Encoded images to pixels, as fast as one thread can.

JPEGs are decoded by simplejpeg where it is installed, in two thirds of Pillow's time. Both are libjpeg-turbo, and give
the same bytes. All else is decoded by Pillow. An orientation in the metadata is not applied.
"""

import contextlib
import importlib
import io
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from PIL import Image

Box = tuple[int, int, int, int]
"""left, top, right, bottom"""

JPEG_START = b"\xff\xd8"
MAX_PIXELS = 178_956_970
"""What is larger is left to Pillow, which refuses it as a decompression bomb unless told otherwise."""
MAX_REDUCTION = 8


class CannotDecodeError(ValueError):
    """The bytes are not an image, or not a whole one; the message says in short what is wrong with them."""


def decode_image(content: bytes | memoryview) -> np.ndarray:
    """The RGB pixels of an encoded image, uint8 `[height, width, 3]`."""
    return _decode(content, 1)


def decode_crop(content: bytes | memoryview, choose_box: Callable[[int, int], Box], size: int) -> np.ndarray:
    """The part of an encoded image that `choose_box(width, height)` names, uint8 `[size, size, 3]`.

    Of a large JPEG only as much detail is decoded as leaves twice the pixels per side that are asked for. That takes a
    third to a half less time, and differs in photographs by a few of 255. The box then grows to whole pixels of
    the smaller image: by less than half a pixel of the result.
    """
    width, height = image_size(content)
    left, top, right, bottom = choose_box(width, height)
    image = _decode(content, _reduction(min(right - left, bottom - top), size))
    rows, columns = image.shape[:2]
    box = (
        left * columns // width,
        top * rows // height,
        _divide_up(right * columns, width),
        _divide_up(bottom * rows, height),
    )
    return crop_and_resize(image, box, size)


def crop_and_resize(image: np.ndarray, box: Box, size: int) -> np.ndarray:
    """The box cut out of uint8 `[height, width, 3]` pixels and scaled to `[size, size, 3]`, bilinear, antialiased.

    What Pillow gives for the cut, to within one of 255, in a fourth of the time. (Pillow's own `box=` also looks at
    pixels just outside of the box.)
    """
    left, top, right, bottom = box
    assert 0 <= left < right <= image.shape[1] and 0 <= top < bottom <= image.shape[0], f"{box} of {image.shape}"
    # Without gaps in memory, and channels the last there: torch has a kernel for that, and else copies.
    cut = torch.from_numpy(np.ascontiguousarray(image[top:bottom, left:right])).unsqueeze(0)
    resized = F.interpolate(cut.permute(0, 3, 1, 2), (size, size), mode="bilinear", antialias=True)
    pixels: np.ndarray = resized.squeeze(0).permute(1, 2, 0).numpy()
    return pixels


def image_size(content: bytes | memoryview) -> tuple[int, int]:
    """Width and height of an encoded image, from its header alone."""
    header = _jpeg_header(content)
    if header is not None:
        return header
    with _opened(content) as file:
        return file.size


def _reduction(shorter: int, size: int) -> int:
    """By which of 1, 2, 4, 8 to divide an image of which a box with this shorter side is to become `size` wide."""
    factor = 1
    while factor < MAX_REDUCTION and shorter >= 4 * factor * size:
        factor *= 2
    return factor


def _divide_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _decode(content: bytes | memoryview, reduction: int) -> np.ndarray:
    header = _jpeg_header(content)
    if header is not None:
        width, height = header
        # Only where asked for: of an image of a few pixels, a fraction may round to the same size.
        at_least = {"min_width": width, "min_height": height} if reduction > 1 else {}
        least = {name: _divide_up(side, reduction) for name, side in at_least.items()}
        try:
            image: np.ndarray = _simplejpeg().decode_jpeg(content, "RGB", **least)
        except ValueError as error:
            # Pillow does not see such damage and would leave a part grey. On anything else it has the last word: stray
            # bytes between the parts of a file do no harm.
            if str(error).startswith("Corrupt JPEG data") and "extraneous bytes" not in str(error):
                raise CannotDecodeError(_short(error)) from error
        else:
            return image
    with _opened(content) as file:
        if reduction > 1:
            file.draft("RGB", (file.width // reduction, file.height // reduction))
        return np.array(file.convert("RGB"))  # copied: torch wants memory that it may write to


def _jpeg_header(content: bytes | memoryview) -> tuple[int, int] | None:
    """Width and height of a JPEG for simplejpeg; None of what Pillow should look at."""
    if content[:2] != JPEG_START or _simplejpeg() is None:
        return None
    try:
        height, width, colors, _ = _simplejpeg().decode_jpeg_header(content)
    except ValueError:
        return None
    # Conversions from CMYK are Pillow's own.
    return (width, height) if colors in {"RGB", "YCbCr", "Gray"} and width * height <= MAX_PIXELS else None


@cache
def _simplejpeg() -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


@contextlib.contextmanager
def _opened(content: bytes | memoryview) -> "Iterator[Image.Image]":
    """An image opened by Pillow; whatever its many decoders raise inside becomes one kind of error."""
    from PIL import Image, UnidentifiedImageError

    if not content:
        raise CannotDecodeError("there are no bytes")
    try:
        with Image.open(io.BytesIO(content)) as file:
            yield file
    except UnidentifiedImageError as error:
        raise CannotDecodeError("not an image of a known format, or damaged at its start") from error
    except Exception as error:
        raise CannotDecodeError(_short(error)) from error


def _short(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
