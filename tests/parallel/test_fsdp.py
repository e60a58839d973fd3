"""Fully sharded data parallel on real processes: the numbers of one process, whatever the model is made of."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.deferred import Deferred
from shoal.core.objective import Objective
from shoal.core.parts import is_distributed
from shoal.core.process import Process
from shoal.data.dataset import MemoryDataset
from shoal.data.loader import train_batches
from shoal.data.order import Order
from shoal.models.gpt import Gpt
from shoal.models.lstm import LstmLayer
from shoal.models.mlp import Mlp
from shoal.parallel.build import build_unit
from shoal.parallel.numerics import torch_settings
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, UnitState
from shoal.train.failure import in_words
from tests.many import CPU, Ranks
from tests.parallel.test_ddp import PartlyUsed, TwoViews, count_rows, mean_loss, measure, sum_and_count

MakeRanks = Callable[[int], Ranks]
Numbers = dict[str, torch.Tensor]
ALONE = Process(0, 1, CPU)


class Odd(nn.Module):
    """Sizes that divide by nothing, weights that lie oddly in memory, frozen ones, numbers that cannot be divided."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(6, 1)
        self.widen = nn.Linear(1, 5, bias=False)
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.of_more = nn.Parameter(torch.randn(8)[1:7].view(2, 3))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.widen.scale = self.scale
        self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("portion", torch.tensor(0.5))
        self.widen.register_buffer("portion", self.portion)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.widen(self.narrow(inputs))) * self.scale * self.portion
        return x @ self.turned * self.fixed * self.widen.scale + self.of_more.sum(0)


class Blocks(nn.Module):
    """Blocks between two layers; two of them may have one weight, one may be used twice."""

    def __init__(self, tied: bool = False, reused: bool = False, norms: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        norm = (lambda: nn.BatchNorm1d(5)) if norms else nn.Identity
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), norm(), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(5, 3)
        if tied:
            self.blocks[2][0].weight = self.blocks[0][0].weight
        self.order = (0, 1, 2, 1) if reused else (0, 1, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.first(inputs)
        for number in self.order:
            x = x + self.blocks[number](x)
        return self.last(x)


class Recurrent(nn.Module):
    """An LSTM lists its weights besides holding them."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, 2)
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(inputs[None])[0][0])


class OwnRecurrent(nn.Module):
    """Ours, which also knows processors for which torch has no bfloat16 LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = LstmLayer(6, 5, bidirectional=False)
        self.last = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(inputs[None], torch.empty(0))[0])


def loss_of_two_passes(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]) + model(-batch[0]), batch[1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: Mlp(6, [16, 16], 3),
    "odd": Odd,
    "blocks": Blocks,
    "tied": lambda: Blocks(tied=True),
    "reused": lambda: Blocks(reused=True),
    "norms": lambda: Blocks(norms=True),
    "lstm": Recurrent,
    "own_lstm": OwnRecurrent,
    "partly_used": PartlyUsed,
    "two_views": TwoViews,
}
OBJECTIVES = {
    "mean": Objective(mean_loss, measure),
    "sum": Objective(sum_and_count, measure),
    "count": Objective(sum_and_count, measure, count_rows),
    "twice": Objective(loss_of_two_passes, measure),
    "scaled": Objective(lambda model, batch: mean_loss(model, batch) * 2e4, measure),
}


