import importlib.util
import io
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

Image = pytest.importorskip("PIL.Image")

from shoal.data import decode  # noqa: E402
from shoal.data.decode import CannotDecodeError, crop_and_resize, decode_crop, decode_image, image_size  # noqa: E402

has_simplejpeg = importlib.util.find_spec("simplejpeg") is not None
needs_simplejpeg = pytest.mark.skipif(not has_simplejpeg, reason="needs simplejpeg")


@pytest.fixture(params=[pytest.param("simplejpeg", marks=needs_simplejpeg), "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With simplejpeg and on a machine without it."""
    if request.param == "Pillow":
        monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    return request.param


def photograph(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Smooth patches of many sizes and a fine grain."""
    random = np.random.RandomState(seed)
    pixels = random.randn(height, width, 1) * 2
    for octave in range(1, 7):
        cells = 2**octave
        coarse = random.randn(cells + 1, cells + 1, 3).astype(np.float32)
        planes = [Image.fromarray(coarse[..., channel]).resize((width, height), 3) for channel in range(3)]
        pixels = pixels + np.stack([np.asarray(plane) for plane in planes], axis=-1) * 60 / cells**0.8
    return np.clip(128 + pixels, 0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, kind: str = "JPEG", mode: str | None = None, **options: Any) -> bytes:
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    (image if mode is None else image.convert(mode)).save(buffer, kind, **options)
    return buffer.getvalue()


def by_pillow(content: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as file:
        return np.array(file.convert("RGB"))


JPEGS: dict[str, dict[str, Any]] = {
    "baseline 4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "restart markers": {"restart_marker_blocks": 3},
    "gray": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
    "RGB": {"keep_rgb": True},
}


@needs_simplejpeg
@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS.keys())
@pytest.mark.parametrize("size", [(50, 37), (17, 33), (64, 64), (1, 1), (1, 40)])
@pytest.mark.parametrize("quality", [30, 85, 100])
def test_a_jpeg_decodes_to_the_bytes_that_pillow_gives(size, quality, options):
    content = encode(photograph(*size), quality=quality, **options)
    image = decode_image(content)
    assert image.shape == (size[1], size[0], 3) and image.dtype == np.uint8 and image.flags.writeable
    assert np.array_equal(image, by_pillow(content))


OTHERS: dict[str, dict[str, Any]] = {
    "png": {"kind": "PNG"},
    "png with a palette": {"kind": "PNG", "mode": "P"},
    "png with alpha": {"kind": "PNG", "mode": "RGBA"},
    "1 bit": {"kind": "PNG", "mode": "1"},
    "16 bit": {"kind": "PNG", "mode": "I;16"},
    "gif": {"kind": "GIF"},
    "webp": {"kind": "WEBP"},
    "bmp": {"kind": "BMP"},
    "ppm": {"kind": "PPM"},
    "tiff": {"kind": "TIFF"},
}


@pytest.mark.parametrize("options", OTHERS.values(), ids=OTHERS.keys())
def test_other_formats_are_decoded_by_pillow(options):
    mode = options.get("mode")
    pixels = photograph(20, 15)
    if mode == "I;16":
        pixels, options = (pixels[..., 0].astype(np.uint16) * 200), {"kind": "PNG"}
    content = encode(pixels, **options)
    image = decode_image(content)
    assert image.shape == (15, 20, 3) and image.dtype == np.uint8 and image.flags.writeable
    assert np.array_equal(image, by_pillow(content)) and image_size(content) == (20, 15)


def test_an_orientation_in_the_metadata_is_not_applied(decoder):
    exif = Image.Exif()
    exif[0x0112] = 6
    assert decode_image(encode(photograph(20, 10), exif=exif)).shape == (10, 20, 3)


def test_memory_of_others_is_read_where_it_is(decoder):
    content = encode(photograph(20, 10))
    view = memoryview(b"before" + content + b"after")[6 : 6 + len(content)]
    assert np.array_equal(decode_image(view), by_pillow(content)) and image_size(view) == (20, 10)


TRUNCATED = JPEGS | {name: OTHERS[name] for name in ("png", "webp", "gif", "bmp", "tiff")}


@pytest.mark.parametrize("options", TRUNCATED.values(), ids=TRUNCATED.keys())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_truncated_file_is_an_error_or_decodes_whole(options, decoder):
    content = encode(photograph(60, 45), **options)
    whole = decode_image(content)
    lengths = {*range(0, len(content), max(1, len(content) // 100)), *range(len(content) - 20, len(content))}
    num_errors = 0
    for length in lengths:
        try:
            image = decode_image(content[:length])
        except CannotDecodeError:
            num_errors += 1
        else:
            assert np.array_equal(image, whole), f"{length} of {len(content)} bytes"
    assert num_errors > 0.8 * len(lengths)


@needs_simplejpeg
@pytest.mark.parametrize("options", [{}, {"restart_marker_blocks": 3}], ids=["baseline", "restart markers"])
def test_a_jpeg_that_ends_early_but_properly_is_an_error(options):
    """Pillow would leave the rest grey."""
    content = encode(photograph(60, 45), **options)
    for length in range(len(content) * 3 // 4, len(content) - 10, 7):
        with pytest.raises(CannotDecodeError, match="Corrupt JPEG data"):
            decode_image(content[:length] + b"\xff\xd9")


def test_stray_bytes_do_no_harm(decoder):
    content = encode(photograph(60, 45))
    for stray in (content + b"more", content[:-2] + b"\0\0\0" + content[-2:]):
        assert np.array_equal(decode_image(stray), by_pillow(content))


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", bytes(1000), b"not an image at all", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8" + bytes(500)],
    ids=["empty", "zero", "zeros", "text", "start", "start of a marker", "start and zeros"],
)
def test_garbage_is_an_error_with_a_short_message(content, decoder):
    for read in (decode_image, image_size):
        with pytest.raises(CannotDecodeError) as caught:
            read(content)
        message = str(caught.value)
        assert 0 < len(message) <= 200 and "\n" not in message and "0x7" not in message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"kind": "PNG"}, {"kind": "WEBP"}, {"kind": "GIF"}])
def test_damage_never_comes_up_as_anything_else(options, decoder):
    content = encode(photograph(40, 30), **options)
    random = np.random.RandomState(0)
    for _ in range(150):
        damaged = bytearray(content)
        for position in random.randint(0, random.choice([30, 300, len(content)]), 3):
            damaged[min(position, len(content) - 1)] = random.randint(256)
        start, end = sorted(random.randint(0, len(damaged), 2))
        if random.rand() < 0.3:
            del damaged[start:end]
        try:
            image = decode_image(bytes(damaged))
        except CannotDecodeError:
            continue
        assert image.ndim == 3 and image.shape[2] == 3 and image.dtype == np.uint8


def test_a_decompression_bomb_is_an_error(decoder):
    content = bytearray(encode(photograph(16, 16)))
    frame = content.index(b"\xff\xc0")
    content[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"  # 65,535 by 65,535 pixels
    for read in (decode_image, lambda content: decode_crop(content, lambda width, height: (0, 0, 8, 8), 8)):
        with pytest.raises(CannotDecodeError, match="bomb"):
            read(bytes(content))


BOXES = [(0, 0, 100, 75), (10, 5, 90, 70), (40, 20, 60, 41), (99, 74, 100, 75), (0, 10, 100, 11)]


@pytest.mark.parametrize("size", [1, 32, 50, 150])
@pytest.mark.parametrize("box", BOXES)
def test_a_cut_is_scaled_as_pillow_does_it(box, size):
    image = photograph(100, 75)
    left, top, right, bottom = box
    out = crop_and_resize(image, box, size)
    assert out.shape == (size, size, 3) and out.dtype == np.uint8 and out.flags.writeable and out.flags.c_contiguous
    cut = Image.fromarray(image[top:bottom, left:right].copy())
    expected = np.asarray(cut.resize((size, size), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(out - expected).max() <= 1


def test_a_cut_of_the_right_size_is_only_cut():
    image = photograph(100, 75)
    assert np.array_equal(crop_and_resize(image, (10, 20, 40, 50), 30), image[20:50, 10:40])


@pytest.mark.parametrize("box", [(0, 0, 101, 75), (-1, 0, 10, 10), (5, 5, 5, 10), (0, 0, 10, 76)])
def test_a_box_lies_in_the_image(box):
    with pytest.raises(AssertionError):
        crop_and_resize(photograph(100, 75), box, 8)


@pytest.mark.parametrize("box", BOXES)
def test_decoding_a_part_of_a_small_image_is_cutting_it_out(box, decoder):
    for content in (encode(photograph(100, 75)), encode(photograph(100, 75), "PNG")):
        out = decode_crop(content, lambda width, height: box if (width, height) == (100, 75) else (0, 0, 1, 1), 32)
        assert np.array_equal(out, crop_and_resize(decode_image(content), box, 32))


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"mode": "L"}, {"mode": "CMYK"}])
def test_a_large_jpeg_is_decoded_in_less_detail_which_nobody_sees(factor, options, monkeypatch):
    size = 64
    side = 2 * factor * size
    width, height = side + 41, side + 23
    content = encode(photograph(width, height), quality=85, **options)
    box = (7, 3, 7 + side, 3 + side)
    out = decode_crop(content, lambda width, height: box, size)
    assert decode._decode(content, factor).shape == (-(-height // factor), -(-width // factor), 3)
    # The box that was asked for, to whole pixels of the smaller image.
    left, top = (start // factor * factor for start in box[:2])
    right, bottom = (-(-end // factor) * factor for end in box[2:])
    exact = crop_and_resize(decode_image(content), (left, top, right, bottom), size)
    difference = np.abs(out.astype(int) - exact)
    assert difference.max() <= 8 and difference.mean() < 1
    monkeypatch.setattr(decode, "_simplejpeg", lambda: None)
    assert np.array_equal(decode_crop(content, lambda width, height: box, size), out), "the same without simplejpeg"


@pytest.mark.parametrize(
    ("shorter", "factor"), [(1, 1), (895, 1), (896, 2), (1791, 2), (1792, 4), (3584, 8), (10**5, 8)]
)
def test_twice_the_detail_that_is_asked_for_is_left(shorter, factor):
    assert decode._reduction(shorter, 224) == factor


def test_a_wrong_box_function_is_not_taken_for_a_wrong_image():
    def fail(width: int, height: int) -> decode.Box:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        decode_crop(encode(photograph(20, 20)), fail, 8)


def test_no_decoder_is_loaded_before_it_is_needed():
    code = "import sys, shoal.data.decode; sys.exit('PIL' in sys.modules or 'simplejpeg' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
