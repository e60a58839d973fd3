"""A model cut into stages: evenly, with every tensor where it is needed and nowhere else, or refused in words."""

import itertools
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shoal.core.errors import UserError
from shoal.models.gpt import Gpt
from shoal.models.vit import Vit
from shoal.parallel.stage_tensors import first_names, place
from shoal.parallel.stages import Stage, check_blocks, cut, divide, holders, row_of

CPU = torch.device("cpu")


def gpt(*, layers: int = 4, tie_weights: bool = True) -> Gpt:
    return Gpt(11, 6, layers=layers, heads=2, dim=8, tie_weights=tie_weights)


def stages_of(model: nn.Module, num_stages: int) -> list[Stage]:
    return cut(model, row_of(model), num_stages)


def all_divisions(count: int, num_parts: int) -> list[list[range]]:
    cuts = itertools.combinations(range(1, count), num_parts - 1)
    return [[range(a, b) for a, b in itertools.pairwise([0, *cut, count])] for cut in cuts]


@given(st.data())
def test_the_largest_part_is_the_least_possible_and_the_others_even(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    num_parts = data.draw(st.integers(1, len(sizes)))

    def badness(parts: list[range]) -> tuple[int, int]:
        sums = [sum(sizes[part.start : part.stop]) for part in parts]
        return max(sums), sum(each * each for each in sums)

    found = divide(sizes, num_parts)
    assert [number for part in found for number in part] == list(range(len(sizes)))
    assert all(found) and len(found) == num_parts
    assert badness(found) == min(badness(parts) for parts in all_divisions(len(sizes), num_parts))


def test_later_stages_get_the_larger_parts() -> None:
    assert [len(part) for part in divide([1] * 8, 3)] == [2, 3, 3]
    assert [len(part) for part in divide([5] * 4, 4)] == [1, 1, 1, 1]


def test_the_embedding_and_the_head_count_for_the_first_and_the_last_stage() -> None:
    model = Gpt(600, 6, layers=6, heads=2, dim=8, tie_weights=False)  # 4800 numbers each, and 872 a block
    assert [len(stage.blocks) for stage in stages_of(model, 3)] == [1, 4, 1]
    assert [len(stage.blocks) for stage in stages_of(gpt(layers=6), 3)] == [2, 2, 2]


def test_every_tensor_is_on_the_stage_that_computes_with_it() -> None:
    first, *middle, last = stages_of(gpt(tie_weights=False), 4)
    ends = {"token_embedding.weight", "position_embedding.weight", "norm.weight", "norm.bias", "head.weight"}
    assert first.tensors & ends == {"token_embedding.weight", "position_embedding.weight"}
    assert last.tensors & ends == {"norm.weight", "norm.bias", "head.weight"}
    assert [len(stage.tensors & ends) for stage in middle] == [0, 0]
    assert {name.split(".")[1] for name in middle[0].tensors} == {"1"}


def test_a_tied_weight_is_on_both_ends_by_its_first_name() -> None:
    stages = stages_of(gpt(), 4)
    assert [stage.number for stage in stages if "token_embedding.weight" in stage.tensors] == [0, 3]
    assert not any("head.weight" in stage.tensors for stage in stages)
    assert holders(stages, 4)["token_embedding.weight"] == (0, 3)
    assert holders(stages, 2)["token_embedding.weight"] == (0, 1)
    assert holders(stages, 2)["blocks.2.norm1.weight"] == (0,), "stages go round the workers"


def test_parameters_of_the_model_itself_are_found() -> None:
    model = Vit((3, 8, 8), 4, 5, layers=2, heads=2, dim=8, mlp_dim=8)
    first, last = stages_of(model, 2)
    assert {"class_token", "positions", "patches.weight"} <= first.tensors
    assert {"norm.weight", "head.weight"} <= last.tensors
    assert not {"class_token", "positions", "patches.weight"} & last.tensors


class Odd(nn.Module):
    """Parts in a dictionary, a method that calls another, a block without weights, and a part that nobody names."""

    shoal_stages = ("enter", "leave")

    def __init__(self) -> None:
        super().__init__()
        parts = {"embed": nn.Linear(3, 4), "norm": nn.LayerNorm(4), "scale": nn.Linear(4, 4)}
        self.parts = nn.ModuleDict(parts)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)])
        self.hidden = nn.Linear(2, 2)
        self.head = nn.Linear(4, 2)
        self.shift = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return self._embed(x) + self.seen

    def _embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["embed"](x) + self.shift

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.parts.norm(x) + getattr(self.parts, "scale")(x))  # noqa: B009

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def test_what_a_method_uses_is_found_through_others_and_through_dictionaries() -> None:
    model = Odd()
    first, last = stages_of(model, 2)
    named = {name for name in first_names(model).values() if not name.startswith("layers.")}
    assert first.tensors & named == {"parts.embed.weight", "parts.embed.bias", "shift", "seen"} | {
        "hidden.weight",
        "hidden.bias",
    }
    assert last.tensors & named == {name for name in named if name.split(".")[-2:][0] in ("norm", "scale", "head")} | {
        "hidden.weight",
        "hidden.bias",
    }, "what nobody names is on both ends"
    inputs = torch.randn(5, 3)
    assert torch.equal(last(first(inputs)), model(inputs))


