"""DeepSpeed's ZeRO on real processes: the numbers of one process, state in parts, and nothing of it left elsewhere."""

import contextlib
import dataclasses
import gc
import io
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import RunError, UserError
from shoal.core.objective import Objective
from shoal.core.parts import FlatPart
from shoal.core.process import Process
from shoal.parallel.build import build_unit
from shoal.parallel.deepspeed import next_scale
from shoal.parallel.deepspeed_engine import check_device, choose_nvme_folder, remove_left_behind
from shoal.parallel.deepspeed_ops import check_nvme
from shoal.parallel.numerics import torch_settings
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, UnitState
from tests.many import CPU, Ranks
from tests.parallel.test_ddp import ALONE, CASES, Setup, mean_loss, measure

MakeRanks = Callable[[int], Ranks]
OFFLOAD = {"offload_optimizer": "cpu", "offload_params": "cpu"}
STAGES: dict[str, dict[str, Any]] = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2-offload": {"stage": 2, "offload_optimizer": "cpu"},
    "3-offload": {"stage": 3, **OFFLOAD},
}
ADAMW = OptimSection(name="adamw", lr=0.01, weight_decay=0.1)


@pytest.fixture
def gathers(tmp_path: Path) -> str:
    """A ds_config with which stage 3 gathers even small weights when they are needed, and lets go of them."""
    path = tmp_path / "gathers.json"
    path.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
    return str(path)


def setup(case: str, section: dict[str, Any], **more: Any) -> Setup:
    return Setup(case, parallel=ParallelSection(strategy="deepspeed", deepspeed=section), **more)


