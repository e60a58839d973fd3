"""From the `data:` section of a recipe to its datasets."""

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import UserError
from shoal.core.imports import call_object
from shoal.core.section import Section, one_of
from shoal.core.spec import DataSpec
from shoal.data import section as sections
from shoal.data.dataset import Datasets

CUSTOM_KEYS = ("train", "val", "spec")


def build_datasets(section: Section, seed: int) -> Datasets:  # noqa: PLR0911 - one line per source
    """The datasets that `section` describes; `seed` is the run's and only decides how samples are augmented.

    Files are found or downloaded here, and what can be checked without reading all of a big file is checked here.
    """
    match section:
        case sections.Digits():
            from shoal.data.digits import load_digits

            return load_digits(section)
        case sections.Mnist():
            from shoal.data.idx import load_mnist

            return load_mnist(section, seed)
        case sections.Cifar10():
            from shoal.data.cifar import load_cifar10

            return load_cifar10(section, seed)
        case sections.ImageFolder():
            from shoal.data.image_folder import load_image_folder

            return load_image_folder(section, seed)
        case sections.CsvText():
            from shoal.data.csv_text import load_csv_text

            return load_csv_text(section)
        case sections.CharText():
            from shoal.data.text import load_text

            return load_text(section)
        case sections.Tokens():
            from shoal.data.tokens import load_tokens

            return load_tokens(section)
        case sections.TextShards():
            from shoal.data.text_shards import load_text_shards

            return load_text_shards(section)
        case sections.Synthetic():
            from shoal.data.synthetic import make_synthetic

            return make_synthetic(section)
        case sections.CustomData():
            return _build_custom(section)
        case _:
            raise AssertionError(f"no source for {type(section).__name__}")


def _build_custom(section: sections.CustomData) -> Datasets:
    """Call the user's function, and check what comes back where the message can still name it."""
    result = call_object(section.name, "data", section.args)
    if not isinstance(result, Mapping) or "train" not in result:
        got = f"keys {', '.join(map(str, result))}" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        raise UserError(f'data.name: {section.name} must return {{"train": dataset, "val": dataset}}, not {got}')
    for key in result:
        if key not in CUSTOM_KEYS:
            raise UserError(f"data.name: {section.name} returned {key!r}; {one_of(str(key), CUSTOM_KEYS)}")
    train, val, spec = result["train"], result.get("val"), result.get("spec", DataSpec())
    for key, dataset in (("train", train), ("val", val)):
        if dataset is not None or key == "train":
            _check_sized(dataset, f"{section.name} returned a {key!r} dataset")
    if not isinstance(spec, DataSpec):
        raise UserError(
            f"data.name: {section.name} returned a {type(spec).__name__} as 'spec', not a shoal.core.spec.DataSpec"
        )
    return Datasets(train=train, val=val, spec=spec)


def _check_sized(dataset: Any, what: str) -> None:
    if type(dataset).__module__.startswith(("ray.data.", "shoal.data.ray_data")):
        return  # counting its rows may take a while, and is done once for all workers
    try:
        num_samples = len(dataset)
    except TypeError as error:
        raise UserError(f"data.name: {what} of type {type(dataset).__name__} without __len__") from error
    if num_samples == 0:
        raise UserError(f"data.name: {what} without samples")