def test_every_layer_of_a_sequential_is_called_also_one_that_is_there_twice() -> None:
    act = nn.Tanh()
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), act, nn.Linear(4, 4), act)
    stages = stages_of(model, 5)
    assert [len(stage.blocks) for stage in stages] == [1] * 5
    x = inputs = torch.randn(3, 2, 2)
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, model(inputs))


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("methods", "says"),
    [
        (None, r"^parallel\.strategy: pipeline needs a model that says how it is cut, and Silent does not: give its"),
        (("begin", "end"), r"^model\.name: shoal_stages of Silent names 'begin', which is no method"),
    ],
)
def test_a_model_that_does_not_say_how_it_is_cut_is_refused(methods: Any, says: str) -> None:
    model = Silent()
    if methods:
        model.shoal_stages = methods
    with pytest.raises(UserError, match=says):
        row_of(model)


def test_a_model_without_blocks_is_refused() -> None:
    model = nn.Linear(2, 2)
    model.shoal_stages = (None, None)  # type: ignore[assignment]
    with pytest.raises(UserError, match=r"needs blocks to cut between, and Linear repeats none; .*: fsdp"):
        row_of(model)


@pytest.mark.parametrize(
    ("blocks", "stages", "per_worker", "workers", "says"),
    [
        (3, 4, 1, 4, "4 workers need 4 blocks or more, and the model has 3; nearest that works: 2"),
        (6, 4, 2, 4, "4 workers with 2 stages each need 8 blocks or more, and the model has 6; nearest that works: 2"),
        (3, 2, 2, 4, "need 4 blocks or more, and the model has 3; nearest that works: parallel.strategy fsdp"),
        (1, 3, 1, 3, "the model has 1; nearest that works: parallel.strategy fsdp"),
        (
            9,
            1,
            1,
            1,
            "a pipeline of one worker is none; allowed: 2 and more; nearest that works: parallel.strategy single",
        ),
        (
            9,
            1,
            1,
            4,
            "a pipeline of one worker is none; allowed: 2 and more; nearest that works: parallel.strategy ddp",
        ),
    ],
)
def test_more_stages_than_blocks_are_refused(
    blocks: int, stages: int, per_worker: int, workers: int, says: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_blocks(blocks, stages, per_worker, workers)
    assert str(caught.value).startswith("parallel.pipeline.stages: ")
    assert says in str(caught.value)
    check_blocks(8, 4, 2, 8)


def test_a_worker_keeps_its_own_tensors_and_the_others_have_no_memory() -> None:
    model = gpt()
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.norm.weight.requires_grad_(False)
    cast("Any", model.blocks[0].norm1.weight).note = "kept"
    last = stages_of(model, 4)[-1]
    place(model, last.tensors, CPU, None)
    assert model.head.weight is model.token_embedding.weight, "tied as before"
    assert {name for name, tensor in model.named_parameters() if not tensor.is_meta} == last.tensors
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters() if not tensor.is_meta)
    assert not model.norm.weight.requires_grad and model.head.weight.requires_grad
    assert model.blocks[0].norm1.weight.note == "kept" and model.blocks[0].norm1.weight.is_meta
    assert list(model.state_dict()) == list(before)


def test_weights_come_one_at_a_time_and_only_a_workers_own_are_kept() -> None:
    whole = Odd()
    with torch.device("meta"):
        model = Odd()
    first = stages_of(model, 2)[0]
    given = [(name, tensor.detach()) for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]]
    place(model, first.tensors, CPU, iter(given))
    for name, tensor in given:
        own = model.get_parameter(name) if name != "seen" else model.seen
        assert own.is_meta == (name not in first.tensors)
        assert own.is_meta or torch.equal(own, tensor)
    with torch.device("meta"):
        model = Odd()
    with pytest.raises(AssertionError, match="no initial weights for"):
        place(model, first.tensors, CPU, iter(given[3:]))