@dataclasses.dataclass
class Went:
    """How some steps went: after each the whole weights, and what was measured before the next."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    metrics: list[float] = dataclasses.field(default_factory=list)


def go(process: Process, unit: Any, setup: Setup, start: int = 0) -> Went:
    went = Went()
    for step in setup.batches(process, start):
        loss = unit.forward_backward(step)
        unit.optimizer_step(setup.optim.lr)
        total, count = process.group.sum(sum(float(term) * weight for term, weight in loss.terms), float(loss.count))
        went.losses.append(total / count)
        went.norms.append(unit.report().get("grad_norm", 0.0))
        went.weights.append({name: tensor.clone() for name, tensor in unit.full_weights()})
        batch = CASES[setup.case].dataset(setup.size).batch(np.arange(4), 0)
        went.metrics.append(float(unit.evaluate(MicroBatch(batch, 4))["loss"][0]))
    return went


def train(process: Process, setup: Setup) -> Went:
    return go(process, setup.unit(process), setup)


def train_alone(setup: Setup) -> Went:
    with torch_settings(threads=1):
        return train(ALONE, dataclasses.replace(setup, parallel=ParallelSection()))


def assert_same(found: Went, expected: Went, tolerance: float = 2e-6) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-5)
    for one, other in zip(found.weights, expected.weights, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].shape == other[name].shape
            assert float((one[name] - other[name]).abs().max()) <= tolerance, name


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("sum", {"micro_batch": 3, "size": 29}),  # what is counted is known only afterwards; some only stand in
        ("count", {"micro_batch": 2, "size": 25, "clip_norm": 0.05, "optim": ADAMW}),
        ("two_views", {"micro_batch": 2, "size": 25, "clip_norm": 0.05}),  # a weight that is one number, used by name
    ],
    ids=["sum", "count", "two_views"],
)
def test_workers_train_as_one_process_would(
    ranks: MakeRanks, gathers: str, case: str, sizes: dict[str, Any], stage: str
) -> None:
    wanted = setup(case, STAGES[stage] | {"config": gathers}, **sizes)
    expected = train_alone(wanted)
    found = ranks(3 if case == "count" else 2)(train, wanted)
    assert_same(found[0], expected)
    assert all(worker.losses == found[0].losses and worker.metrics == found[0].metrics for worker in found)


def held(process: Process, setup: Setup) -> dict[str, Any]:
    """What this worker would save, and what it holds in all."""
    unit = setup.unit(process)
    go(process, unit, dataclasses.replace(setup, steps=1))
    state = unit.state()
    return {
        name: (part.start, part.flat.clone(), part.whole_shape) if isinstance(part, FlatPart) else part.clone()
        for name, part in state.tensors.items()
    }


@pytest.mark.parametrize("stage", STAGES)
def test_every_number_is_on_one_worker_and_each_has_an_equal_share(ranks: MakeRanks, stage: str) -> None:
    wanted = setup("gpt", STAGES[stage], optim=ADAMW)
    workers = ranks(3)(held, wanted)
    with torch_settings(threads=1):
        unit = dataclasses.replace(wanted, parallel=ParallelSection()).unit(ALONE)
        go(ALONE, unit, dataclasses.replace(wanted, parallel=ParallelSection(), steps=1))
    expected = unit.state().tensors
    shares = [0, 0, 0]
    for name, tensor in expected.items():
        assert isinstance(tensor, torch.Tensor)
        if name.endswith(".step"):
            assert all(torch.equal(worker[name], tensor) for worker in workers)
            continue
        whole, times = torch.zeros(tensor.numel()), torch.zeros(tensor.numel())
        for rank, worker in enumerate(workers):
            start, flat, shape = worker[name]
            assert shape == tuple(tensor.shape)
            whole[start : start + len(flat)] = flat
            times[start : start + len(flat)] += 1
            shares[rank] += len(flat)
        assert bool((times == 1).all()), name
        assert float((whole.view(tensor.shape) - tensor).abs().max()) < 1e-4, name
    assert all(worker.keys() == expected.keys() for worker in workers)
    assert max(shares) < 1.1 * sum(shares) / 3, "nobody holds much more than a third"


def whole_state(process: Process, unit: Any) -> UnitState:
    """Everything that would be saved, put together as a reader would."""
    state = unit.state()
    tensors = {}
    for name, part in sorted(state.tensors.items()):
        if isinstance(part, FlatPart):
            whole = torch.zeros(part.whole_shape, dtype=part.flat.dtype)
            whole.view(-1)[part.start : part.start + part.flat.numel()] = part.flat
            dist.all_reduce(whole)
            tensors[name] = whole
        else:
            tensors[name] = part.clone()
    return UnitState(tensors, state.values)


def save_and_go_on(process: Process, setup: Setup, at: int) -> tuple[UnitState, Went]:
    unit = setup.unit(process)
    go(process, unit, dataclasses.replace(setup, steps=at))
    return whole_state(process, unit), go(process, unit, setup, at)


def load_and_go_on(process: Process, setup: Setup, state: UnitState, at: int, trained: bool) -> Went:
    unit = setup.unit(process)
    if trained:
        go(process, unit, dataclasses.replace(setup, steps=2))
    unit.load(state)
    for name, tensor in unit.full_weights():
        if process.is_first:
            assert torch.equal(tensor, state.tensors[f"model.{name}"]), name
    return go(process, unit, setup, at)


PAIRS = [("1", "3"), ("3", "2-offload"), ("2-offload", "3-offload"), ("3-offload", "1")]


@pytest.mark.parametrize(
    ("writer", "reader"), [*PAIRS[:2], *(pytest.param(*p, marks=pytest.mark.slow) for p in PAIRS[2:])]
)
def test_state_goes_from_any_stage_to_any_other_and_to_other_numbers_of_workers(
    ranks: MakeRanks, writer: str, reader: str
) -> None:
    optim = ADAMW if writer < reader else OptimSection(name="sgd", lr=0.1, momentum=0.9, nesterov=True)
    write, read = setup("gpt", STAGES[writer], optim=optim), setup("gpt", STAGES[reader], optim=optim)
    state, expected = ranks(2)(save_and_go_on, write, 2)[0]
    found = ranks(3)(load_and_go_on, read, state, 2, False)[0]
    assert_same(found, expected, 1e-4)  # Adam makes much of the last bits of small gradients
    again = ranks(2)(load_and_go_on, write, state, 2, True)[0]
    assert again.losses == expected.losses, "to the last bit, whatever was there before"


def test_weights_that_have_taken_other_numbers_of_steps_are_refused(ranks: MakeRanks) -> None:
    wanted = setup("gpt", {"stage": 2}, optim=ADAMW)
    state, _ = ranks(2)(save_and_go_on, wanted, 2)[0]
    name = next(name for name in state.tensors if name.endswith(".step"))
    state.tensors[name].add_(1.0)
    (message, _) = ranks(2)(refused, load_and_go_on, wanted, state, 2, False)
    assert message.startswith("parallel.strategy: deepspeed steps with all weights together")


def refused(process: Process, function: Callable[..., Any], *args: Any) -> str:
    """What a function says that should not go through."""
    try:
        function(process, *args)
    except (UserError, RunError) as error:
        return str(error)
    raise AssertionError("it went through")


class PartlyFrozen(nn.Module):
    """With weights that bf16 cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.used = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.used(torch.tanh(self.frozen(inputs)))


