"""The `model:` section: one class per model, chosen by `name`. Loads without torch."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from shoal.core.section import CUSTOM, Section, name_tag

Positive = Annotated[int, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class Mlp(Section):
    """A multi-layer perceptron on flattened inputs."""

    name: Literal["mlp"]
    hidden: list[Positive] = [512, 512]
    """Width of each hidden layer."""
    dropout: Probability = 0.0
    """Dropout after each hidden layer."""


class SimpleCnn(Section):
    """Convolution, batch norm, ReLU and pooling per stage, then two fully connected layers."""

    name: Literal["simple_cnn"]
    channels: Annotated[list[Positive], Field(min_length=1)] = [32, 64]
    """Output channels of each stage; every stage halves height and width."""
    hidden: Positive = 128
    """Width of the fully connected layer."""
    dropout: Probability = 0.0
    """Dropout before the last layer."""


class ResNet(Section):
    """A residual network (v1.5: the stride is in the 3x3 convolution)."""

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101"]
    width: Positive = 64
    """Channels of the first stage."""
    stem: Literal["auto", "imagenet", "small"] = "auto"
    """`imagenet`: 7x7 stride 2 and pooling; `small`: 3x3, for images up to 64 pixels; `auto` looks at the data."""


class Vit(Section):
    """A vision transformer: pre-norm blocks, class token, learned positions."""

    name: Literal["vit"]
    patch: Positive = 4
    """Side of a patch in pixels; must divide the image's height and width."""
    dim: Positive = 192
    """Width of the tokens."""
    layers: Positive = 6
    """Number of transformer blocks."""
    heads: Positive = 3
    """Attention heads; must divide `dim`."""
    mlp_ratio: Annotated[float, Field(gt=0)] = 4.0
    """Width of the MLP inside a block, as a multiple of `dim`."""
    dropout: Probability = 0.0
    """Dropout in the blocks and after the embedding."""


class Lstm(Section):
    """An LSTM text classifier over padded token ids, mean and max pooled over the real tokens."""

    name: Literal["lstm", "bilstm"]
    embed: Positive = 128
    """Width of the token embedding."""
    hidden: Positive = 128
    """Width of the recurrent state (per direction)."""
    layers: Positive = 1
    """Stacked recurrent layers."""
    dropout: Probability = 0.3
    """Dropout on the embedding, between layers and before the classifier."""


class Gpt(Section):
    """A GPT-2 style decoder: learned positions, pre-norm blocks, causal scaled-dot-product attention."""

    name: Literal["gpt"]
    layers: Positive = 12
    """Number of transformer blocks."""
    heads: Positive = 12
    """Attention heads; must divide `dim`."""
    dim: Positive = 768
    """Width of the tokens."""
    dropout: Probability = 0.0
    """Dropout in the blocks and after the embedding."""
    bias: bool = True
    """Biases in the linear layers and norms."""
    tie_weights: bool = True
    """The output projection shares the token embedding's weights."""


class CustomModel(Section):
    """Your own `module:function`, or `torchvision:NAME` and `transformers:CLASS` where those are installed."""

    name: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    args: dict[str, Any] = {}
    """Keyword arguments of the function (for transformers: of the model's configuration)."""


ModelSection = Annotated[
    Annotated[Mlp, Tag("mlp")]
    | Annotated[SimpleCnn, Tag("simple_cnn")]
    | Annotated[ResNet, Tag("resnet18")]
    | Annotated[ResNet, Tag("resnet34")]
    | Annotated[ResNet, Tag("resnet50")]
    | Annotated[ResNet, Tag("resnet101")]
    | Annotated[Vit, Tag("vit")]
    | Annotated[Lstm, Tag("lstm")]
    | Annotated[Lstm, Tag("bilstm")]
    | Annotated[Gpt, Tag("gpt")]
    | Annotated[CustomModel, Tag(CUSTOM)],
    Discriminator(name_tag),
]
