"""The `data:` section: one class per source, chosen by `name`. Loads without torch."""

from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag

from shoal.core.section import CUSTOM, Section, name_tag

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(gt=0, lt=1)]


class _Data(Section):
    name: str
    loader: Literal["auto", "memory", "map", "stream", "ray"] = "auto"
    """Who reads the samples, and in which order. `memory`: the training process, whole batches at once. `map`:
    processes beside it, any sample at any time. `stream`: the same, a file after the other, shuffled within `window`.
    `ray`: the CPUs of the Ray cluster, through Ray Data. `auto`: memory for data that is in memory, stream for shards,
    ray for a Ray Dataset, map for anything else."""
    workers: Annotated[int, Field(ge=0, le=256)] | Literal["auto"] = "auto"
    """Processes that read samples beside each training process; 0 reads in line. `auto` begins in line and takes as
    many as it takes for training not to wait, up to one a core. What is read does not depend on it."""
    on_error: Literal["fail", "skip"] = "fail"
    """What happens to a sample that cannot be read. `fail` ends the run and names it. `skip` trains on another one of
    the same file in its place, leaves it out of the validation, counts all and names the first."""
    transform_on: Literal["auto", "cpu", "device"] = "auto"
    """Where transforms of whole batches are computed (normalise, crop and flip of images that are in memory, mixup,
    cutmix); `auto`: on the GPU where there is one."""


class _InMemory(_Data):
    resident: bool | Literal["auto"] = "auto"
    """Keep all samples in the memory of the GPU; batches are then cut out and transformed there. `auto`: where there is
    a GPU, and they take no more than 2 GB and a tenth of it."""


class _Files(_Data):
    dir: str = "~/data"
    """Folder with the files, or with a folder of this dataset's name that holds them."""


class _Shards(_Data):
    dir: str = "~/data"
    """Folder with the files, or with a folder of this dataset's name that holds them; or the address of a folder in an
    object store, such as s3://bucket/folder."""
    window: Positive = 16_384
    """Samples that change places with each other where data is streamed; files are shuffled besides."""
    lanes: Positive = 16
    """Parts of the data that are streamed side by side: each worker reads only its own, so that a file goes to few
    machines."""
    cache_dir: str = "~/.cache/shoal/data"
    """Where files of an object store are kept on each machine."""
    cache_gb: Annotated[float, Field(gt=0)] = 100.0
    """They take no more than this; what was used longest ago goes first."""
    patience_s: Annotated[float, Field(ge=0)] = 600.0
    """How long an object store that fails is asked again before the run ends."""


class _Downloaded(_Files, _InMemory):
    download: bool = True
    """Fetch missing files into `dir` (checksum verified) where the network allows."""


class _Mixed(_Data):
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Mix each training image with another, weights from Beta(mixup, mixup); 0 does not. Needs train.global_batch and
    micro-batches that are even to be the same with any number of workers."""
    cutmix: Annotated[float, Field(ge=0)] = 0.0
    """Paste a piece of another image into each training image, its area from Beta(cutmix, cutmix); 0 does not. With
    both, every image takes one of them by chance."""


class Digits(_InMemory):
    """scikit-learn's bundled 8x8 digits: 1,797 images, no download."""

    name: Literal["digits"]
    val_fraction: Fraction = 0.2
    """Share of the images kept for validation; the split is fixed."""


class Mnist(_Downloaded, _Mixed):
    """MNIST or Fashion-MNIST in idx form (gzipped or not): 60,000 and 10,000 images of 28x28."""

    name: Literal["mnist", "fashion_mnist"]
    augment: bool = False
    """Random shifts of up to two pixels."""


class Cifar10(_Downloaded, _Mixed):
    """CIFAR-10 batches, binary or Python version: 50,000 and 10,000 images of 32x32."""

    name: Literal["cifar10"]
    augment: bool = True
    """Random crops out of 4 pixels of padding, and horizontal flips."""


class ImageFolder(_Shards, _Mixed):
    """`dir/train/CLASS/*.jpg` and `dir/val/CLASS/*.jpg`, as ImageNet is usually laid out; or the same in shards, as
    `shoal data shard` makes them, tar (webdataset) or parquet."""

    name: Literal["image_folder"]
    size: Positive = 224
    """Side of the square that is cut from each image."""
    augment: bool = True
    """Random resized crops and horizontal flips for training."""
    image: str | None = None
    """In shards, the column with the image; null: in tar the one that is named as an image, in parquet `image`."""
    label: str | None = None
    """In shards, the column with the class: its number, or its name where the index lists the classes; null: the one
    that the index names, or `cls` in tar and `label` in parquet."""
    classes: Annotated[int, Field(ge=2)] | None = None
    """Number of classes, where the index of the shards does not tell."""


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
    """Language modelling over one text file; `shakespeare` knows where to download it."""

    name: Literal["shakespeare", "text"]
    file: str = "input.txt"
    """File under `dir`."""
    tokenizer: Annotated[str, Field(min_length=1)] = "chars"
    """`chars`, `bytes`, or a tokenizer's JSON file under `dir`, such as `shoal data tokenizer` makes."""
    context: Positive = 256
    """Tokens in one sample; with `chars`, characters."""
    stride: Positive | None = None
    """Distance between the starts of two training samples; null takes `context`, so that samples do not overlap."""
    val_fraction: Fraction = 0.1
    """The last part of the file is kept for validation."""


class TextShards(_Shards):
    """Text classification from shards of JSON lines or parquet, too many to hold in memory."""

    name: Literal["text_shards"]
    text: str = "text"
    """The column with the text."""
    label: str | None = None
    """The column with the class: its number, or its name where the index lists the classes; null: the one that the
    index names, or `label`."""
    classes: Annotated[int, Field(ge=2)] | None = None
    """Number of classes, where the index of the shards does not tell."""
    tokenizer: Annotated[str, Field(min_length=1)] = "bytes"
    """`bytes`, or a tokenizer's JSON file, such as `shoal data tokenizer` makes."""
    max_tokens: Positive = 256
    """Longer texts are cut."""


class Tokens(_Shards):
    """Language modelling over files of token ids, read where they are needed: nanoGPT's `train.bin` and `val.bin`, or
    folders `train` and `val` of shards, as `shoal data shard` makes them."""

    name: Literal["tokens"]
    train_file: str = "train.bin"
    """Raw little-endian token ids under `dir`; a folder `train` of shards there goes first."""
    val_file: str = "val.bin"
    """The same for validation."""
    dtype: Literal["uint16", "uint32"] = "uint16"
    """How a token id is stored; the index of shards tells by itself."""
    vocab_size: Annotated[int, Field(gt=1)] | None = None
    """Token ids are below this; null: as the index of shards says, else 50,304 (GPT-2's 50,257, padded to a multiple of
    64 for speed)."""
    context: Positive = 1024
    """Tokens in one sample."""
    stride: Positive | None = None
    """Distance between the starts of two training samples; null takes `context`."""


class Synthetic(_InMemory):
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
    | Annotated[TextShards, Tag("text_shards")]
    | Annotated[Synthetic, Tag("synthetic")]
    | Annotated[TaskData, Tag(OF_TASK)]
    | Annotated[CustomData, Tag(CUSTOM)],
    Discriminator(_data_tag),
]
