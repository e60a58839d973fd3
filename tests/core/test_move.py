from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from shoal.core.move import leaves, move


class Pair(NamedTuple):
    first: Any
    second: Any


class Opaque:
    """Moves itself and does not say what is inside."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def to(self, device: torch.device) -> "Opaque":
        return Opaque(self.tensor.to(device))


def test_batches_of_any_nesting_move_and_stay_of_their_kind() -> None:
    batch = OrderedDict(a=[torch.ones(1), ("text", 3)], b=Pair(torch.zeros(2), None), c=Opaque(torch.zeros(1)))
    moved = move(batch, torch.device("meta"))
    assert isinstance(moved, OrderedDict) and isinstance(moved["b"], Pair) and isinstance(moved["a"], list)
    assert moved["a"][0].is_meta and moved["b"].first.is_meta and moved["c"].tensor.is_meta
    assert moved["a"][1] == ("text", 3) and moved["b"].second is None
    assert not batch["a"][0].is_meta, "the batch that is given stays as it is"


def test_leaves_are_what_move_comes_to() -> None:
    batch = {"a": torch.zeros(2), "b": [Pair(torch.ones(1), "text"), (3, None)], "c": Opaque(torch.zeros(1))}
    assert [type(leaf) for leaf in leaves(batch)] == [torch.Tensor, torch.Tensor, str, int, type(None), Opaque]
    assert [leaf.shape for leaf in leaves(torch.zeros(3, 2))] == [(3, 2)], "a tensor is one, not its rows"
