"""The repeated blocks of any model: where activations are checkpointed and weights are split."""

from collections import Counter

from torch import nn

from shoal.core.errors import UserError


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks a model repeats, (name, module) in order; [] where it repeats none.

    A model says so itself with an attribute `shoal_blocks`, the names of those submodules. Otherwise they are the
    parameterised children of the largest `nn.ModuleList` or `nn.Sequential` in which a class occurs twice: that looks
    through a `Sequential(stem, Sequential(block, block), head)`.
    """
    names = getattr(model, "shoal_blocks", None)
    if names is not None:
        return _named_blocks(model, names)
    largest: list[tuple[str, nn.Module]] = []
    for container_name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        prefix = f"{container_name}." if container_name else ""
        children = [(prefix + name, child) for name, child in container.named_children() if _num_parameters(child)]
        classes = Counter(type(child) for _, child in children)
        if max(classes.values(), default=0) >= 2 and _total(children) > _total(largest):
            largest = children
    return largest


def _named_blocks(model: nn.Module, names: list[str]) -> list[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise UserError(
            f"model.name: shoal_blocks of {type(model).__name__} names {unknown[0]!r}, which is no submodule; "
            "allowed: the names that model.named_modules() gives"
        )
    return [(name, modules[name]) for name in names]


def _total(children: list[tuple[str, nn.Module]]) -> int:
    return sum(_num_parameters(child) for _, child in children)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
