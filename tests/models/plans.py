"""What a model's plan for tensor parallel leaves out."""

from fnmatch import fnmatchcase

from torch import nn


def parameters_without_word(model: nn.Module) -> list[str]:
    """Names of the parameters whose own module the plan does not name: every worker has and computes them whole."""
    named = [
        name for name, _ in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in model.shoal_tensor)
    ]
    return [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in named]
