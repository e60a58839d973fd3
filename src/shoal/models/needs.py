"""What a built-in model needs of the data, and the error when the data gives something else."""

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec


def image_classes(name: str, spec: DataSpec) -> tuple[tuple[int, int, int], int]:
    """(channels, height, width) and the number of classes, for the image model called `name`."""
    if spec.image_shape is None:
        raise _misfit(name, "images", spec)
    if spec.num_classes is None:
        raise _misfit(name, "classes", spec)
    return spec.image_shape, spec.num_classes


def text_classes(name: str, spec: DataSpec) -> tuple[int, int]:
    """Vocabulary size and the number of classes, for the text classifier called `name`."""
    if spec.vocab_size is None:
        raise _misfit(name, "text", spec)
    if spec.num_classes is None:
        raise _misfit(name, "text with classes", spec)
    return spec.vocab_size, spec.num_classes


def running_text(name: str, spec: DataSpec) -> tuple[int, int]:
    """Vocabulary size and context, for the language model called `name`."""
    if spec.vocab_size is None:
        raise _misfit(name, "text", spec)
    if spec.context is None:
        raise _misfit(name, "running text", spec)
    return spec.vocab_size, spec.context


def describe_data(spec: DataSpec) -> str:
    """What the data gives, in words for an error message."""
    if spec.image_shape is not None:
        words = f"images of {'x'.join(str(size) for size in spec.image_shape)}"
    elif spec.context is not None:
        words = f"running text in contexts of {spec.context} tokens"
    elif spec.vocab_size is not None:
        words = "text"
    else:
        words = "neither images nor text"
    return words if spec.num_classes is None else f"{words} in {spec.num_classes} classes"


def divisors(number: int) -> str:
    """`1, 2, 3, 6` for 6: what is allowed where something must divide `number`."""
    return ", ".join(str(candidate) for candidate in range(1, number + 1) if number % candidate == 0)


def _misfit(name: str, needed: str, spec: DataSpec) -> UserError:
    return UserError(
        f"model.name: {name} needs {needed}, but the data gives {describe_data(spec)}; "
        f"for this data: {_fitting(spec)} your own module:function"
    )


def _fitting(spec: DataSpec) -> str:
    names: list[str] = []
    if spec.image_shape is not None and spec.num_classes is not None:
        names += ["mlp", "simple_cnn", "resnet18", "resnet34", "resnet50", "resnet101", "vit"]
    if spec.vocab_size is not None and spec.num_classes is not None:
        names += ["lstm", "bilstm"]
    if spec.vocab_size is not None and spec.context is not None:
        names += ["gpt"]
    return f"{', '.join(names)} or" if names else ""
