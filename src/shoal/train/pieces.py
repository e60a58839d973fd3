"""The pieces of a model, its repeated blocks and the rest: how large they are, and which of them computes."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from shoal.core.errors import UserError
from shoal.models.blocks import repeated_blocks
from shoal.parallel.sizes import LOSS, ROOT, Piece, Weight
from shoal.parallel.stage_tensors import used_by_ends
from shoal.parallel.stages import row_of
from shoal.train.live import LiveBytes

Blocks = Sequence[tuple[str, nn.Module]]
"""(name, module) in the order in which they are called."""


class Watch:
    """Tells which piece of a model computes, by hooks on its blocks."""

    def __init__(self, model: nn.Module, blocks: Blocks, live: LiveBytes) -> None:
        self.live = live
        self.between = 0
        """Bytes that go from one block to the next, at most."""
        self._of_blocks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """Outputs of blocks."""
        self._hooks: list[Any] = []
        for parameter, piece in _owners(model, blocks).items():
            if parameter.requires_grad:
                note = self._on_gradient(piece)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(note))  # type: ignore[no-untyped-call]
        numbers: dict[nn.Module, list[int]] = {}
        for number, (_, block) in enumerate(blocks):
            numbers.setdefault(block, []).append(number)
        for block, own in numbers.items():
            turns = _Turns(own)
            self._hooks.append(block.register_forward_pre_hook(self._on_entry(turns), with_kwargs=True))
            self._hooks.append(block.register_forward_hook(self._on_exit(turns)))
        self._hooks.append(model.register_forward_pre_hook(lambda *_: live.enter(ROOT, is_backward=False)))
        self._hooks.append(model.register_forward_hook(self._on_output))

    def close(self) -> None:
        """Take the hooks off again."""
        for hook in self._hooks:
            hook.remove()

    def _on_gradient(self, piece: int) -> Callable[[torch.Tensor], None]:
        def note(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                self.live.note_gradient(parameter.grad, piece)

        return note

    def _on_entry(self, turns: "_Turns") -> Callable[..., None]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._in_backward(tensors_in((args, kwargs)), ROOT)
            self.live.enter(turns.next(), is_backward=False)

        return enter

    def _on_exit(self, turns: "_Turns") -> Callable[..., None]:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            tensors = tensors_in(output)
            self.between = max(self.between, num_bytes(tensors))
            self._in_backward(tensors, turns.present)
            self._of_blocks.update(dict.fromkeys(tensors))
            self.live.enter(ROOT, is_backward=False)

        return leave

    def _on_output(self, module: nn.Module, args: Any, output: Any) -> None:
        self._in_backward(tensors_in(output), ROOT)
        self.live.enter(LOSS, is_backward=False)

    def _in_backward(self, tensors: Iterable[torch.Tensor], piece: int) -> None:
        """In the backward pass, this piece is next once these have gradients; of a block's output, that block."""
        for tensor in tensors:
            if tensor.requires_grad and tensor not in self._of_blocks:
                tensor.register_hook(lambda _: self.live.enter(piece, is_backward=True))  # type: ignore[no-untyped-call]


class _Turns:
    """The number of a block; one that is in a row several times has another each time it is called."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = itertools.cycle(numbers)
        self.present = numbers[0]

    def next(self) -> int:
        """It is called once more."""
        self.present = next(self._numbers)
        return self.present


def pieces_of(model: nn.Module, blocks: Blocks) -> tuple[Piece, ...]:
    """The blocks in order, then the rest."""
    owners = _owners(model, blocks)
    in_blocks = {buffer for _, block in blocks for buffer in block.buffers()}
    pieces = []
    for number, (name, block) in enumerate(blocks):
        own = [parameter for parameter, owner in owners.items() if owner == number]
        pieces.append(_piece(name, own, block.buffers()))
    rest = [parameter for parameter, owner in owners.items() if owner == ROOT]
    pieces.append(_piece("", rest, [buffer for buffer in model.buffers() if buffer not in in_blocks]))
    return tuple(pieces)


def _owners(model: nn.Module, blocks: Blocks) -> dict[nn.Parameter, int]:
    """The piece that each weight belongs to."""
    owners = dict.fromkeys(model.parameters(), ROOT)
    for number, (_, block) in enumerate(blocks):
        owners |= dict.fromkeys(block.parameters(), number)
    return owners


def _piece(name: str, parameters: Iterable[nn.Parameter], buffers: Iterable[torch.Tensor]) -> Piece:
    own = list(parameters)
    trained = [parameter for parameter in own if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    return Piece(
        name,
        parameters=sum(parameter.numel() for parameter in own),
        weights=num_bytes(own),
        trained=num_bytes(trained),
        buffers=num_bytes(buffers),
        largest=max((num_bytes([parameter]) for parameter in own), default=0),
        low_rank=sum(matrix.shape[0] + matrix.numel() // max(matrix.shape[0], 1) for matrix in matrices),
        each=tuple(_weight(parameter) for parameter in own if parameter.ndim),
    )


def _weight(parameter: nn.Parameter) -> Weight:
    rows = parameter.shape[0]
    return Weight(rows, num_bytes([parameter]) // max(rows, 1), parameter.requires_grad)


def has_own_blocks(model: nn.Module) -> bool:
    """Whether there are blocks that share no weight with what is outside of them: each can be held by itself."""
    blocks = [block for _, block in repeated_blocks(model)]
    inside = {id(module) for block in blocks for module in block.modules()}
    held = [set(block.parameters()) for block in blocks]
    held.append({p for m in model.modules() if id(m) not in inside for p in m.parameters(recurse=False)})
    return bool(blocks) and sum(map(len, held)) == len(set().union(*held))


def pipeline_ends(model: nn.Module) -> tuple[Piece, Piece] | None:
    """What the first and the last stage of a pipeline have beside their blocks; None where the model cannot be cut."""
    try:
        row = row_of(model)
    except UserError:
        return None
    found = used_by_ends(model, [block for _, block in row.blocks], row.before, row.after)
    first, last = (
        _piece(
            name,
            [parameter for parameter in model.parameters() if id(parameter) in used],
            [buffer for buffer in model.buffers() if id(buffer) in used],
        )
        for name, used in zip(("before the blocks", "after the blocks"), found, strict=True)
    )
    return first, last


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of a batch, or of what a module is given, of any nesting."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """All of them together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