@dataclass(frozen=True)
class Setup:
    """What is trained and how; the same everywhere, because it is made from a seed."""

    model: str = "blocks"
    objective: str = "mean"
    fsdp: dict[str, Any] = field(default_factory=dict)
    strategy: str = "fsdp"
    deferred: bool = True
    """As a run does it: built without memory."""
    size: int = 29
    """Samples; the last step of an epoch has five of them, so that some workers only stand in."""
    micro_batch: int = 2
    steps: int = 4
    optim: dict[str, Any] = field(default_factory=lambda: {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3})
    clip_norm: float | None = 0.5
    precision: str = "fp32"
    recompute: bool = False
    compile: bool = False
    nodes: tuple[str, ...] = ()

    def unit(self, process: Process) -> Any:
        torch.manual_seed(0)
        if self.nodes:
            process = dataclasses.replace(process, node=self.nodes[process.rank])
        section = ParallelSection(strategy=self.strategy, fsdp=self.fsdp)
        settings = StepSettings(
            optim=OptimSection(**self.optim),
            precision=self.precision,
            clip_norm=self.clip_norm,
            activation_checkpointing=self.recompute,
            compile=self.compile,
        )
        build, objective = MODELS[self.model], OBJECTIVES[self.objective]
        if not self.deferred or self.strategy == "single":
            return build_unit(section, build(), objective, settings, process)
        deferred = Deferred(build)
        return build_unit(section, deferred.model, objective, settings, process, deferred.weights())

    def dataset(self) -> MemoryDataset:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(self.size, 6, generator=generator)
        return MemoryDataset(inputs, torch.randint(0, 3, (self.size,), generator=generator))

    def batches(self, unit: Any, first: int = 0) -> Iterator[StepBatch]:
        return train_batches(
            self.dataset(),
            Order(self.size, 12, seed=3),
            first,
            self.steps,
            rank=unit.data_rank,
            world_size=unit.data_size,
            micro_batch=self.micro_batch,
        )


@dataclass(frozen=True)
class Trained:
    """What came out."""

    initial: Numbers
    weights: Numbers
    losses: list[float]
    reports: list[dict[str, float]]
    measured: float
    """The loss of an evaluation."""


def full_weights(unit: Any) -> Numbers:
    return {name: tensor.clone() for name, tensor in unit.full_weights()}


def train(process: Process, setup: Setup) -> Trained:
    unit = setup.unit(process)
    initial, losses, reports = full_weights(unit), [], []
    for step in setup.batches(unit):
        loss = unit.forward_backward(step)
        unit.optimizer_step(setup.optim["lr"])
        total, count = process.group.sum(sum(float(term) * weight for term, weight in loss.terms), float(loss.count))
        losses.append(total / count)
        reports.append(unit.report())
    return Trained(initial, full_weights(unit), losses, reports, evaluate(unit, setup))


def evaluate(unit: Any, setup: Setup) -> float:
    unit.model.eval()
    inputs, labels = setup.dataset().tensors
    measured = float(unit.evaluate(MicroBatch((inputs[:8], labels[:8]), 8))["loss"][0])
    unit.model.train()
    return measured


def train_alone(setup: Setup) -> Trained:
    with torch_settings(threads=1):
        return train(ALONE, dataclasses.replace(setup, strategy="single"))


def difference(one: Numbers, other: Numbers) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name].double() - tensor.double()).abs().max()) for name, tensor in other.items() if len(one))


def assert_trained_alike(found: list[Trained], expected: Trained, tolerance: float = 1e-6) -> None:
    for worker in found:
        assert worker.initial.keys() == expected.initial.keys()
        assert all(torch.equal(worker.initial[name], tensor) for name, tensor in expected.initial.items())
        assert difference(without_empty(worker.weights), without_empty(expected.weights)) <= tolerance
        assert worker.losses == pytest.approx(expected.losses, abs=tolerance)
        assert worker.measured == pytest.approx(expected.measured, abs=10 * tolerance)
        norms = [report.get("grad_norm") for report in worker.reports]
        assert norms == pytest.approx([report.get("grad_norm") for report in expected.reports], abs=tolerance)
        assert all(torch.equal(worker.weights[name], tensor) for name, tensor in found[0].weights.items())


def without_empty(numbers: Numbers) -> Numbers:
    return {name: tensor for name, tensor in numbers.items() if tensor.numel()}


@pytest.mark.parametrize(
    ("model", "world_size"),
    [*((model, 2) for model in ("mlp", "odd", "tied", "reused", "lstm", "partly_used")), ("odd", 4), ("tied", 4)],
)
def test_any_model_trains_as_in_one_process_and_begins_with_its_very_weights(
    ranks: MakeRanks, model: str, world_size: int
) -> None:
    setup = Setup(model)
    assert_trained_alike(ranks(world_size)(train, setup), train_alone(setup))


