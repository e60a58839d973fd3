"""Workers that share a layer draw other numbers for their own parts, and the same ones again afterwards."""

import torch
from torch import nn

from shoal.models.transformer import Mix
from shoal.parallel.draws import draw_apart


def drawn(module: nn.Module, rank: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a worker draws inside of the module, inside once more, and outside afterwards."""
    draw_apart(module, rank)
    torch.manual_seed(7)
    return module(*inputs), module(*inputs), torch.rand(3)


def test_parts_are_drawn_apart_and_the_rest_together() -> None:
    ones = torch.ones(50)
    first, again, after = drawn(nn.Dropout(0.5), 0, ones)
    other, _, after_other = drawn(nn.Dropout(0.5), 1, ones)
    assert not torch.equal(first, other)
    assert not torch.equal(first, again), "every time anew"
    assert torch.equal(after, after_other)
    repeated, _, _ = drawn(nn.Dropout(0.5), 1, ones)
    assert torch.equal(other, repeated), "the same in a run that is resumed"


def test_attention_weights_are_drawn_apart_too() -> None:
    tokens = torch.randn(1, 2, 8, 4)
    (first, _, after), (other, _, after_other) = (drawn(Mix(0.5, False), rank, *[tokens] * 3) for rank in (0, 1))
    assert not torch.equal(first, other) and torch.equal(after, after_other)


def test_what_does_not_draw_is_left_alone() -> None:
    layers = nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.0))
    forwards = [layer.forward for layer in layers]
    draw_apart(layers, 1)
    assert [layer.forward for layer in layers] == forwards
    module = nn.Dropout(0.5).eval()
    draw_apart(module, 1)
    before = torch.get_rng_state()
    assert torch.equal(module(torch.ones(9)), torch.ones(9))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_comes_back_after_an_error() -> None:
    module = Mix(0.5, False)
    draw_apart(module, 1)
    torch.manual_seed(7)
    try:
        module(torch.ones(2, 3), torch.ones(2, 5), torch.ones(2, 5))
    except RuntimeError:
        failed = True
    after = torch.rand(3)
    torch.manual_seed(7)
    torch.randint(2**62, ())
    assert failed and torch.equal(torch.rand(3), after)