def train_partly_frozen(process: Process, section: dict[str, Any]) -> tuple[Any, ...]:
    """First weights, those after a step, and those of another unit that took the state over."""
    units = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = PartlyFrozen()
        first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        settings = StepSettings(optim=ADAMW, precision="bf16")
        parallel = ParallelSection(strategy="deepspeed", deepspeed=section)
        units.append((build_unit(parallel, model, Objective(mean_loss, measure), settings, process), first))
    (unit, first), (other, _) = units
    began = dict(unit.full_weights())
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(process.rank)), torch.arange(8) % 3
    for _ in range(2):
        unit.forward_backward(StepBatch([MicroBatch(batch, 8)], 8 * process.world_size))
        unit.optimizer_step(0.1)
    state = whole_state(process, unit)
    other.load(state)
    measured = [float(each.evaluate(MicroBatch(batch, 8))["loss"][0]) for each in (unit, other)]
    return first, began, dict(unit.full_weights()), dict(other.full_weights()), measured


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_keeps_full_precision_of_weights_that_train_and_of_frozen_ones(ranks: MakeRanks, stage: str) -> None:
    first, began, after, taken_over, measured = ranks(2)(train_partly_frozen, STAGES[stage])[0]
    assert began.keys() == first.keys()
    assert all(torch.equal(began[name], first[name]) for name in first), "not rounded to begin with"
    assert torch.equal(after["frozen.weight"], first["frozen.weight"])
    changed = after["used.weight"]
    assert changed.dtype == torch.float32 and not torch.equal(changed, first["used.weight"])
    assert not torch.equal(changed, changed.bfloat16().float()), "steps are taken in full precision"
    assert all(torch.equal(taken_over[name], after[name]) for name in after)
    assert measured[0] == measured[1], "the weights that are computed with are taken over too"


class Files(Mapping[str, torch.Tensor]):
    """Weights that are read one by one, when they are asked for; some cannot be."""

    def __init__(self, given: dict[str, torch.Tensor], broken: str = "") -> None:
        self.given = given
        self.broken = broken
        self.asked: list[str] = []

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == self.broken:
            raise OSError("the disk is gone")
        self.asked.append(name)
        return self.given[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.given)

    def __len__(self) -> int:
        return len(self.given)


def partly_frozen_unit(process: Process, parallel: ParallelSection, precision: str = "fp32") -> Any:
    torch.manual_seed(0)
    settings = StepSettings(optim=ADAMW, precision=precision)
    return build_unit(parallel, PartlyFrozen(), Objective(mean_loss, measure), settings, process)


def other_weights(*names: str) -> Files:
    torch.manual_seed(1)
    model = PartlyFrozen()
    model.seen.fill_(3.0)
    return Files({name: tensor for name, tensor in model.state_dict().items() if name in names})


