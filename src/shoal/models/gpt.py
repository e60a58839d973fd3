"""A GPT-2 style decoder."""

import torch
from torch import nn

from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.linear_cross_entropy import SumsLoss, linear_cross_entropy
from shoal.models.needs import running_text
from shoal.models.transformer import BLOCK_TENSOR, Block, HasStream, check_heads, init_weights


def build_gpt(section: sections.Gpt, spec: DataSpec) -> "Gpt":
    """The decoder that `section` asks for, sized by the vocabulary and the context of `spec`."""
    vocab_size, context = running_text(section.name, spec)
    check_heads(section.heads, section.dim)
    return Gpt(
        vocab_size,
        context,
        layers=section.layers,
        heads=section.heads,
        dim=section.dim,
        dropout=section.dropout,
        bias=section.bias,
        tie_weights=section.tie_weights,
    )


class Gpt(SumsLoss, HasStream):
    """Learned positions, pre-norm blocks with causal attention, a final norm and the output projection."""

    shoal_stages = ("embed", "predict")
    """What runs before the first block and after the last, for a pipeline."""
    shoal_tensor = {
        "token_embedding": "vocabulary",
        "dropout": "split",
        **{f"blocks.*.{name}": word for name, word in BLOCK_TENSOR.items()},
        "norm": "tokens",
        "head": "logits",
    }
    """How its layers are divided among workers that share them."""

    def __init__(
        self,
        vocab_size: int,
        context: int,
        *,
        layers: int,
        heads: int,
        dim: int,
        dropout: float = 0.0,
        bias: bool = True,
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        self.context = context
        self.heads = heads
        self.num_tokens = context
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            # GPT-2 was trained with the tanh form of GELU: the same here, so that its weights mean the same.
            Block(dim, heads, 4 * dim, dropout=dropout, bias=bias, causal=True, gelu="tanh")
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim, bias=bias)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        if tie_weights:
            self.head.weight = self.token_embedding.weight
        init_weights(self)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Token ids `[batch, tokens]` -> logits `[batch, tokens, vocabulary]` for the token after each.

        With targets of the tokens' shape, where it `sums_loss`: the sum of their cross-entropy instead.
        """
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if targets is None:
            return self.predict(x)
        hidden = self.norm(x).flatten(0, 1)
        if torch.is_autocast_enabled("cuda"):
            hidden = hidden.to(torch.get_autocast_dtype("cuda"))
        return linear_cross_entropy(hidden, self.output_weight, targets.flatten(), self.fp8_head)

    @property
    def output_weight(self) -> torch.Tensor:
        """`[vocabulary, dim]`."""
        return self.head.weight

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids `[batch, tokens]` -> `[batch, tokens, dim]`."""
        length = tokens.shape[1]
        if length > self.context:
            raise ValueError(f"{length} tokens do not fit into the model's context of {self.context} (data.context)")
        positions = torch.arange(length, device=tokens.device)
        embedded: torch.Tensor = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        return self.stream(embedded)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> logits `[batch, tokens, vocabulary]`."""
        logits: torch.Tensor = self.head(self.norm(x))
        return logits