@pytest.mark.parametrize("model", ["odd", "tied"])
def test_a_model_that_was_built_in_memory_trains_the_same(ranks: MakeRanks, model: str) -> None:
    setup = Setup(model, deferred=False)
    assert_trained_alike(ranks(2)(train, setup), train_alone(setup))


@pytest.mark.parametrize(
    "fields",
    [
        {"objective": "sum", "model": "odd"},
        {"objective": "count"},
        {"objective": "count", "fsdp": {"reduce_every_micro_batch": False}, "model": "odd"},
        {"objective": "sum", "fsdp": {"reduce_every_micro_batch": False}, "model": "odd"},
        {"objective": "twice", "model": "mlp"},
        {"fsdp": {"reshard_after_forward": False}},
        {"fsdp": {"cpu_offload": True}, "model": "odd"},
        {"recompute": True, "fsdp": {"reduce_every_micro_batch": False}},
        {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}, "model": "odd"},
        {"optim": {"name": "adam", "lr": 0.01, "eps": 1e-3}, "model": "odd", "clip_norm": None},
        {"micro_batch": 12, "size": 25, "model": "mlp"},
    ],
    ids=str,
)
def test_settings_and_tasks_change_no_number(ranks: MakeRanks, fields: dict[str, Any]) -> None:
    setup = Setup(**fields)
    assert_trained_alike(ranks(2)(train, setup), train_alone(setup))


@pytest.mark.parametrize(
    "fields",
    [
        {"fsdp": {"shard_size": 1}},
        {"fsdp": {"shard_size": "node"}, "nodes": ("a", "a", "b", "b")},
        {"fsdp": {"shard_size": "node", "reduce_every_micro_batch": False}, "nodes": ("a", "b", "c", "d")},
        {"fsdp": {"shard_size": 2, "cpu_offload": True}, "objective": "count"},
    ],
    ids=str,
)
def test_several_copies_train_as_one(ranks: MakeRanks, fields: dict[str, Any]) -> None:
    setup = Setup("odd", **fields)
    assert_trained_alike(ranks(4)(train, setup), train_alone(setup))


def held(process: Process, setup: Setup) -> dict[str, int]:
    """Elements of each weight and of its optimizer state that are on this worker."""
    unit = setup.unit(process)
    unit.forward_backward(next(iter(setup.batches(unit))))
    unit.optimizer_step(0.01)
    return {
        name: (tensor.to_local() if is_distributed(tensor) else tensor).numel()
        for name, tensor in unit.state().tensors.items()
    }


def test_a_worker_holds_its_part_of_a_copy_alone(ranks: MakeRanks) -> None:
    size = Mlp(6, [16, 16], 3).layers[3].weight.numel()
    for shard_size, parts in ((None, 4), (2, 2), (1, 1)):
        for worker in ranks(4)(held, Setup("mlp", fsdp={"shard_size": shard_size})):
            for name in ("model.layers.3.weight", "optim.layers.3.weight.exp_avg"):
                assert worker[name] == size // parts


def statistics(process: Process, setup: Setup) -> tuple[Numbers, Numbers, float, frozenset[str]]:
    """Batch norm's running statistics before an evaluation and after, and what it measures."""
    unit = setup.unit(process)
    for step in setup.batches(unit):
        unit.forward_backward(step)
        unit.optimizer_step(0.01)
    before = {name: tensor.clone() for name, tensor in unit.model.named_buffers()}
    measured = evaluate(unit, setup)
    return before, dict(unit.model.named_buffers()), measured, unit.state().of_first


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", False), ("bf16", True)])
def test_an_evaluation_sees_the_first_workers_statistics(ranks: MakeRanks, precision: str, recompute: bool) -> None:
    setup = Setup("norms", precision=precision, recompute=recompute, size=36, micro_batch=3)
    found = ranks(2)(statistics, setup)
    (first, after, loss, of_first), (second, *_) = found
    assert difference(first, second) > 0
    assert all(tensor.dtype in (torch.float32, torch.int64) for tensor in first.values())
    assert of_first == {f"model.{name}" for name in first}
    for _, after_too, loss_too, _ in found:
        assert all(torch.equal(after_too[name], tensor) for name, tensor in first.items())
        assert loss_too == loss
    assert int(after["blocks.0.1.num_batches_tracked"]) == 8, "a repetition of the forward pass counts nothing"