TAKEN = ("frozen.weight", "used.weight", "seen")


def take_and_train(process: Process, parallel: ParallelSection, precision: str = "fp32") -> tuple[Any, ...]:
    """What was asked for, and weights and a loss when it is taken and after two steps, of 16 samples in all."""
    unit, weights = partly_frozen_unit(process, parallel, precision), other_weights(*TAKEN)
    unit.take_weights(weights)
    samples = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 3
    taken = {name: tensor.clone() for name, tensor in unit.full_weights()}
    losses = [float(unit.evaluate(MicroBatch(samples, 16))["loss"][0])]
    share = 16 // process.world_size
    own = tuple(tensor[process.rank * share : (process.rank + 1) * share] for tensor in samples)
    for _ in range(2):
        unit.forward_backward(StepBatch([MicroBatch(own, share)], 16))
        unit.optimizer_step(0.01)
    losses.append(float(unit.evaluate(MicroBatch(samples, 16))["loss"][0]))
    return weights.asked, taken, dict(unit.full_weights()), losses


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_some_weights_are_taken_over_and_trained_on(ranks: MakeRanks, stage: str) -> None:
    torch.manual_seed(0)
    whole = {**PartlyFrozen().state_dict(), **other_weights(*TAKEN).given}
    with torch_settings(threads=1):
        _, _, after, losses = take_and_train(ALONE, ParallelSection())
    parallel = ParallelSection(strategy="deepspeed", deepspeed=STAGES[stage])
    workers = ranks(2)(take_and_train, parallel)
    for asked, _, _, measured in workers:
        assert sorted(asked) == sorted(TAKEN), "nothing is read twice"
        assert measured == pytest.approx(losses, rel=1e-5)
    _, taken, found, _ = workers[0]
    assert all(torch.equal(taken[name], whole[name]) for name in whole)
    assert all(float((found[name] - after[name]).abs().max()) < 1e-6 for name in whole)
    low = ranks(2)(take_and_train, parallel, "bf16")[0]
    assert all(torch.equal(low[1][name], whole[name]) for name in whole), "in full precision"
    assert low[3] == pytest.approx(losses, rel=2e-2)


def take_what_cannot_be_read(process: Process, stage: int, broken: str) -> str:
    unit = partly_frozen_unit(process, ParallelSection(strategy="deepspeed", deepspeed={"stage": stage}))
    weights = other_weights(*TAKEN)
    weights.broken = broken if process.rank else ""
    try:
        unit.take_weights(weights)
    except OSError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_worker_that_cannot_read_weights_says_so_and_nobody_waits(ranks: MakeRanks, stage: int) -> None:
    for broken in TAKEN:
        assert ranks(2)(take_what_cannot_be_read, stage, broken, timeout_s=30.0) == ["taken", "the disk is gone"]


