"""The tensors of a pipeline's stages: which ones each computes with, and having those alone on a worker."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FunctionType

import torch
from torch import nn


def first_names(model: nn.Module) -> dict[int, str]:
    """Every parameter and buffer, by identity; one with several names by its first."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(tensor): name for name, tensor in reversed(named)}


def all_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers."""
    return [*module.parameters(), *module.buffers()]


def place(
    model: nn.Module, own: frozenset[str], device: torch.device, initial: Iterable[tuple[str, torch.Tensor]] | None
) -> None:
    """Have what this worker holds on `device`, and the rest of the model on the meta device, where it costs nothing.

    Args:
        model: With its weights, or on the meta device.
        own: First names of what this worker holds.
        device: Of this worker.
        initial: The weights of a model on the meta device, by first name; each is copied if it is this worker's.
    """
    names = first_names(model)
    placed: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in placed:
                    where = device if names[id(tensor)] in own else torch.device("meta")
                    placed[id(tensor)] = _placed(tensor, where)
                held[name] = placed[id(tensor)]  # type: ignore[assignment]
    if initial is None:
        return
    missing = {names[number]: tensor for number, tensor in placed.items() if names[number] in own}
    with torch.no_grad():
        for name, whole in initial:
            if name in missing:
                missing.pop(name).copy_(whole)
    assert not missing, f"no initial weights for {sorted(missing)}"


def _placed(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device:
        return tensor
    is_moved = "meta" not in (tensor.device.type, device.type)
    moved = tensor.to(device) if is_moved else torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return moved.detach()
    parameter = nn.Parameter(moved.detach(), requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)  # what others have noted on it
    return parameter


def used_by_ends(
    model: nn.Module, blocks: Sequence[nn.Module], before: str | None, after: str | None
) -> tuple[set[int], set[int]]:
    """Tensors that are in no block and that a method uses before the first of them, or after the last; by identity.

    Found by the names that the two methods and those they call have in their code. What neither names may be used in a
    way that does not show, so both ends get it: that costs memory, never a wrong result.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = _outside(model, inside)
    first, last = (_named_in(model, method, inside) if method else set() for method in (before, after))
    neither = outside - first - last
    return first | neither, last | neither


def _outside(module: nn.Module, inside: set[int]) -> set[int]:
    """Tensors of a module, those of some modules inside of it left out."""
    if id(module) in inside:
        return set()
    own = {id(tensor) for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]}
    return own.union(*(_outside(child, inside) for child in module.children()))


def _named_in(model: nn.Module, method: str, inside: set[int]) -> set[int]:
    words = set(_words_of(type(model), method, set()))

    def named(module: nn.Module) -> set[int]:
        found: set[int] = set()
        for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name in words:
                found.add(id(tensor))
        for name, child in module.named_children():
            if name in words and id(child) not in inside:
                # One that cannot be called itself holds others, of which some may be named.
                only_holds = type(child).forward is nn.Module.forward
                found |= (named(child) if only_holds else set()) or _outside(child, inside)
        return found

    return named(model)


def _words_of(kind: type, method: str, seen: set[str]) -> Iterator[str]:
    """Every name and text in the code of a method and of the class's own methods that it names."""
    seen.add(method)
    for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        function = base.__dict__.get(method)
        if isinstance(function, property):
            function = function.fget
        function = inspect.unwrap(getattr(function, "__func__", function)) if function is not None else None
        if not isinstance(function, FunctionType):
            continue
        for word in _words_in(function.__code__):
            yield word
            if word not in seen:
                yield from _words_of(kind, word, seen)


def _words_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _words_in(constant)
