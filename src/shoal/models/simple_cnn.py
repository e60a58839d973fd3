"""A small convolutional network: the one to start with on digits and MNIST."""

import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.needs import image_classes


def build_simple_cnn(section: sections.SimpleCnn, spec: DataSpec) -> "SimpleCnn":
    """The network that `section` asks for, sized by the images of `spec`."""
    image_shape, num_classes = image_classes(section.name, spec)
    _, height, width = image_shape
    most = min(height, width).bit_length() - 1
    stages = len(section.channels)
    if stages > most:
        raise UserError(
            f"model.channels: {stages} stages, each halving height and width, leave nothing of the image's "
            f"{height}x{width} pixels; allowed: at most {most} stages"
        )
    return SimpleCnn(image_shape, section.channels, section.hidden, num_classes, section.dropout)


class SimpleCnn(nn.Module):
    """Convolution, batch norm, ReLU and pooling per stage, then two fully connected layers."""

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        channels: list[int],
        hidden: int,
        num_classes: int,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        depth, height, width = image_shape
        stages = [_stage(inputs, outputs) for inputs, outputs in zip([depth, *channels], channels, strict=False)]
        num_features = channels[-1] * (height >> len(channels)) * (width >> len(channels))
        assert num_features > 0, "more stages than the image can be halved"
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(num_features, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        # The classifier holds most of the weights; the activations worth saving are in the stages.
        self.shoal_blocks = [f"stages.{index}" for index in range(len(channels))]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`[batch, channels, height, width]` -> logits `[batch, classes]`."""
        logits: torch.Tensor = self.classifier(self.stages(images))
        return logits


def _stage(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        # The batch norm that follows has its own bias.
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    )
