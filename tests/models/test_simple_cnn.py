import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.simple_cnn import build_simple_cnn

from .gradients import parameters_without_gradient


def build(channels, image_shape, **settings):
    section = sections.SimpleCnn(name="simple_cnn", channels=channels, **settings)
    return build_simple_cnn(section, DataSpec(image_shape=image_shape, num_classes=10))


@pytest.mark.parametrize(
    ("channels", "image_shape"),
    [([4, 8], (1, 28, 28)), ([4, 8, 8], (3, 32, 32)), ([4, 8], (1, 13, 30)), ([4, 4, 4], (1, 8, 8))],
)
def test_logits_per_class_for_any_image(channels, image_shape):
    model = build(channels, image_shape, hidden=16)
    assert model(torch.randn(3, *image_shape)).shape == (3, 10)


def test_number_of_parameters():
    model = build([32, 64], (1, 28, 28), hidden=128)
    convolutions = 9 * 32 + 2 * 32 + 32 * 64 * 9 + 2 * 64
    assert sum(p.numel() for p in model.parameters()) == convolutions + 64 * 49 * 128 + 128 + 128 * 10 + 10


def test_gradients_reach_every_parameter():
    model = build([4, 8], (1, 8, 8), hidden=16)
    assert parameters_without_gradient(model, torch.randn(8, 1, 8, 8)) == []


def test_learns_to_tell_two_images_apart():
    torch.manual_seed(0)
    model = build([4, 8], (1, 8, 8), hidden=16)
    images, labels = torch.randn(2, 1, 8, 8).repeat(8, 1, 1, 1), torch.tensor([3, 7]).repeat(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert torch.equal(model(images).argmax(1), labels)


def test_more_stages_than_the_image_can_be_halved():
    build([4, 4, 4], (1, 8, 8))
    with pytest.raises(UserError, match=r"^model\.channels: 4 stages.* 8x8 pixels; allowed: at most 3 stages"):
        build([4, 4, 4, 4], (1, 8, 8))


def test_text_is_refused():
    with pytest.raises(UserError, match=r"^model\.name: simple_cnn needs images, but the data gives text"):
        build_simple_cnn(sections.SimpleCnn(name="simple_cnn"), DataSpec(vocab_size=100, num_classes=4))
