"""Small files in the public formats, with the same content every time, and learnable where that is easy."""

import csv
import gzip
import random
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

CIFAR_BATCHES = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")
TOPICS = (
    ("peace", "treaty", "minister", "border", "election"),
    ("match", "season", "coach", "goal", "league"),
    ("shares", "profit", "market", "bank", "oil"),
    ("software", "chip", "network", "browser", "satellite"),
)
FILLER = ("the", "a", "on", "in", "said", "after", "new", "of")


def striped_images(labels: np.ndarray, channels: int, size: int, seed: int) -> np.ndarray:
    """uint8 [N, C, size, size]: dim noise with one bright band, whose height in the image is the class."""
    images = np.random.RandomState(seed).randint(0, 64, (len(labels), channels, size, size)).astype(np.uint8)
    for image, label in zip(images, labels, strict=True):
        top = int(label) * size // 10
        image[:, top : max(top + 1, (int(label) + 1) * size // 10), :] += 160
    return images


def write_idx(folder: Path, n_train: int = 200, n_val: int = 50, size: int = 28, gzipped: bool = True) -> Path:
    """MNIST's four files; class `c` is a bright band at height `c`."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, count, seed in (("train", n_train, 1), ("t10k", n_val, 2)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = striped_images(labels, 1, size, seed)
        write_bytes(folder / f"{part}-images-idx3-ubyte", idx_bytes(images[:, 0]), gzipped)
        write_bytes(folder / f"{part}-labels-idx1-ubyte", idx_bytes(labels), gzipped)
    return folder


def idx_bytes(array: np.ndarray) -> bytes:
    """A uint8 array in idx form."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_bytes(path: Path, content: bytes, gzipped: bool) -> Path:
    """The content under `path`, or zipped under `path`.gz."""
    path = path.with_name(f"{path.name}.gz") if gzipped else path
    path.write_bytes(gzip.compress(content, mtime=0) if gzipped else content)
    return path


def write_cifar_bin(folder: Path, per_batch: int = 20) -> Path:
    """CIFAR-10's binary version under `folder`/cifar-10-batches-bin."""
    target = folder / "cifar-10-batches-bin"
    target.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(CIFAR_BATCHES):
        (target / f"{name}.bin").write_bytes(cifar_bin_bytes(seed, per_batch))
    return folder


def cifar_bin_bytes(seed: int, per_batch: int) -> bytes:
    """One binary batch: records of a label byte and 3,072 pixels."""
    labels = np.arange(per_batch, dtype=np.uint8) % 10
    pixels = striped_images(labels, 3, 32, seed).reshape(per_batch, 3072)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


def write_cifar_py(folder: Path, per_batch: int = 20) -> Path:
    """CIFAR-10's Python version, the same samples, under `folder`/cifar-10-batches-py."""
    target = folder / "cifar-10-batches-py"
    target.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(CIFAR_BATCHES):
        labels = np.arange(per_batch, dtype=np.uint8) % 10
        pixels = striped_images(labels, 3, 32, seed).reshape(per_batch, 3072)
        (target / name).write_bytes(python2_batch(pixels, labels.tolist()))
    return folder


def python2_batch(pixels: np.ndarray, labels: Sequence[int]) -> bytes:
    """The pickle that Python 2 and the NumPy of 2009 wrote: protocol 2, byte strings, `numpy.core`."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR("
    dtype += number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    content = pixels.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + number(0) + b"t" + text(b"b") + b"tR("
    array += number(1) + b"(" + number(pixels.shape[0]) + number(pixels.shape[1]) + b"t" + dtype + b"\x89"
    array += b"T" + struct.pack("<i", len(content)) + content + b"tb"
    items = text(b"batch_label") + text(b"testing batch") + text(b"labels") + b"]("
    items += b"".join(number(label) for label in labels) + b"e" + text(b"data") + array
    items += text(b"filenames") + b"](" + text(b"a_000001.png") + b"e"
    return b"\x80\x02}(" + items + b"u."


def write_image_folder(
    folder: Path, classes: Sequence[str] = ("cat", "dog"), per_class: int = 4, size: int = 40
) -> Path:
    """`train/CLASS/n.png` and half as many `val/CLASS/n.png`; every class has a colour of its own, plus noise."""
    from PIL import Image

    for part, count, seed in (("train", per_class, 1), ("val", max(1, per_class // 2), 2)):
        state = np.random.RandomState(seed)
        for number, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
            colour = np.array([(number * 67) % 200, (number * 131 + 90) % 200, (number * 29 + 150) % 200])
            for index in range(count):
                # Wider than high, so that the two are told apart where it matters.
                pixels = state.randint(0, 50, (size, size + 10, 3)) + colour
                Image.fromarray(pixels.astype(np.uint8)).save(folder / part / name / f"{index}.png")
    return folder


def csv_text_rows(rows: int, seed: int = 0) -> list[tuple[str, str, str]]:
    """`class, title, description` as in AG News: the class, from 1, decides which words come up."""
    state = random.Random(seed)
    result = []
    for index in range(rows):
        topic = TOPICS[index % len(TOPICS)]
        words = [state.choice(topic if state.random() < 0.5 else FILLER) for _ in range(state.randint(6, 14))]
        title = " ".join(words[:3]).title()
        result.append((str(index % len(TOPICS) + 1), title, " ".join(words[3:]) + ', "quoted"\\more.'))
    return result


def write_csv_text(folder: Path, rows: int = 200, val_rows: int = 50, gzipped: bool = False) -> Path:
    """AG News's train.csv and test.csv."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train.csv", rows, 1), ("test.csv", val_rows, 2)):
        path = folder / name
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, quoting=csv.QUOTE_ALL).writerows(csv_text_rows(count, seed))
        if gzipped:
            write_bytes(path, path.read_bytes(), gzipped=True)
            path.unlink()
    return folder


def write_text(folder: Path, chars: int = 5000) -> Path:
    """input.txt of exactly `chars` characters: words in a random order, with line ends and an accent."""
    folder.mkdir(parents=True, exist_ok=True)
    state = random.Random(0)
    words = [*FILLER, *TOPICS[0], "café", "end.\n"]
    text = ""
    while len(text) < chars:
        text += state.choice(words) + " "
    (folder / "input.txt").write_text(text[:chars], encoding="utf-8")
    return folder


def write_tokens(folder: Path, n: int = 5000, vocab: int = 64, dtype: str = "uint16") -> Path:
    """train.bin with `n` ids and val.bin with a tenth; mostly, an id decides the next one."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train.bin", n, 1), ("val.bin", max(n // 10, 2), 2)):
        state = np.random.RandomState(seed)
        ids = state.randint(0, vocab, count)
        for position in range(1, count):
            if state.rand() < 0.8:
                ids[position] = (3 * ids[position - 1] + 1) % vocab
        ids.astype(np.dtype(dtype).newbyteorder("<")).tofile(folder / name)
    return folder
