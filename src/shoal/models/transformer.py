"""The pre-norm transformer block that `gpt` and `vit` are made of."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import UserError
from shoal.models.needs import divisors

INIT_STD = 0.02


def check_heads(heads: int, dim: int) -> None:
    """A user error where the heads do not share the width evenly."""
    if dim % heads:
        raise UserError(f"model.heads: {heads} does not divide model.dim {dim}; allowed: {divisors(dim)}")


def init_weights(model: nn.Module) -> None:
    """GPT-2's initialisation: small normal weights, smaller ones where a block adds to the residual stream.

    Each of the n blocks adds twice; dividing by sqrt(2n) keeps the stream's variance independent of the depth.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for block in blocks:
        for projection in (block.attention.project, block.mlp.project):
            nn.init.normal_(projection.weight, std=INIT_STD * (2 * len(blocks)) ** -0.5)


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(
        self,
        dim: int,
        heads: int,
        mlp_dim: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        causal: bool = False,
        gelu: Literal["none", "tanh"] = "none",
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, bias=bias)
        self.attention = Attention(dim, heads, dropout=dropout, bias=bias, causal=causal)
        self.norm2 = nn.LayerNorm(dim, bias=bias)
        self.mlp = FeedForward(dim, mlp_dim, dropout=dropout, bias=bias, gelu=gelu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Multi-head self-attention through torch's fused kernels."""

    def __init__(self, dim: int, heads: int, *, dropout: float = 0.0, bias: bool = True, causal: bool = False) -> None:
        super().__init__()
        assert dim % heads == 0, f"{heads} heads do not share a width of {dim}"
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(dim, 3 * dim, bias=bias)
        self.project = nn.Linear(dim, dim, bias=bias)
        self.project_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> the same shape."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        # The functional form does not know about train() and eval().
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        result: torch.Tensor = self.project_dropout(self.project(out.transpose(1, 2).flatten(2)))
        return result


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        gelu: Literal["none", "tanh"] = "none",
    ) -> None:
        super().__init__()
        self.expand = nn.Linear(dim, hidden, bias=bias)
        self.gelu = nn.GELU(approximate=gelu)
        self.project = nn.Linear(hidden, dim, bias=bias)
        self.project_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> the same shape."""
        result: torch.Tensor = self.project_dropout(self.project(self.gelu(self.expand(x))))
        return result