class Branches(nn.Module):
    """A sample goes through one of two branches, which are of a size, as experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 3)
        self.right = nn.Linear(6, 3)
        self.frozen = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([(self.left if sample[0] < 0 else self.right)(sample)[None] for sample in inputs])


def go_through_branches(process: Process, section: dict[str, Any] | None, batches: list[list[str]]) -> Any:
    """One step; in `batches` is for each worker which way its micro-batches go: l, r or both; 0 only stands in."""
    parallel = ParallelSection() if section is None else ParallelSection(strategy="deepspeed", deepspeed=section)
    torch.manual_seed(0)
    model = Branches()
    unit = build_unit(parallel, model, Objective(mean_loss, measure), StepSettings(optim=ADAMW), process)
    own = batches[process.rank] if process.world_size > 1 else list(itertools.chain(*batches))
    micro_batches = []
    for ways in own:
        inputs = torch.linspace(0.1, 1.0, 12).view(2, 6).clone()
        inputs[:, 0] = torch.tensor([-1.0 if "l" in ways else 1.0, 1.0 if "r" in ways else -1.0])
        micro_batches.append(MicroBatch((inputs, torch.tensor([0, 1])), 0 if "0" in ways else 2))
    unit.forward_backward(StepBatch(micro_batches, 2 * sum("0" not in ways for ways in itertools.chain(*batches))))
    unit.optimizer_step(0.1)
    return {name: tensor.clone() for name, tensor in unit.full_weights()}


OFFLOAD_IS_SLOW = [pytest.param(s, marks=pytest.mark.slow if "offload" in s else ()) for s in STAGES]


@pytest.mark.parametrize("stage", OFFLOAD_IS_SLOW)
def test_a_weight_without_a_gradient_on_one_worker_is_refused_by_all(ranks: MakeRanks, stage: str) -> None:
    cases: list[tuple[list[list[str]], int]] = [([["l"], ["l"]], 0)]  # nobody uses it
    if not stage.startswith("3"):  # which gathers a weight when it is used, and waits for those that use another one
        cases += [([["lr"], ["l"]], 1), ([["l"], ["r"]], 0)]  # gradients are as many, and of different weights
    for batches, worker in cases:
        messages = ranks(2)(refused, go_through_branches, STAGES[stage], batches)
        assert f"right.weight has none on worker {worker}; freeze it (requires_grad_(False))" in messages[0]
        assert messages[1] == messages[0]


@pytest.mark.parametrize("stage", OFFLOAD_IS_SLOW)
def test_gradients_in_every_micro_batch_will_do_and_in_stage_1_one_a_step(ranks: MakeRanks, stage: str) -> None:
    apart = [["l", "r"], ["r", "l"]]
    for batches in ([["lr", "lr"], ["lr", "lr0"]], *([apart] if stage == "1" else [])):
        with torch_settings(threads=1):
            expected = go_through_branches(ALONE, None, batches)
        found = ranks(2)(go_through_branches, STAGES[stage], batches)[0]
        assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)
    if stage != "1":  # DeepSpeed would lose some, or add others to them
        alike = [["l", "r"], ["l", "r"]]
        assert "in every micro-batch" in ranks(2)(refused, go_through_branches, STAGES[stage], alike)[1]


def infinite(model: nn.Module, batch: Any) -> torch.Tensor:
    return mean_loss(model, batch) * torch.tensor(float("inf"))


def train_into_the_infinite(process: Process, section: dict[str, Any]) -> None:
    parallel = ParallelSection(strategy="deepspeed", deepspeed=section)
    objective = Objective(infinite, measure)
    unit = build_unit(parallel, nn.Linear(6, 3), objective, StepSettings(optim=ADAMW), process)
    unit.forward_backward(StepBatch([MicroBatch((torch.randn(4, 6), torch.arange(4) % 3), 4)], 8))
    unit.optimizer_step(0.1)


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_are_not_finite_end_the_run_and_are_not_left_out_in_silence(
    ranks: MakeRanks, stage: int
) -> None:
    messages = ranks(2)(refused, train_into_the_infinite, {"stage": stage})
    assert all(message.startswith("gradients became infinite or nan: lower optim.lr") for message in messages)


def leave_nothing(process: Process, wanted: Setup) -> dict[str, Any]:
    """What a unit changes in its process, and what it says."""
    variables, linear, told = dict(os.environ), F.linear, io.StringIO()
    with contextlib.redirect_stdout(told):
        unit = wanted.unit(process)
        go(process, unit, wanted)
        del unit
        gc.collect()
    changed = {name for name in os.environ.keys() | variables.keys() if os.environ.get(name) != variables.get(name)}
    return {
        "variables": {name for name in changed if not name.startswith(("TORCHINDUCTOR_", "TRITON_"))},
        "linear": F.linear is linear,
        "told": told.getvalue(),
    }


@pytest.mark.parametrize("stage", ["2", "3"])
def test_nothing_is_left_behind_and_nothing_is_said(ranks: MakeRanks, stage: str) -> None:
    for found in ranks(2)(leave_nothing, setup("mlp", STAGES[stage])):
        assert found == {"variables": set(), "linear": True, "told": ""}


def began_with(process: Process) -> dict[str, torch.Tensor]:
    torch.manual_seed(process.rank)
    model = PartlyFrozen()
    parallel = ParallelSection(strategy="deepspeed", deepspeed={"stage": 2})
    unit = build_unit(parallel, model, Objective(mean_loss, measure), StepSettings(optim=ADAMW), process)
    return dict(unit.full_weights())


def test_all_workers_begin_with_the_weights_of_the_first(ranks: MakeRanks) -> None:
    torch.manual_seed(0)
    expected = PartlyFrozen().state_dict()
    found = ranks(2)(began_with)[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def small_weights(process: Process, wanted: Setup) -> int:
    return len(wanted.unit(process).zero.persistent_parameters)


def test_a_users_file_reaches_deepspeed_and_what_it_refuses_is_told(
    ranks: MakeRanks, gathers: str, tmp_path: Path
) -> None:
    assert ranks(2)(small_weights, setup("mlp", {"stage": 3})) == [6, 6]
    assert ranks(2)(small_weights, setup("mlp", {"stage": 3, "config": gathers})) == [0, 0]
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": -1}}))
    messages = ranks(2)(refused, small_weights, setup("mlp", {"stage": 2, "config": str(wrong)}))
    assert all(message.startswith("parallel.deepspeed: DeepSpeed refuses its configuration: ") for message in messages)
    assert "reduce_bucket_size" in messages[0]


def half(process: Process) -> None:
    parallel = ParallelSection(strategy="deepspeed")
    build_unit(parallel, nn.Linear(6, 3).half(), Objective(mean_loss, measure), StepSettings(optim=ADAMW), process)


def test_what_cannot_be_trained_is_refused(ranks: MakeRanks) -> None:
    message = ranks(2)(refused, half)[0]
    assert message == "model: weight is float16; deepspeed trains weights in float32, so call model.float()"
    wanted = setup("partly_used", {"stage": 3, "offload_params": "nvme", "nvme_dir": "/nowhere"})
    assert "nvme is for weights that train, and frozen.weight does not" in ranks(2)(refused, small_weights, wanted)[0]


def without_compiler(process: Process, wanted: Setup) -> None:
    os.environ["CC"] = "false"
    try:
        wanted.unit(process)
    finally:
        del os.environ["CC"]


def with_extensions(process: Process, wanted: Setup, folder: str) -> None:
    before = os.environ.get("TORCH_EXTENSIONS_DIR")
    os.environ["TORCH_EXTENSIONS_DIR"] = folder
    try:
        wanted.unit(process)
    finally:
        del os.environ["TORCH_EXTENSIONS_DIR"]
        if before is not None:
            os.environ["TORCH_EXTENSIONS_DIR"] = before


def test_nvme_that_cannot_be_is_refused_before_anything_is_built(ranks: MakeRanks, tmp_path: Path) -> None:
    section = {"stage": 3, "offload_optimizer": "nvme", "nvme_dir": str(tmp_path / "fast")}
    messages = ranks(2)(refused, without_compiler, setup("mlp", section))
    assert messages[0] == messages[1]
    assert "nvme needs DeepSpeed's async_io, which is compiled on each machine" in messages[0]
    assert "libaio-dev" in messages[0]
    (tmp_path / "file").touch()
    messages = ranks(2)(refused, with_extensions, setup("mlp", section), str(tmp_path / "file" / "extensions"))
    assert f"{tmp_path}/file/extensions" in messages[0] and "cannot be written" in messages[0]
    section["nvme_dir"] = str(tmp_path / "file" / "fast")
    assert "nvme_dir: " in ranks(2)(refused, small_weights, setup("mlp", section))[0]


def test_the_loss_scale_moves_as_that_of_other_strategies() -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scale = scaler.state_dict()
    for has_overflown in (False, False, False, True, False, False, True, True, False, False, False, False):
        weight = nn.Parameter(torch.zeros(1))
        weight.grad = torch.tensor([float("inf") if has_overflown else 1.0])
        scaler.scale(weight)
        scaler.step(torch.optim.SGD([weight], lr=0.1))
        scaler.update()
        scale = next_scale(scale, has_overflown)
        assert scale == scaler.state_dict()
    assert scale["scale"] != 65536.0


def train_in_half(process: Process, wanted: Setup, scale: float) -> tuple[Went, list[float], dict[str, Any]]:
    """On a processor of which DeepSpeed says that it has no fp16; PyTorch has it all the same."""
    check_device("fp32", CPU)
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    says = CPU_Accelerator.is_fp16_supported
    CPU_Accelerator.is_fp16_supported = lambda _: True
    try:
        unit = wanted.unit(process)
        unit.scale["scale"] = scale
        went, scales = Went(weights=[{name: tensor.clone() for name, tensor in unit.full_weights()}]), [scale]
        for step in range(wanted.steps):
            part = go(process, unit, dataclasses.replace(wanted, steps=step + 1), step)
            went.losses += part.losses
            went.weights += part.weights
            scales.append(unit.report()["loss_scale"])
        return went, scales, unit.state().values
    finally:
        CPU_Accelerator.is_fp16_supported = says


@pytest.mark.parametrize("stage", ["1", "3-offload"])
def test_fp16_steps_with_a_scale_that_finds_itself_and_is_saved(ranks: MakeRanks, stage: str) -> None:
    wanted = setup("gpt", STAGES[stage], precision="fp16", optim=ADAMW, size=120, steps=8)
    went, scales, values = ranks(2)(train_in_half, wanted, 2.0**21)[0]
    skipped = [after < before for before, after in itertools.pairwise(scales)]
    assert 0 < sum(skipped) < 6, "too large to begin with, and soon found"
    assert scales[-1] == 2.0 ** (21 - sum(skipped)) == values["scaler"]["scale"]
    same = [all(torch.equal(one[n], other[n]) for n in one) for one, other in itertools.pairwise(went.weights)]
    assert same == skipped, "where a step overflows it is left out, and only there"
    expected = train_alone(dataclasses.replace(wanted, precision="fp32", steps=1))
    assert went.losses[0] == pytest.approx(expected.losses[0], abs=1e-2)


def test_fp16_is_refused_where_deepspeed_has_none(ranks: MakeRanks) -> None:
    message = ranks(2)(refused, no_half)[0]
    assert message == "train.precision: DeepSpeed has no fp16 on this cpu; use bf16 or fp32"


def no_half(process: Process) -> None:
    check_device("fp32", CPU)
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    says = CPU_Accelerator.is_fp16_supported
    CPU_Accelerator.is_fp16_supported = lambda _: False  # as most say, but not all
    try:
        setup("mlp", {"stage": 2}, precision="fp16").unit(process)
    finally:
        CPU_Accelerator.is_fp16_supported = says


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(UserError) as caught:
        check_device("fp32", CPU)
    words = "parallel.strategy: deepspeed needs the DeepSpeed package; install it with: pip install 'shoal[deepspeed]'"
    assert str(caught.value).startswith(words)


def test_shoal_never_loads_deepspeed_by_itself() -> None:
    code = "import sys, shoal.parallel.deepspeed, shoal.train.worker; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_killed_workers_have_left_on_nvme_goes_when_the_next_one_starts(tmp_path: Path) -> None:
    names = ["shoal-a-b-7-1-ab-0", "shoal-a-b-7-2-cd-1", "shoal-a-7-1-ab-0", "shoal-c-7-1-ab-0", "shoal-a-b-7-x-ab-0"]
    for name in names:
        (tmp_path / name / "zero_stage_3").mkdir(parents=True)
    remove_left_behind(tmp_path, "shoal-a-b-7", lambda pid: pid == 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:]), "neither living ones nor others'"
    remove_left_behind(tmp_path / "missing", "shoal-a-b-7")


def test_every_worker_has_a_folder_on_nvme_that_tells_whose_it_is(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    own, again = choose_nvme_folder(tmp_path, 3), choose_nvme_folder(tmp_path, 3)
    assert own != again and own.name.endswith("-3") and not own.exists()
    own.mkdir()
    left = tmp_path / own.name.replace(f"-{os.getpid()}-", f"-{ended.pid}-")
    left.mkdir()
    choose_nvme_folder(tmp_path, 3)
    assert own.exists() and not left.exists()


def wide(seed: int) -> nn.Module:
    """With weights large enough for a disk: from a megabyte on."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 3))


