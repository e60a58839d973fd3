"""What a dataset tells a model about itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DataSpec:
    """The facts a model is sized by; None where they do not apply."""

    image_shape: tuple[int, int, int] | None = None
    """channels, height, width"""
    num_classes: int | None = None
    vocab_size: int | None = None
    """for text: token ids are below this; 0 is padding where samples differ in length"""
    context: int | None = None
    """for language modelling: tokens in one sample"""