@pytest.mark.parametrize(
    ("fields", "tolerance"),
    [
        ({"precision": "bf16"}, 5e-3),
        ({"precision": "bf16", "fsdp": {"param_dtype": "fp32"}}, 5e-3),
        ({"precision": "bf16", "fsdp": {"reduce_dtype": "bf16", "cpu_offload": True}}, 1e-2),
        ({"precision": "fp16"}, 1e-3),
        ({"precision": "fp16", "fsdp": {"reduce_every_micro_batch": False}, "clip_norm": None}, 1e-3),
        ({"fsdp": {"param_dtype": "bf16"}}, 1e-2),
    ],
    ids=str,
)
def test_half_precision_trains_about_the_same_and_keeps_whole_weights(
    ranks: MakeRanks, fields: dict[str, Any], tolerance: float
) -> None:
    expected = train_alone(Setup(clip_norm=fields.get("clip_norm", 0.5)))
    found = ranks(2)(train, Setup(**fields))
    for worker in found:
        assert all(tensor.dtype == torch.float32 for tensor in worker.weights.values())
        assert all(torch.equal(worker.initial[name], tensor) for name, tensor in expected.initial.items())
        assert worker.losses == pytest.approx(expected.losses, abs=tolerance) and worker.losses != expected.losses
        assert difference(worker.weights, found[0].weights) == 0
        if fields.get("precision") == "fp16":
            assert [report["loss_scale"] for report in worker.reports] == [65536.0] * 4


def overflow(process: Process, clip_norm: float | None) -> list[tuple[float, Numbers]]:
    """Loss scale and weights after each step; before the second one worker finds an infinity in its part."""
    setup = Setup(precision="fp16", clip_norm=clip_norm)
    unit, went = setup.unit(process), []
    for number, step in enumerate(setup.batches(unit)):
        unit.forward_backward(step)
        if number == 1 and process.rank == 1:
            unit.model.last.weight.grad.to_local()[-1, 0] = torch.inf
        unit.optimizer_step(0.01)
        went.append((unit.report()["loss_scale"], full_weights(unit)))
    return went


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_what_overflows_on_one_worker_is_left_out_by_all(ranks: MakeRanks, clip_norm: float | None) -> None:
    for worker in ranks(2)(overflow, clip_norm):
        scales, weights = zip(*worker, strict=True)
        assert scales == (65536.0, 32768.0, 32768.0, 32768.0)
        assert difference(weights[1], weights[0]) == 0 and difference(weights[2], weights[1]) > 0
        assert all(bool(tensor.isfinite().all()) for tensor in weights[-1].values())


def test_a_scale_that_is_too_large_is_found_by_all(ranks: MakeRanks) -> None:
    """A loss of some 20 thousand times 65536 overflows in the backward pass itself."""
    found = ranks(2)(train, Setup(objective="scaled", precision="fp16", steps=3))
    for worker in found:
        assert [report["loss_scale"] for report in worker.reports] == [32768.0, 16384.0, 8192.0]
        assert difference(worker.weights, worker.initial) == 0