def use_nvme(process: Process, section: dict[str, Any], precision: str) -> dict[str, Any]:
    """Train, take the state over into another unit, and train both on."""

    def unit(seed: int) -> Any:
        settings = StepSettings(optim=OptimSection(lr=1e-3), precision=precision, clip_norm=0.5)
        parallel = ParallelSection(strategy="deepspeed", deepspeed=section)
        return build_unit(parallel, wide(seed), Objective(mean_loss, measure), settings, process)

    def steps(unit: Any, *numbers: int) -> list[float]:
        losses = []
        for number in numbers:
            generator = torch.Generator().manual_seed(10 * number + process.rank)
            batch = torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)
            loss = unit.forward_backward(StepBatch([MicroBatch(batch, 4)] * 2, 8 * process.world_size))
            unit.optimizer_step(1e-3)
            unit.evaluate(MicroBatch(batch, 4))
            losses.append(process.group.sum(float(loss.terms[0][0]))[0])
        return losses

    one, other = unit(0), unit(1)
    before = steps(one, 0, 1, 2)
    steps(other, 5)
    state = whole_state(process, one)
    files = len(list(Path(section["nvme_dir"]).rglob(f"*-{process.rank}/**/*.swp"))) if "nvme_dir" in section else 0
    other.load(state)
    expected, found = steps(one, 3, 4), steps(other, 3, 4)
    told = ""
    if files:  # a disk that loses what it is given
        other.zero._optimizer_states_and_gradient_swap_out = other.zero._release_swap_buffers
        told = refused(process, lambda _, unit=other: unit.load(state))
    del one, other
    gc.collect()
    return {"losses": before + expected, "same": expected == found, "files": files, "told": told}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_offloaded_to_nvme_is_restored_from_it_or_refused(
    ranks: MakeRanks, tmp_path: Path, precision: str
) -> None:
    """Compiles DeepSpeed's access to the disk, which takes minutes the first time."""
    problem = ranks(2)(nvme_problem, tmp_path, timeout_s=1500)[0]
    if problem is not None:
        pytest.skip(problem)
    (tmp_path / "config.json").write_text(json.dumps({"zero_optimization": {"offload_param": {"max_in_cpu": 0}}}))
    section = {"stage": 3, "nvme_dir": str(tmp_path / "fast"), "config": str(tmp_path / "config.json")}
    expected = ranks(2)(use_nvme, {"stage": 3}, precision)[0]
    for offload in ({"offload_optimizer": "nvme"}, {"offload_optimizer": "nvme", "offload_params": "nvme"}):
        found = ranks(2)(use_nvme, section | offload, precision)[0]
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5 if precision == "fp32" else 1e-2)
        assert found["same"] and found["files"] > 0
        assert "reads back otherwise than it was restored" in found["told"]
    assert not list((tmp_path / "fast").iterdir()), "what is on the disk goes when the run does"


def nvme_problem(process: Process, folder: Path) -> str | None:
    try:
        check_nvme(folder, process)
    except UserError as error:
        return str(error)
    return None
