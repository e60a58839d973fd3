"""A model's plan: what it says is taken, and what cannot work is refused with the reason and the nearest that does."""

from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.models.gpt import Gpt
from shoal.models.vit import Vit
from shoal.parallel.tensor_plan import WORDS, Plan, read_plan


def gpt(heads: int = 6, **options: Any) -> Gpt:
    with torch.device("meta"):
        return Gpt(100, 12, layers=2, heads=heads, dim=24, **options)


def vit(image_shape: tuple[int, int, int] = (3, 8, 8)) -> Vit:
    with torch.device("meta"):
        return Vit(image_shape, 4, 10, layers=3, heads=4, dim=16, mlp_dim=24)


class Small(nn.Module):
    """As a user may write one."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.shoal_tensor = plan
        self.embedding = nn.Embedding(7, 6, max_norm=1.0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(6))
        self.heads = nn.ModuleList()


def test_the_plans_of_our_own_models() -> None:
    plan = read_plan(gpt(), 2, 4)
    assert plan.words["blocks.1.attention.qkv_by_head"] == "columns"
    assert plan.words["token_embedding"] == "vocabulary" and "position_embedding" not in plan.words
    assert {"norm.weight", "norm.bias", "blocks.0.norm2.weight"} <= plan.of_tokens
    assert not any("mlp" in name or "attention" in name for name in plan.of_tokens)
    plan = read_plan(vit(), 4, 4)
    assert plan.words["norm"] == "join" and plan.words["blocks.2.mlp.project"] == "rows"
    assert set(read_plan(gpt(), 2, 2).words.values()) | {"join"} == set(WORDS)


@pytest.mark.parametrize(
    ("model", "size", "divides"),
    [(gpt(), 2, True), (gpt(), 1, False), (gpt(), 6, True), (vit(), 2, False), (vit((3, 4, 12)), 4, True)],
)
def test_tokens_are_divided_where_their_number_allows(model: nn.Module, size: int, divides: bool) -> None:
    assert read_plan(model, size, size).can_divide_tokens == divides
    assert not Plan({}, frozenset(), 2, None).can_divide_tokens


def test_names_may_be_patterns_and_parameters() -> None:
    plan = read_plan(Small({"layers.*": "columns", "layers.1": "rows", "scale": "tokens", "norm": "tokens"}), 2, 2)
    assert plan.words == {"layers.0": "columns", "layers.1": "rows", "norm": "tokens"}
    assert plan.of_tokens == {"scale", "norm.weight", "norm.bias"}


def tied_otherwise() -> Gpt:
    model = gpt()
    model.shoal_tensor = {**model.shoal_tensor, "head": "rows"}
    return model


def tied_to_whole() -> Small:
    model = Small({"norm": "tokens"})
    model.scale = model.norm.weight
    return model


@pytest.mark.parametrize(
    ("model", "size", "says"),
    [
        (nn.Linear(2, 2), 2, r"^parallel\.strategy: tensor needs a model that says how .* Linear does not; .*: fsdp$"),
        (
            gpt(),
            4,
            r"^parallel\.tensor\.size: 4 workers .* the model's 6 heads; sizes that work with 12 workers: 2, 3, 6$",
        ),
        (gpt(heads=1), 2, r"^parallel\.tensor\.size: 2 workers .* the model's 1 heads; use parallel\.strategy fsdp$"),
        (Small({"layers.*": "columns"}), 4, r"the model's 6 features of layers\.0; sizes .* 12 workers: 2, 3, 6$"),
        (Small({"layers.*": "rows"}), 4, r"the model's 6 features of layers\.0; "),
        (
            Small({"layers.*": "logits"}),
            5,
            r"size: 5 workers cannot all have one of the 6 rows of layers\.0; set fewer",
        ),
        (
            Small({"layer.*": "rows"}),
            2,
            r"^model\.name: shoal_tensor of Small names 'layer\.\*', which is no submodule; ",
        ),
        (Small({"scale": "join"}), 2, r"names 'scale', which is no submodule; "),
        (Small({"norm": "token"}), 2, r"says 'token' of 'norm'; did you mean tokens\? allowed: vocabulary, split, "),
        (Small({"norm": None}), 2, r"says None of 'norm'; allowed: "),
        (Small({"norm": "rows"}), 2, r"says 'rows' of 'norm', which must be an nn\.Linear, not LayerNorm$"),
        (Small({"embedding": "vocabulary"}), 2, r"an nn\.Embedding with max_norm, .* which cannot be divided"),
        (Small(["norm"]), 2, r"^model\.name: shoal_tensor of Small should map names of submodules to words$"),
        (
            tied_otherwise(),
            2,
            r"divides token_embedding\.weight and head\.weight in different ways, .* one tied weight",
        ),
        (tied_to_whole(), 2, r"divides scale and norm\.weight in different ways"),
    ],
)
def test_what_cannot_work_is_refused(model: nn.Module, size: int, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_plan(model, size, 12)
