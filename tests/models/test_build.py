import subprocess
import sys
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from shoal.core.section import CUSTOM
from shoal.core.spec import DataSpec
from shoal.core.weights import named_weights, weights_sha256
from shoal.models import section as sections
from shoal.models.build import build_model
from shoal.models.gpt import Gpt
from shoal.models.lstm import Lstm
from shoal.models.mlp import Mlp
from shoal.models.resnet import ResNet
from shoal.models.simple_cnn import SimpleCnn
from shoal.models.vit import Vit

IMAGES = DataSpec(image_shape=(1, 8, 8), num_classes=10)
NEWS = DataSpec(vocab_size=50, num_classes=4)
BOOK = DataSpec(vocab_size=31, context=16)

CASES = {
    "mlp": ({}, IMAGES, Mlp),
    "simple_cnn": ({}, IMAGES, SimpleCnn),
    "resnet18": ({"width": 4}, IMAGES, ResNet),
    "resnet34": ({"width": 4}, IMAGES, ResNet),
    "resnet50": ({"width": 4}, IMAGES, ResNet),
    "resnet101": ({"width": 2}, IMAGES, ResNet),
    "vit": ({"dim": 12, "layers": 2}, IMAGES, Vit),
    "lstm": ({"embed": 8, "hidden": 8}, NEWS, Lstm),
    "bilstm": ({"embed": 8, "hidden": 8}, NEWS, Lstm),
    "gpt": ({"dim": 16, "heads": 2, "layers": 2}, BOOK, Gpt),
}


def build(name):
    settings, spec, _ = CASES[name]
    section = TypeAdapter(sections.ModelSection).validate_python({"name": name, **settings})
    return build_model(section, spec)


def inputs_for(spec):
    if spec.image_shape is not None:
        return torch.randn(2, *spec.image_shape)
    return torch.randint(1, spec.vocab_size, (2, spec.context or 12))


def test_every_built_in_name_is_tried_here():
    members = get_args(get_args(sections.ModelSection)[0])
    names = {note.tag for member in members for note in get_args(member)[1:]}
    assert set(CASES) == names - {CUSTOM}


@pytest.mark.parametrize("name", CASES)
def test_every_built_in_model(name):
    _, spec, expected = CASES[name]
    model = build(name)
    assert type(model) is expected
    logits = model(inputs_for(spec))
    assert logits.shape == ((2, spec.context, spec.vocab_size) if spec.context else (2, spec.num_classes))
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_the_seed_decides_the_weights(name):
    hashes = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        hashes.append(weights_sha256(named_weights(build(name))))
    assert hashes[0] == hashes[1] != hashes[2]


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_autocast_stays_near(name):
    model, inputs = build(name).eval(), inputs_for(CASES[name][1])
    with torch.no_grad():
        exact = model(inputs)
        with torch.autocast("cpu", torch.bfloat16):
            rough = model(inputs)
    torch.testing.assert_close(rough.float(), exact, atol=0.1, rtol=0.1)


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights")  # torch's own, for any nn.LSTM
@pytest.mark.parametrize("name", CASES)
def test_traces_into_a_graph_without_looking_at_values(name):
    """torch.export refuses control flow that depends on data, which is what makes torch.compile slow."""
    model, inputs = build(name).eval(), inputs_for(CASES[name][1])
    exported = torch.export.export(model, (inputs,)).module()
    torch.testing.assert_close(exported(inputs), model(inputs))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CASES)
def test_same_logits_on_the_gpu(name):
    model, inputs = build(name).eval(), inputs_for(CASES[name][1])
    with torch.no_grad():
        expected = model(inputs)
        torch.testing.assert_close(model.cuda()(inputs.cuda()).cpu(), expected, atol=1e-3, rtol=1e-3)


def test_another_section_is_a_programming_error():
    with pytest.raises(KeyError):
        build_model(nn.Linear(1, 1), IMAGES)


def test_sections_load_without_torch():
    code = "import sys, shoal.models.section; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
