"""A multi-layer perceptron on flattened inputs."""

import math

import torch
from torch import nn

from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.needs import image_classes


def build_mlp(section: sections.Mlp, spec: DataSpec) -> "Mlp":
    """The perceptron that `section` asks for, sized by the images of `spec`."""
    image_shape, num_classes = image_classes(section.name, spec)
    return Mlp(math.prod(image_shape), section.hidden, num_classes, section.dropout)


class Mlp(nn.Module):
    """Linear, ReLU and dropout per hidden layer, then the classifier; no hidden layer leaves a linear model."""

    def __init__(self, num_inputs: int, hidden: list[int], num_classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in zip([num_inputs, *hidden], hidden, strict=False):
            layers += [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear([num_inputs, *hidden][-1], num_classes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[batch, ...]` -> logits `[batch, classes]`."""
        logits: torch.Tensor = self.layers(inputs.flatten(1))
        return logits