def go_on_from_a_state(process: Process, setup: Setup, at: int) -> tuple[Numbers, Numbers, Numbers]:
    """Where some steps lead: undisturbed, loaded into a new unit, and into one process of its own."""
    unit, kept = setup.unit(process), None
    for number, step in enumerate(setup.batches(unit), 1):
        unit.forward_backward(step)
        unit.optimizer_step(0.01)
        evaluate(unit, setup)  # which gathers weights, and may leave them so
        if number == at:
            state = unit.state()
            whole = {
                name: (tensor.full_tensor() if is_distributed(tensor) else tensor).clone()
                for name, tensor in state.tensors.items()
            }
            kept = UnitState(whole, state.values)
    assert kept is not None
    other = dataclasses.replace(setup, deferred=False).unit(process)
    evaluate(other, setup)
    other.load(kept)
    for step in setup.batches(other, at):
        other.forward_backward(step)
        other.optimizer_step(0.01)
    alone = dataclasses.replace(setup, strategy="single").unit(ALONE)
    alone.load(kept)
    for step in setup.batches(alone, at):
        alone.forward_backward(step)
        alone.optimizer_step(0.01)
    return full_weights(unit), full_weights(other), full_weights(alone)


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "odd"},
        {"model": "odd", "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.9}},
        {"model": "tied", "fsdp": {"reshard_after_forward": False}},
        {"model": "blocks", "fsdp": {"cpu_offload": True}},
        {"model": "own_lstm", "precision": "bf16"},
    ],
    ids=str,
)
def test_a_state_goes_on_to_the_last_bit_and_in_one_process(ranks: MakeRanks, fields: dict[str, Any]) -> None:
    for undisturbed, resumed, alone in ranks(2)(go_on_from_a_state, Setup(**fields), 2):
        assert all(torch.equal(resumed[name], tensor) for name, tensor in undisturbed.items())
        tolerance = 2e-2 if "precision" in fields else 1e-6  # one process may compute in floats what bfloat16 has not
        assert difference(without_empty(alone), without_empty(undisturbed)) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_are_compiled_one_by_one(ranks: MakeRanks, recompute: bool) -> None:
    setup = Setup(compile=True, recompute=recompute)
    expected = train_alone(dataclasses.replace(setup, compile=False))
    for worker in ranks(2)(train, setup, timeout_s=500.0):
        assert worker.losses == pytest.approx(expected.losses, abs=1e-5)
        assert difference(worker.weights, expected.weights) < 1e-5


def uses_a_part_of_the_model(process: Process, task: str) -> str:
    """What a user is told whose task does not call the model."""
    losses = {
        "method": lambda model, batch: F.cross_entropy(model.head(model.encode(batch[0])), batch[1]),
        "weight": lambda model, batch: mean_loss(model, batch) + model.head.weight.pow(2).sum(),
    }
    objective = Objective(losses[task], measure)
    section = ParallelSection(strategy="fsdp")
    unit = build_unit(section, TwoViews(), objective, StepSettings(optim=OptimSection()), process)
    with pytest.raises(RuntimeError) as caught:
        unit.forward_backward(next(Setup().batches(unit)))
    return str(in_words(caught.value, Path(), 1))


@pytest.mark.parametrize("task", ["method", "weight"])
def test_a_task_that_uses_a_part_of_the_model_is_told_what_to_do(ranks: MakeRanks, task: str) -> None:
    for told in ranks(2)(uses_a_part_of_the_model, task):
        assert "have the task call the model" in told and "or use parallel.strategy=ddp" in told


def resident_mib(which: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(which)) / 1024


def build_gpt(process: Process, dim: int) -> Any:
    deferred = Deferred(lambda: Gpt(500, 16, layers=24, heads=4, dim=dim))
    section, settings = ParallelSection(strategy="fsdp"), StepSettings(optim=OptimSection())
    return build_unit(section, deferred.model, OBJECTIVES["mean"], settings, process, deferred.weights())


def build_large(process: Process) -> tuple[float, float]:
    """MiB of a whole model, and what the most was that this worker took while it was built."""
    build_gpt(process, 4)  # what is loaded for the first of them
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident_mib("VmRSS")
    unit = build_gpt(process, 384)
    whole_mib = sum(parameter.numel() for parameter in unit.model.parameters()) * 4 / 2**20
    return whole_mib, resident_mib("VmHWM") - before


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak cannot be measured here")
def test_no_worker_holds_the_whole_model_while_it_is_built() -> None:
    fresh = Ranks(2)
    try:
        found = fresh(build_large)
    finally:
        fresh.close()
    for whole_mib, peak_mib in found:
        assert whole_mib > 160
        assert peak_mib < 0.5 * whole_mib + 40
