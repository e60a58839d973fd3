import re

import pytest
import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.resnet import BasicBlock, Bottleneck, ResNet, build_resnet

from .gradients import parameters_without_gradient

PUBLISHED = {"resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032, "resnet101": 44_549_160}


def small(block, depths=(2, 1, 1, 1), **settings):
    return ResNet(block, list(depths), 3, 10, width=8, **settings)


def randomise_norms(model):
    """Norms that neither vanish nor do nothing, so that every one of them matters for the output."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)


def name_in_transformers(name):
    """What transformers calls the weight that is called `name` here and in torchvision."""
    name = name.replace("fc.", "classifier.1.")
    name = re.sub(r"^conv1\.", "resnet.embedder.embedder.convolution.", name)
    name = re.sub(r"^bn1\.", "resnet.embedder.embedder.normalization.", name)
    if match := re.match(r"layer(\d)\.(\d+)\.(.*)", name):
        prefix = f"resnet.encoder.stages.{int(match[1]) - 1}.layers.{match[2]}."
        rest = (
            match[3].replace("downsample.0", "shortcut.convolution").replace("downsample.1", "shortcut.normalization")
        )
        rest = re.sub(r"conv(\d)", lambda m: f"layer.{int(m[1]) - 1}.convolution", rest)
        name = prefix + re.sub(r"bn(\d)", lambda m: f"layer.{int(m[1]) - 1}.normalization", rest)
    return name


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_number_of_parameters(name):
    section = sections.ResNet(name=name, stem="imagenet")
    with torch.device("meta"):
        model = build_resnet(section, DataSpec(image_shape=(3, 224, 224), num_classes=1000))
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize(("block", "layer_type"), [(BasicBlock, "basic"), (Bottleneck, "bottleneck")])
def test_same_logits_as_transformers(block, layer_type):
    transformers = pytest.importorskip("transformers")
    depths = (2, 1, 1, 1)
    config = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8 * block.expansion * 2**i for i in range(4)],
        depths=list(depths),
        layer_type=layer_type,
        num_labels=10,
    )
    theirs = transformers.ResNetForImageClassification(config).eval()
    ours = small(block, depths).eval()
    randomise_norms(ours)
    theirs.load_state_dict({name_in_transformers(name): tensor for name, tensor in ours.state_dict().items()})
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images).logits)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_same_logits_as_torchvision_from_its_state_dict(name):
    torchvision = pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    section = sections.ResNet(name=name, stem="imagenet")
    ours = build_resnet(section, DataSpec(image_shape=(3, 64, 64), num_classes=10)).eval()
    randomise_norms(ours)
    theirs = torchvision.models.get_model(name, weights=None, num_classes=10).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize("stem", ["auto", "imagenet", "small"])
@pytest.mark.parametrize("image_shape", [(1, 8, 8), (3, 32, 40), (3, 72, 72)])
def test_logits_per_class_for_any_image_and_stem(stem, image_shape):
    section = sections.ResNet(name="resnet18", width=4, stem=stem)
    model = build_resnet(section, DataSpec(image_shape=image_shape, num_classes=7))
    assert model(torch.randn(2, *image_shape)).shape == (2, 7)


@pytest.mark.parametrize(("side", "kernel", "quartered"), [(64, (3, 3), False), (65, (7, 7), True)])
def test_auto_stem_looks_at_the_image(side, kernel, quartered):
    with torch.device("meta"):
        section = sections.ResNet(name="resnet18")
        model = build_resnet(section, DataSpec(image_shape=(3, side, side), num_classes=10))
        features = model.maxpool(model.conv1(torch.empty(1, 3, side, side)))
    assert model.conv1.kernel_size == kernel
    assert features.shape[-1] == ((side + 3) // 4 if quartered else side)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_blocks_start_as_their_shortcut(block):
    unit = small(block).layer1[1].eval()
    x = torch.rand(2, 8 * block.expansion, 6, 6)
    assert torch.equal(unit(x), x)


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_gradients_reach_every_parameter(block):
    model = small(block, small_stem=True)
    randomise_norms(model)
    assert parameters_without_gradient(model, torch.randn(4, 3, 16, 16)) == []


def test_text_is_refused():
    with pytest.raises(UserError, match=r"^model\.name: resnet18 needs images, but the data gives running text"):
        build_resnet(sections.ResNet(name="resnet18"), DataSpec(vocab_size=65, context=256))
