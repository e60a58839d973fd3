"""The `data:` section: one class per source, chosen by `name`. Loads without torch."""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from shoal.core.section import CUSTOM, Section, name_tag

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class _Data(Section):
    name: str
    workers: Annotated[int, Field(ge=0, le=256)] = 0
    """Processes that read samples beside the training process; 0 reads in line (best for data that is in memory)."""


class _Files(_Data):
    dir: str = "~/data"
    """Folder with the files, or with a folder of this dataset's name that holds them."""


class _Downloaded(_Files):
    download: bool = True
    """Fetch missing files into `dir` (checksum verified) where the network allows."""


class Digits(_Data):
    """scikit-learn's bundled 8x8 digits: 1,797 images, no download."""

    name: Literal["digits"]
    val_fraction: Fraction = 0.2
    """Share of the images kept for validation; the split is fixed."""


class Mnist(_Downloaded):
    """MNIST or Fashion-MNIST in idx form (gzipped or not): 60,000 and 10,000 images of 28x28."""

    name: Literal["mnist", "fashion_mnist"]
    augment: bool = False
    """Random shifts of up to two pixels."""


class Cifar10(_Downloaded):
    """CIFAR-10 batches, binary or Python version: 50,000 and 10,000 images of 32x32."""

    name: Literal["cifar10"]
    augment: bool = True
    """Random crops out of 4 pixels of padding, and horizontal flips."""


class ImageFolder(_Files):
    """`dir/train/CLASS/*.jpg` and `dir/val/CLASS/*.jpg`, as ImageNet is usually laid out."""

    name: Literal["image_folder"]
    size: Positive = 224
    """Side of the square that is cut from each image."""
    augment: bool = True
    """Random resized crops and horizontal flips for training."""


class CsvText(_Downloaded):
    """Text classification from CSV rows `class,text[,text...]`; `agnews` knows where to download AG News."""

    name: Literal["agnews", "csv_text"]
    train_file: str = "train.csv"
    """File under `dir` to train on; may be gzipped."""
    val_file: str | None = "test.csv"
    """File under `dir` to validate on; null splits `val_samples` rows off `train_file`."""
    train_samples: Positive | None = None
    """Use this many rows of `train_file`, drawn by `split_seed`; null uses all."""
    val_samples: Positive | None = None
    """Rows drawn from `train_file` for validation by `split_seed`; only with `val_file: null`."""
    split_seed: int = 0
    """Fixes which rows are drawn."""
    max_tokens: Positive = 64
    """Longer texts are cut."""
    vocab_size: Annotated[int, Field(ge=3)] = 30_000
    """Most frequent words of the training rows that get an id of their own."""


class CharText(_Downloaded):
    """Language modelling over the characters of one text file; `shakespeare` knows where to download it."""

    name: Literal["shakespeare", "text"]
    file: str = "input.txt"
    """File under `dir`."""
    context: Positive = 256
    """Characters in one sample."""
    stride: Positive | None = None
    """Distance between the starts of two training samples; null takes `context`, so that samples do not overlap."""
    val_fraction: Fraction = 0.1
    """The last part of the file is kept for validation."""


class Tokens(_Files):
    """Language modelling over memory-mapped token files, such as nanoGPT's `train.bin` and `val.bin`."""

    name: Literal["tokens"]
    train_file: str = "train.bin"
    """Raw little-endian token ids under `dir`."""
    val_file: str = "val.bin"
    """The same for validation."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """How a token id is stored."""
    vocab_size: Annotated[int, Field(gt=1)] = 50_304
    """Token ids are below this (GPT-2's 50,257, padded to a multiple of 64 for speed)."""
    context: Positive = 1024
    """Tokens in one sample."""
    stride: Positive | None = None
    """Distance between the starts of two training samples; null takes `context`."""


class Synthetic(_Data):
    """Random images whose class a fixed random projection decides: learnable, no files, any size."""

    name: Literal["synthetic"]
    samples: Positive = 50_000
    """Training samples."""
    val_samples: Positive = 10_000
    """Validation samples."""
    shape: Annotated[list[Positive], Field(min_length=3, max_length=3)] = [1, 28, 28]
    """Channels, height, width."""
    classes: Annotated[int, Field(ge=2)] = 10
    """Number of classes."""
    seed: int = 0
    """Fixes the samples and their classes."""


class CustomData(_Data):
    """Your own `module:function` that returns {"train": Dataset, "val": Dataset}."""

    name: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    args: dict[str, Any] = {}
    """Keyword arguments of the function."""


OF_TASK: Final = "task"


class TaskData(_Data):
    """No source of its own: the task brings its datasets, and this says how they are read."""

    name: Literal["task"] = OF_TASK


def _data_tag(value: Any) -> str | None:
    if isinstance(value, dict) and "name" not in value:
        return OF_TASK
    return name_tag(value)


DataSection = Annotated[
    Annotated[Digits, Tag("digits")]
    | Annotated[Mnist, Tag("mnist")]
    | Annotated[Mnist, Tag("fashion_mnist")]
    | Annotated[Cifar10, Tag("cifar10")]
    | Annotated[ImageFolder, Tag("image_folder")]
    | Annotated[CsvText, Tag("agnews")]
    | Annotated[CsvText, Tag("csv_text")]
    | Annotated[CharText, Tag("shakespeare")]
    | Annotated[CharText, Tag("text")]
    | Annotated[Tokens, Tag("tokens")]
    | Annotated[Synthetic, Tag("synthetic")]
    | Annotated[TaskData, Tag(OF_TASK)]
    | Annotated[CustomData, Tag(CUSTOM)],
    Discriminator(_data_tag),
]
