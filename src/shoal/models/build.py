"""From the `model:` section and what the data says of itself to an `nn.Module`."""

from collections.abc import Callable
from typing import Any

from torch import nn

from shoal.core.section import Section
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.external import build_external
from shoal.models.gpt import build_gpt
from shoal.models.lstm import build_lstm
from shoal.models.mlp import build_mlp
from shoal.models.resnet import build_resnet
from shoal.models.simple_cnn import build_simple_cnn
from shoal.models.vit import build_vit

BUILDERS: dict[type[Section], Callable[[Any, DataSpec], nn.Module]] = {
    sections.Mlp: build_mlp,
    sections.SimpleCnn: build_simple_cnn,
    sections.ResNet: build_resnet,
    sections.Vit: build_vit,
    sections.Lstm: build_lstm,
    sections.Gpt: build_gpt,
    sections.CustomModel: build_external,
}
"""One builder for each kind of section."""


def build_model(section: Section, spec: DataSpec) -> nn.Module:
    """The model that `section` asks for, with fresh weights, sized by `spec`."""
    return BUILDERS[type(section)](section, spec)
