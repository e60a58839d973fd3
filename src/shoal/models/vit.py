"""A vision transformer."""

import math

import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.needs import divisors, image_classes
from shoal.models.transformer import BLOCK_TENSOR, INIT_STD, Block, HasStream, check_heads, init_weights


def build_vit(section: sections.Vit, spec: DataSpec) -> "Vit":
    """The transformer that `section` asks for, sized by the images of `spec`."""
    image_shape, num_classes = image_classes(section.name, spec)
    _, height, width = image_shape
    if height % section.patch or width % section.patch:
        raise UserError(
            f"model.patch: {section.patch} does not divide the image's {height}x{width} pixels; "
            f"allowed: {divisors(math.gcd(height, width))}"
        )
    check_heads(section.heads, section.dim)
    mlp_dim = round(section.mlp_ratio * section.dim)
    if mlp_dim == 0:
        raise UserError(
            f"model.mlp_ratio: {section.mlp_ratio} times model.dim {section.dim} leaves an MLP of no width; "
            f"allowed: {1 / section.dim:.4g} and more"
        )
    return Vit(
        image_shape,
        section.patch,
        num_classes,
        layers=section.layers,
        heads=section.heads,
        dim=section.dim,
        mlp_dim=mlp_dim,
        dropout=section.dropout,
    )


class Vit(HasStream):
    """Patches as tokens behind a class token, learned positions, pre-norm blocks; the class token is classified."""

    shoal_stages = ("embed", "predict")
    """What runs before the first block and after the last, for a pipeline."""
    shoal_tensor = {
        "dropout": "split",
        **{f"blocks.*.{name}": word for name, word in BLOCK_TENSOR.items()},
        "norm": "join",
    }
    """How its layers are divided among workers that share them."""

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        patch: int,
        num_classes: int,
        *,
        layers: int,
        heads: int,
        dim: int,
        mlp_dim: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.heads = heads
        self.num_tokens = 1 + (height // patch) * (width // patch)
        self.patches = nn.Conv2d(channels, dim, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(torch.empty(1, self.num_tokens, dim))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, mlp_dim, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        init_weights(self)
        nn.init.normal_(self.positions, std=INIT_STD)
        # By the fan-in, as in the paper's code: normalised pixels come out as tokens of about unit variance.
        nn.init.normal_(self.patches.weight, std=(channels * patch**2) ** -0.5)
        assert self.patches.bias is not None
        nn.init.zeros_(self.patches.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`[batch, channels, height, width]` -> logits `[batch, classes]`."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.predict(x)

    def embed(self, images: torch.Tensor) -> torch.Tensor:
        """`[batch, channels, height, width]` -> `[batch, tokens, dim]`."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        embedded: torch.Tensor = self.dropout(tokens + self.positions)
        return self.stream(embedded)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, dim]` -> logits `[batch, classes]`."""
        # All tokens through the norm, because each worker may have a part of them.
        logits: torch.Tensor = self.head(self.norm(x)[:, 0])
        return logits
