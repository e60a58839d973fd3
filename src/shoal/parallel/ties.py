"""Tied weights, which are one parameter under several names, through what replaces parameters one by one."""

from torch import nn


def tied_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tied for tied in names.values() if len(tied) > 1]


def tie_again(model: nn.Module, ties: list[list[str]]) -> None:
    """Make those of one list one parameter, that of the first name."""
    for first, *others in ties:
        parameter = model.get_parameter(first)
        for other in others:
            owner, _, own = other.rpartition(".")
            setattr(model.get_submodule(owner), own, parameter)
