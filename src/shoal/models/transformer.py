"""The pre-norm transformer block that `gpt` and `vit` are made of."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import UserError
from shoal.models.needs import divisors

INIT_STD = 0.02

BLOCK_TENSOR = {
    "norm1": "tokens",
    "attention": "gather",
    "attention.qkv_by_head": "columns",
    "attention.mix": "heads",
    "attention.project": "rows",
    "attention.project_dropout": "tokens",
    "norm2": "tokens",
    "mlp": "gather",
    "mlp.expand": "columns",
    "mlp.project": "rows",
    "mlp.project_dropout": "tokens",
}
"""How a block's layers are divided among workers; the words are those of `shoal.parallel.tensor_plan`."""


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


class HasStream(nn.Module):
    """A model whose blocks add to a stream of activations."""

    half_stream = False
    """Whether that is of the type that autocast computes with, rather than fp32: half the memory, and less exact."""

    def stream(self, embedded: torch.Tensor) -> torch.Tensor:
        """What is embedded, as the blocks are given it."""
        if self.half_stream and torch.is_autocast_enabled(embedded.device.type):
            return embedded.to(torch.get_autocast_dtype(embedded.device.type))
        return embedded


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
        self.head_dim = dim // heads
        # Head by head, each with its query, key and value: so the rows can be divided among workers by heads.
        self.qkv_by_head = nn.Linear(dim, 3 * dim, bias=bias)
        self.mix = Mix(dropout, causal)
        self.project = nn.Linear(dim, dim, bias=bias)
        self.project_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> the same shape."""
        # As many heads as there are rows for here.
        heads = self.qkv_by_head(x).unflatten(-1, (-1, 3, self.head_dim))
        query, key, value = heads.permute(3, 0, 2, 1, 4).unbind(0)
        out = self.mix(query, key, value)
        result: torch.Tensor = self.project_dropout(self.project(out.transpose(1, 2).flatten(2)))
        return result


class Mix(nn.Module):
    """The values of each head's tokens, mixed as queries and keys say; some of the shares dropped in training.

    A module of its own, because workers who share the heads draw other random numbers here.
    """

    def __init__(self, p: float, causal: bool) -> None:
        super().__init__()
        self.p = p
        self.causal = causal

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[batch, heads, tokens, head_dim]`, three times -> the same shape."""
        # The functional form does not know about train() and eval().
        dropout = self.p if self.training else 0.0
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)


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
