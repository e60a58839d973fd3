import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.mlp import Mlp, build_mlp

from .gradients import parameters_without_gradient

DIGITS = DataSpec(image_shape=(1, 8, 8), num_classes=10)


def test_logits_per_class():
    model = build_mlp(sections.Mlp(name="mlp", hidden=[32, 16]), DIGITS)
    assert model(torch.randn(5, 1, 8, 8)).shape == (5, 10)
    assert sum(p.numel() for p in model.parameters()) == 64 * 32 + 32 + 32 * 16 + 16 + 16 * 10 + 10


def test_no_hidden_layer_is_a_linear_model():
    model = Mlp(64, [], 10)
    assert sum(p.numel() for p in model.parameters()) == 650
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x + x) - model(x), model(x) - model(torch.zeros_like(x)))


def test_hidden_layers_are_not_linear():
    model = Mlp(64, [32], 10)
    x = torch.randn(3, 64)
    assert not torch.allclose(model(x + x) - model(x), model(x) - model(torch.zeros_like(x)), atol=1e-3)


def test_gradients_reach_every_parameter():
    model = build_mlp(sections.Mlp(name="mlp", hidden=[32, 16]), DIGITS)
    assert parameters_without_gradient(model, torch.randn(8, 1, 8, 8)) == []


def test_dropout_only_in_training():
    model = build_mlp(sections.Mlp(name="mlp", hidden=[64], dropout=0.5), DIGITS)
    x = torch.randn(4, 1, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_text_is_refused():
    with pytest.raises(UserError, match=r"^model\.name: mlp needs images, but the data gives text in 4 classes"):
        build_mlp(sections.Mlp(name="mlp"), DataSpec(vocab_size=100, num_classes=4))
