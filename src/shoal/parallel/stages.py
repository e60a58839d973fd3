"""Cutting a model into the stages of a pipeline."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.models.blocks import repeated_blocks
from shoal.parallel.stage_tensors import all_tensors, first_names, used_by_ends


@dataclass(frozen=True)
class Row:
    """A model as blocks that are called one after the other, each with what the one before gave."""

    blocks: list[tuple[str, nn.Module]]
    before: str | None = None
    """The model's method that makes the first block's input out of its own."""
    after: str | None = None
    """The one that makes the model's output out of the last block's."""


@dataclass(frozen=True)
class Stage:
    """A part of a model that one worker computes in one go."""

    number: int
    is_last: bool
    blocks: list[nn.Module]
    before: Callable[..., Any] | None
    after: Callable[[Any], Any] | None
    tensors: frozenset[str]
    """Parameters and buffers that it computes with, each by its first name in the model."""

    def __call__(self, *inputs: Any) -> Any:
        """From the stage before to the stage after."""
        if self.before is None and len(inputs) != 1:
            raise UserError(f"task: the model is called with {len(inputs)} inputs, and its first block takes one")
        x = self.before(*inputs) if self.before is not None else inputs[0]
        for block in self.blocks:
            x = block(x)
        if self.is_last:
            return x if self.after is None else self.after(x)
        if not isinstance(x, torch.Tensor):
            raise UserError(
                f"parallel.strategy: pipeline sends one tensor from block to block, and "
                f"{type(self.blocks[-1]).__name__} gives a {type(x).__name__}; nearest that works: fsdp"
            )
        return x.contiguous()


def row_of(model: nn.Module) -> Row:
    """How a model is made up; a user error where it does not say."""
    methods = getattr(model, "shoal_stages", None)
    if methods is None:
        if type(model).forward is nn.Sequential.forward:
            return Row(list(model._modules.items()))  # type: ignore[arg-type]
        raise UserError(
            f"parallel.strategy: pipeline needs a model that says how it is cut, and {type(model).__name__} does not: "
            "give its class `shoal_stages = (METHOD, METHOD)`, the names of what runs before the first of its blocks "
            "and after the last, and keep the blocks in one nn.ModuleList; nearest that works: fsdp"
        )
    before, after = methods
    for method in (before, after):
        if method is not None and not callable(getattr(model, method, None)):
            raise UserError(f"model.name: shoal_stages of {type(model).__name__} names {method!r}, which is no method")
    return Row(_all_blocks(model), before, after)


def _all_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    found = repeated_blocks(model)
    if not found:
        raise UserError(
            f"parallel.strategy: pipeline needs blocks to cut between, and {type(model).__name__} repeats none; keep "
            "them in one nn.ModuleList; nearest that works: fsdp"
        )
    if getattr(model, "shoal_blocks", None) is not None:
        return found
    # All of the list: those without weights, and one that is there several times, are called as well.
    prefix = found[0][0].rpartition(".")[0]
    children = model.get_submodule(prefix)._modules
    return [(f"{prefix}.{name}" if prefix else name, child) for name, child in children.items() if child is not None]


def check_blocks(num_blocks: int, stages: int, per_worker: int, workers: int) -> None:
    """Raise `UserError` unless there is a block for every stage.

    Args:
        num_blocks: Of the model.
        stages: Workers in one pipeline.
        per_worker: Stages on each of them.
        workers: In all pipelines together.
    """
    if stages == 1:
        raise UserError(
            "parallel.pipeline.stages: a pipeline of one worker is none; allowed: 2 and more; nearest that works: "
            f"parallel.strategy {'single' if workers == 1 else 'ddp'}"
        )
    if num_blocks >= stages * per_worker:
        return
    fitting = [size for size in range(2, workers + 1) if workers % size == 0 and size * per_worker <= num_blocks]
    each = f" with {per_worker} stages each" if per_worker > 1 else ""
    raise UserError(
        f"parallel.pipeline.stages: {stages} workers{each} need {stages * per_worker} blocks or more, and the model "
        f"has {num_blocks}; nearest that works: {max(fitting) if fitting else 'parallel.strategy fsdp'}"
    )


def cut(model: nn.Module, row: Row, num_stages: int) -> list[Stage]:
    """The stages of a model, in order.

    The largest has as few bytes of parameters and buffers as can be, because it decides whether the model fits. What
    runs before the first block counts for the first stage, what runs after the last for the last one.
    """
    names = first_names(model)
    sizes = {names[id(tensor)]: tensor.numel() * tensor.element_size() for tensor in all_tensors(model)}
    parts = [{names[id(tensor)] for tensor in all_tensors(block)} for _, block in row.blocks]
    first, last = used_by_ends(model, [block for _, block in row.blocks], row.before, row.after)
    parts[0] |= {names[number] for number in first}
    parts[-1] |= {names[number] for number in last}
    # One more for each, so that blocks without weights are divided by their number.
    ranges = divide([sum(sizes[name] for name in part) + 1 for part in parts], num_stages)
    return [
        Stage(
            number,
            is_last=number == num_stages - 1,
            blocks=[block for _, block in row.blocks[found.start : found.stop]],
            before=getattr(model, row.before) if row.before and number == 0 else None,
            after=getattr(model, row.after) if row.after and number == num_stages - 1 else None,
            tensors=frozenset().union(*parts[found.start : found.stop]),
        )
        for number, found in enumerate(ranges)
    ]


def divide(sizes: Sequence[int], num_parts: int) -> list[range]:
    """Consecutive `sizes` in parts of one or more, so that the largest part is the least possible.

    Of all such divisions the most even one; of those the one whose later parts are the larger ones, because earlier
    stages hold the activations of more micro-batches.
    """
    assert 0 < num_parts <= len(sizes)
    limit = _least_largest(sizes, num_parts)
    # best[number]: for that many sizes from the first on, the sum of squares and where the last part begins.
    best: list[tuple[int, list[int]] | None] = [(0, []), *[None] * len(sizes)]
    for _ in range(num_parts):
        found: list[tuple[int, list[int]] | None] = [None] * (len(sizes) + 1)
        for end in range(1, len(sizes) + 1):
            total = 0
            for start in range(end - 1, -1, -1):
                total += sizes[start]
                if total > limit:
                    break
                before, so_far = best[start], found[end]
                if before is not None and (so_far is None or before[0] + total * total <= so_far[0]):
                    found[end] = (before[0] + total * total, [*before[1], start])
        best = found
    chosen = best[-1]
    assert chosen is not None
    starts = [*chosen[1], len(sizes)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def _least_largest(sizes: Sequence[int], num_parts: int) -> int:
    low, high = max(sizes), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        parts, total = 1, 0
        for size in sizes:
            total += size
            if total > middle:
                parts, total = parts + 1, size
        low, high = (low, middle) if parts <= num_parts else (middle + 1, high)
    return low


def holders(stages: Sequence[Stage], num_workers: int) -> dict[str, tuple[int, ...]]:
    """Which workers of a pipeline hold each tensor, the one with its first stage first; stage s is on worker s % n."""
    found: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.tensors:
            workers = found.setdefault(name, [])
            if stage.number % num_workers not in workers:
                workers.append(stage.number % num_workers)
    return {name: tuple(workers) for name, workers in found.items()}
