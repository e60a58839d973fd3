"""The block that gpt and vit are made of."""

import math

import pytest
import torch

from shoal.core.errors import UserError
from shoal.models.transformer import Attention, Block, check_heads, init_weights


def attention_by_hand(module, x, causal):
    mixed = []
    for head in module.qkv_by_head(x).split(3 * module.head_dim, dim=-1):
        query, key, value = head.chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / math.sqrt(module.head_dim)
        if causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        mixed.append(scores.softmax(-1) @ value)
    return module.project(torch.cat(mixed, dim=-1))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_formula(causal):
    module = Attention(12, 3, causal=causal)
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(module(x), attention_by_hand(module, x, causal))


def test_dropout_acts_in_training_only():
    module = Block(12, 3, 24, dropout=0.5)
    x = torch.randn(2, 5, 12)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_attention_weights_are_dropped_too():
    module = Attention(12, 3, dropout=0.5)
    module.project_dropout.p = 0.0
    x = torch.randn(2, 5, 12)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


def test_no_bias_leaves_weights_alone():
    assert all(name.endswith("weight") for name, _ in Block(12, 3, 24, bias=False).named_parameters())


def test_residual_projections_start_smaller_by_the_depth():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[Block(64, 4, 256) for _ in range(8)])
    init_weights(model)
    for block in model:
        assert block.attention.qkv_by_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert block.mlp.expand.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert block.attention.project.weight.std().item() == pytest.approx(0.005, rel=0.05)
        assert block.mlp.project.weight.std().item() == pytest.approx(0.005, rel=0.05)
        assert not block.mlp.expand.bias.any()


def test_heads_that_do_not_divide_the_width():
    check_heads(3, 192)
    with pytest.raises(UserError, match=r"^model\.heads: 5 does not divide model\.dim 12; allowed: 1, 2, 3, 4, 6, 12$"):
        check_heads(5, 12)
