"""The words of a plan on real workers: the forward and backward pass of the layer as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.parallel.mesh import TENSOR, build_mesh
from shoal.parallel.section import ParallelSection
from shoal.parallel.tensor_plan import read_plan
from shoal.parallel.tensor_styles import divide_layers
from tests.many import Ranks

MakeRanks = Callable[[int], Ranks]
VOCABULARY, DIM = 11, 6


class Layers(nn.Module):
    """An embedding and a projection onto it, tied, with a linear layer between them."""

    def __init__(self, plan: dict[str, str], padding: int | None = None) -> None:
        super().__init__()
        self.shoal_tensor = {"embedding": "vocabulary", "head": "logits"} | plan
        self.embedding = nn.Embedding(VOCABULARY, DIM, padding_idx=padding)
        self.middle = nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(torch.tanh(self.middle(self.embedding(tokens))))
        return logits


class Dropping(nn.Module):
    """Drops some of what a worker's own tokens are."""

    shoal_tensor = {"start": "split", "drop": "tokens", "end": "join"}
    num_tokens = 4

    def __init__(self) -> None:
        super().__init__()
        self.start, self.drop, self.end = nn.Identity(), nn.Dropout(0.5), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.end(self.drop(self.start(x)))
        return out


def divided(process: Process, model: nn.Module, sequence: bool = False) -> nn.Module:
    mesh = build_mesh(ParallelSection(strategy="tensor"), "tensor", process).part(TENSOR)
    assert mesh is not None
    divide_layers(model, read_plan(model, process.world_size, process.world_size), mesh, sequence)
    return model


def differences(process: Process, padding: int | None) -> dict[str, Any]:
    """How far logits and gradients are from those of the model as it was."""
    torch.manual_seed(0)
    whole, other = Layers({}, padding), Layers({}, padding)
    other.load_state_dict(whole.state_dict())
    model = divided(process, other)
    tokens = torch.randint(0, VOCABULARY, (4, 5))
    expected, found = whole(tokens), model(tokens)
    expected.square().mean().backward()
    found.square().mean().backward()
    weight = model.embedding.weight
    gradients = zip(whole.parameters(), model.parameters(), strict=True)
    return {
        "logits": float((expected - found).detach().abs().max()),
        "gradients": [float((a.grad - full(b.grad)).abs().max()) for a, b in gradients],
        "tied": model.head.weight is weight and len(list(model.parameters())) == 3,
        "rows": len(weight.to_local()),
        "placed": weight.grad.placements == weight.placements,
        "view": found._is_view(),
    }


def full(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


@pytest.mark.parametrize("padding", [None, 2, 9])
def test_a_vocabulary_that_is_divided_unevenly_and_tied(ranks: MakeRanks, padding: int | None) -> None:
    found = ranks(3)(differences, padding)
    for each in found:
        assert each["logits"] < 1e-5 and max(each["gradients"]) < 1e-5
        assert each["tied"] and each["placed"] and not each["view"]
    assert [each["rows"] for each in found] == [4, 4, 3]


@pytest.mark.parametrize(("token", "fails_on"), [(VOCABULARY, 1), (-1, 0)])
def test_a_token_that_there_is_not_is_an_error(token: int, fails_on: int) -> None:
    ranks = Ranks(2)  # their own: those who wait for one that failed are of no further use
    try:
        with pytest.raises(AssertionError, match=rf"rank {fails_on}: [\s\S]*index out of range"):
            ranks(look_up_and_fail, token, timeout_s=20.0)
    finally:
        ranks.close()


def drop(process: Process) -> tuple[torch.Tensor, torch.Tensor]:
    model = divided(process, Dropping(), sequence=True)
    torch.manual_seed(3)
    x = torch.ones(1, 4, 30, requires_grad=True)
    out = model(x)
    (out * out.detach()).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def test_each_drops_by_itself_of_its_own_tokens(ranks: MakeRanks) -> None:
    (out, gradient), (other_out, other_gradient) = ranks(2)(drop)
    assert torch.equal(out, other_out) and torch.equal(gradient, other_gradient), "what is joined is whole"
    assert not torch.equal(out[:, :2], out[:, 2:]), "but drawn apart"
    assert set(out.unique().tolist()) == {0.0, 2.0} and torch.equal(gradient, out * 2)


def look_up_and_fail(process: Process, token: int) -> None:
    divided(process, Layers({}))(torch.full((1, 2), token))


def without_gather(process: Process) -> str:
    model = divided(process, Layers({"middle": "columns"}))
    with pytest.raises(UserError) as caught:
        model(torch.zeros(1, 2, dtype=torch.long))
    return str(caught.value)


def test_columns_without_gather_are_an_error(ranks: MakeRanks) -> None:
    for message in ranks(2)(without_gather):
        assert message.startswith("model.name: shoal_tensor says 'columns' of 'middle', and what that is given has not")
