"""What workers hold of a model: statistics that differ, weights that not all use, what cannot be divided."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.parallel.build import build_unit
from shoal.parallel.replica import share_tensors
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit, UnitState
from tests.many import Ranks

MakeRanks = Callable[[int], Ranks]


class Centred(nn.Module):
    """Reads a buffer in training that it moves in training; in place, or by a new tensor."""

    def __init__(self, is_replaced: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int16))
        self.register_buffer("constant", torch.arange(3.0).expand(2, 3))
        self.is_replaced = is_replaced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.training:
            moved = (0.5 * self.centre + 0.5 * y.mean(0)).detach()
            if self.is_replaced:
                self.centre = moved
            else:
                self.centre.copy_(moved)
        return y - self.centre * self.constant[0]


def unit_of(
    process: Process, model: nn.Module, strategy: str, tensor: dict[str, Any] | None = None, **settings: Any
) -> TrainUnit:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model(batch).pow(2).mean()

    objective = Objective(loss, lambda model, batch, count: {"loss": (loss(model, batch) * count, count)})
    settings = {"optim": OptimSection(name="sgd", lr=0.1)} | settings
    section = ParallelSection.model_validate({"strategy": strategy, "tensor": tensor or {}})
    return build_unit(section, model, objective, StepSettings(**settings), process)


def go(unit: TrainUnit, process: Process, first: int, last: int) -> None:
    for step in range(first, last):
        data = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + process.rank))
        unit.forward_backward(StepBatch([MicroBatch(data, 2)], 2 * process.world_size))
        unit.optimizer_step(0.1)


def whole_state(unit: TrainUnit) -> UnitState:
    """As a checkpoint has it: of what only the first worker writes, its own."""
    state = unit.state()
    tensors = {}
    for name, held in state.tensors.items():
        tensors[name] = held.full_tensor().clone() if hasattr(held, "full_tensor") else held.clone()  # type: ignore[union-attr]
    share_tensors([tensors[name] for name in sorted(state.of_first)])
    return UnitState(tensors, state.values)


def resumed_and_not(process: Process, strategy: str, is_replaced: bool) -> tuple[float, list[float], float]:
    """How far a resumed run is from one that was not, its statistics in an evaluation, and the metric of that."""

    def make() -> TrainUnit:
        torch.manual_seed(0)
        return unit_of(process, Centred(is_replaced), strategy)

    undisturbed, before, after = make(), make(), make()
    go(undisturbed, process, 0, 6)
    go(before, process, 0, 3)
    after.load(whole_state(before))
    go(after, process, 3, 6)
    ours, theirs = (dict(unit.full_weights()) for unit in (undisturbed, after))
    difference = max(float((ours[name].double() - theirs[name].double()).abs().max()) for name in ours)
    measured = undisturbed.evaluate(MicroBatch(torch.ones(2, 6), 2))
    return difference, undisturbed.model.centre.tolist(), float(measured["loss"][0])


@pytest.mark.parametrize("is_replaced", [False, True])
def test_statistics_that_training_reads_are_those_that_are_saved(ranks: MakeRanks, is_replaced: bool) -> None:
    one, other = ranks(2)(resumed_and_not, "fsdp", is_replaced)
    assert one == other and one[0] == 0.0
    assert any(one[1])


class Experts(nn.Module):
    """Of which a worker with other samples uses another one; and a scale of one number that some do not use."""

    shoal_tensor = {"experts.*": "logits"}

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(()))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.experts[self.rank](x)
        return y * self.scale if self.rank else y


def other_experts(process: Process, section: dict[str, Any]) -> str:
    torch.manual_seed(0)
    own = process.rank * 2 // process.world_size
    unit = unit_of(process, Experts(own), **section)
    try:
        go(unit, process, 0, 1)
        unit.state()
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("workers", "section", "instead"),
    [
        (2, {"strategy": "fsdp"}, "use parallel.strategy=ddp with parallel.find_unused_parameters=true"),
        (4, {"strategy": "tensor", "tensor": {"size": 2, "across": "fsdp"}}, "use parallel.tensor.across=ddp"),
        (4, {"strategy": "tensor", "tensor": {"size": 2, "across": "ddp"}}, None),
    ],
    ids=["fsdp", "tensor across fsdp", "tensor across ddp"],
)
def test_workers_that_use_other_weights_are_all_told_before_anything_is_saved(
    ranks: MakeRanks, workers: int, section: dict[str, Any], instead: str | None
) -> None:
    for message in ranks(workers)(other_experts, section):
        if instead is None:
            assert message == ""
        else:
            assert message.startswith("model: workers have used different weights in a step")
            assert message.endswith(instead)


def in_double(process: Process) -> tuple[float, float]:
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    alone = nn.Linear(6, 3).double()
    alone.load_state_dict(model.state_dict())
    unit = unit_of(process, model, "fsdp", clip_norm=0.1)
    data = torch.ones(2, 6, dtype=torch.float64)
    unit.forward_backward(StepBatch([MicroBatch(data, 2)], 4))
    unit.optimizer_step(0.1)
    alone(data).pow(2).mean().backward()
    return unit.report()["grad_norm"], float(
        nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])
    )


def test_gradients_in_double_precision_can_be_clipped(ranks: MakeRanks) -> None:
    for found, expected in ranks(2)(in_double):
        assert found == pytest.approx(expected, rel=1e-6)


def refused(process: Process, what: str) -> str:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    if what == "types":
        model[1].bfloat16()
    else:
        model[0].weight.register_hook(lambda gradient: gradient * 2)
    try:
        unit_of(process, model, "fsdp")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("types", "model: fsdp takes weights of one type, and 0.bias is float32, 1.bias is bfloat16; convert them"),
        ("hook", "model: has a hook on the gradient of 0.weight, which a divided model does not keep"),
    ],
)
def test_what_fsdp_would_not_do_right_is_refused(ranks: MakeRanks, what: str, says: str) -> None:
    assert all(message.startswith(says) for message in ranks(2)(refused, what))
