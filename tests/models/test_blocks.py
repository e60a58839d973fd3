import pytest
import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.blocks import repeated_blocks
from shoal.models.build import build_model

IMAGES = DataSpec(image_shape=(3, 32, 32), num_classes=10)


def names(model):
    blocks = repeated_blocks(model)
    assert all(model.get_submodule(name) is module for name, module in blocks)
    return [name for name, _ in blocks]


@pytest.mark.parametrize(
    ("section", "spec", "expected"),
    [
        (
            sections.Gpt(name="gpt", layers=3, heads=2, dim=8),
            DataSpec(vocab_size=9999, context=8),
            ["blocks.0", "blocks.1", "blocks.2"],
        ),
        (sections.Vit(name="vit", layers=2), IMAGES, ["blocks.0", "blocks.1"]),
        (
            sections.ResNet(name="resnet18", width=4),
            IMAGES,
            [f"layer{stage}.{index}" for stage in (1, 2, 3, 4) for index in (0, 1)],
        ),
        (sections.SimpleCnn(name="simple_cnn"), IMAGES, ["stages.0", "stages.1"]),
        (sections.Mlp(name="mlp", hidden=[8, 8]), IMAGES, ["layers.0", "layers.3", "layers.6"]),
        (sections.Lstm(name="lstm", layers=2), DataSpec(vocab_size=9, num_classes=4), ["layers.0", "layers.1"]),
        (sections.Lstm(name="lstm", layers=1), DataSpec(vocab_size=9, num_classes=4), []),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_of_the_built_in_models(section, spec, expected):
    assert names(build_model(section, spec)) == expected


def test_of_a_transformers_model():
    pytest.importorskip("transformers")
    args = {"n_layer": 2, "n_embd": 16, "n_head": 2}
    section = sections.CustomModel(name="transformers:GPT2LMHeadModel", args=args)
    model = build_model(section, DataSpec(vocab_size=31, context=8))
    assert names(model) == ["model.transformer.h.0", "model.transformer.h.1"]


def test_a_model_may_say_so_itself():
    class Model(nn.Module):
        shoal_blocks = ["second", "many.0"]

        def __init__(self):
            super().__init__()
            self.many = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))
            self.second = nn.Linear(2, 2)

    assert names(Model()) == ["second", "many.0"]
    assert names(nn.Sequential(Model())) == [f"0.many.{index}" for index in range(5)]


def test_a_name_that_is_no_submodule():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model.shoal_blocks = ["0", "blocks.1"]
    with pytest.raises(UserError, match=r"shoal_blocks of Sequential names 'blocks\.1', which is no submodule"):
        repeated_blocks(model)


@pytest.mark.parametrize("order", [("small", "large"), ("large", "small")])
def test_the_largest_list_wins_and_activations_are_left_out(order):
    lists = {
        "small": nn.ModuleList(nn.Linear(2, 2) for _ in range(9)),
        "large": nn.Sequential(nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 50), nn.Dropout()),
    }
    assert names(nn.ModuleDict({key: lists[key] for key in order})) == ["large.0", "large.2"]


def test_looks_through_stem_and_head():
    trunk = nn.Sequential(*[nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)])
    assert names(nn.Sequential(nn.Embedding(10, 8), trunk, nn.Linear(8, 2))) == ["1.0", "1.1", "1.2"]


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ModuleList([nn.ReLU(), nn.ReLU()])]
)
def test_nothing_repeats(model):
    assert repeated_blocks(model) == []


def test_blocks_of_a_model_without_weights_in_memory():
    with torch.device("meta"):
        model = build_model(sections.Gpt(name="gpt"), DataSpec(vocab_size=50_257, context=1024))
    assert len(repeated_blocks(model)) == 12
