import textwrap

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.data.build import build_datasets
from shoal.data.dataset import reads_batches
from shoal.data.section import DataSection

from .. import fake_data

SOURCES = {
    "digits": (None, {}),
    "synthetic": (None, {"samples": 40, "val_samples": 10}),
    "mnist": (fake_data.write_idx, {"augment": True}),
    "fashion_mnist": (fake_data.write_idx, {}),
    "cifar10": (fake_data.write_cifar_bin, {}),
    "image_folder": (fake_data.write_image_folder, {"size": 8}),
    "agnews": (fake_data.write_csv_text, {}),
    "csv_text": (fake_data.write_csv_text, {}),
    "shakespeare": (fake_data.write_text, {"context": 16}),
    "text": (fake_data.write_text, {"context": 16}),
    "tokens": (fake_data.write_tokens, {"context": 16, "vocab_size": 64}),
}


def section(**values):
    return TypeAdapter(DataSection).validate_python(values)


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_builds_and_hands_out_batches(tmp_path, name):
    write, settings = SOURCES[name]
    if write is not None:
        settings = {**settings, "dir": str(write(tmp_path))}
    data = build_datasets(section(name=name, **settings), seed=0)
    assert reads_batches(data.train) and reads_batches(data.val)
    for part in (data.train, data.val):
        inputs, targets = part.batch(np.array([len(part) - 1, 0, 0]), 2)
        assert len(inputs) == len(targets) == 3 and targets.dtype == torch.int64
        assert inputs.dtype == (torch.float32 if data.spec.image_shape else torch.int64)
        if data.spec.image_shape:
            assert inputs.shape[1:] == data.spec.image_shape
        if data.spec.num_classes:
            assert targets.max() < data.spec.num_classes
        if data.spec.vocab_size:
            assert inputs.max() < data.spec.vocab_size
        if data.spec.context:
            assert inputs.shape == targets.shape == (3, data.spec.context)


def test_the_seed_only_decides_the_augmentation(tmp_path):
    fake_data.write_idx(tmp_path)
    rows = np.arange(20)

    def images(seed, part, augment=True):
        built = build_datasets(section(name="mnist", dir=str(tmp_path), augment=augment), seed=seed)
        return getattr(built, part).batch(rows, 0)[0]

    assert not torch.equal(images(0, "train"), images(1, "train"))
    assert torch.equal(images(0, "val"), images(1, "val"))
    assert torch.equal(images(0, "train", augment=False), images(1, "train", augment=False))


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of the user's in the working directory."""
    (tmp_path / "users_data_module.py").write_text(
        textwrap.dedent(
            """
            from shoal.core.spec import DataSpec

            NUMBER = 3

            def plain(count, offset=0):
                return {"train": [(i + offset, i) for i in range(count)]}

            def full():
                return {"train": [1, 2], "val": [3], "spec": DataSpec(num_classes=2)}

            def returns(what):
                return {
                    "list": [1, 2],
                    "no train": {"val": [1]},
                    "typo": {"train": [1], "vall": [1]},
                    "unsized": {"train": iter([1])},
                    "unsized val": {"train": [1], "val": iter([1])},
                    "empty": {"train": []},
                    "none": {"train": None},
                    "spec": {"train": [1], "spec": {"num_classes": 2}},
                }[what]
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "users_data_module"
    import sys

    sys.modules.pop("users_data_module", None)


def test_custom_data(module):
    data = build_datasets(section(name=f"{module}:plain", args={"count": 3, "offset": 5}), seed=0)
    assert data.train == [(5, 0), (6, 1), (7, 2)] and data.val is None and data.spec == DataSpec()
    data = build_datasets(section(name=f"{module}:full"), seed=0)
    assert data.val == [3] and data.spec.num_classes == 2


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        (
            "plain",
            {},
            r"^data.args: users_data_module:plain\(count, offset=0\) does not take them: missing",
        ),
        ("plain", {"count": 1, "ofset": 2}, r"^data.args: .*unexpected keyword argument 'ofset'"),
        ("plane", {}, r"^data.name: .*did you mean plain\?"),
        ("NUMBER", {}, "^data.name: users_data_module:NUMBER is a int, not a class"),
        ("returns", {"what": "list"}, r'^data.name: .*must return {"train": dataset, "val": dataset}, not a list'),
        ("returns", {"what": "no train"}, "^data.name: .*not keys val"),
        ("returns", {"what": "typo"}, r"^data.name: .*returned 'vall'; allowed: spec, train, val; did you mean val\?"),
        ("returns", {"what": "unsized"}, "^data.name: .*'train' dataset of type list_iterator without __len__"),
        ("returns", {"what": "unsized val"}, "^data.name: .*'val' dataset of type list_iterator without __len__"),
        ("returns", {"what": "empty"}, "^data.name: .*'train' dataset without samples"),
        ("returns", {"what": "none"}, "^data.name: .*'train' dataset of type NoneType without __len__"),
        ("returns", {"what": "spec"}, "^data.name: .*a dict as 'spec', not a shoal.core.spec.DataSpec"),
    ],
)
def test_custom_mistakes(module, name, args, problem):
    with pytest.raises(UserError, match=problem):
        build_datasets(section(name=f"{module}:{name}", args=args), seed=0)
