"""Data parallel on real processes: the numbers of one process, whatever the workers, micro-batches and short steps."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.data.dataset import MemoryDataset
from shoal.data.loader import train_batches
from shoal.data.order import Order
from shoal.models.gpt import Gpt
from shoal.models.mlp import Mlp
from shoal.models.simple_cnn import SimpleCnn
from shoal.parallel.build import build_unit
from shoal.parallel.ddp import DdpUnit
from shoal.parallel.numerics import torch_settings
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, UnitState
from shoal.tasks.build import task_objective
from shoal.tasks.language_modelling import LanguageModellingTask
from shoal.tasks.section import LanguageModelling
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]
Numbers = dict[str, torch.Tensor]
ALONE = Process(0, 1, CPU)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sum_and_count(model, batch):
    """Over the rows whose first input is not very small: how many is known only by looking."""
    rows = batch[0][:, 0] > -0.6
    return F.cross_entropy(model(batch[0])[rows], batch[1][rows], reduction="sum"), rows.sum()


def count_rows(batch):
    return (batch[0][:, 0] > -0.6).sum()


def loss_of_two_views(model, batch):
    """Calls the model twice, a method of it once, and uses a parameter by its name."""
    inputs, labels = batch
    both = model(inputs) + model(-inputs)
    return F.cross_entropy(both * model.scale, labels) + 0.1 * model.encode(inputs).pow(2).mean()


class TwoViews(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def encode(self, inputs):
        return torch.tanh(self.encoder(inputs))

    def forward(self, inputs):
        return self.head(self.encode(inputs))


class PartlyUsed(nn.Module):
    """One branch is frozen, another is used by nobody."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.used = nn.Linear(6, 3)
        self.idle = nn.Linear(6, 3)

    def forward(self, inputs):
        return self.used(torch.tanh(self.frozen(inputs)))


def measure(model, batch, num_samples):
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1]) * num_samples, num_samples)}


@dataclass(frozen=True)
class Case:
    """What is learned; the same everywhere, because it is made from a seed."""

    model: Callable[[], nn.Module]
    objective: Objective
    sample_shape: tuple[int, ...] = (6,)
    vocabulary: int | None = None

    def dataset(self, size: int) -> MemoryDataset:
        generator = torch.Generator().manual_seed(5)
        if self.vocabulary is None:
            inputs = torch.randn(size, *self.sample_shape, generator=generator)
            return MemoryDataset(inputs, torch.randint(0, 3, (size,), generator=generator))
        tokens = torch.randint(0, self.vocabulary, (size, self.sample_shape[0] + 1), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
        targets[:, 0] = tokens[:, 1]  # a sample without any would leave a short step with nothing
        return MemoryDataset(tokens[:, :-1].contiguous(), targets)


CASES = {
    "mlp": Case(lambda: Mlp(6, [16, 16], 3), Objective(mean_loss, measure)),
    "sum": Case(lambda: Mlp(6, [16], 3), Objective(sum_and_count, measure)),
    "count": Case(lambda: Mlp(6, [16], 3), Objective(sum_and_count, measure, count_rows)),
    "two_views": Case(TwoViews, Objective(loss_of_two_views, measure)),
    "partly_used": Case(PartlyUsed, Objective(mean_loss, measure)),
    "gpt": Case(
        lambda: Gpt(17, 8, layers=2, heads=2, dim=16),
        task_objective(LanguageModellingTask(LanguageModelling(name="language_modelling"))),
        sample_shape=(8,),
        vocabulary=17,
    ),
    "norms": Case(
        lambda: SimpleCnn((1, 8, 8), channels=[4], hidden=8, num_classes=3),
        Objective(mean_loss, measure),
        sample_shape=(1, 8, 8),
    ),
    "wide": Case(lambda: Mlp(6, [64, 64], 3), Objective(mean_loss, measure)),
}
DEFAULT = ParallelSection()
SGD = OptimSection(name="sgd", lr=0.1, momentum=0.9)


@dataclass(frozen=True)
class Trained:
    """What came out of some steps: after each the gradient that the optimizer saw, and the weights."""

    gradients: list[Numbers]
    weights: list[Numbers]
    losses: list[float]


@dataclass(frozen=True)
class Setup:
    """How it is trained."""

    case: str
    size: int = 36
    global_batch: int = 12
    micro_batch: int = 12
    steps: int = 5
    parallel: ParallelSection = DEFAULT
    optim: OptimSection = SGD
    clip_norm: float | None = None
    precision: str = "fp32"
    nodes: tuple[str, ...] = ()

    def unit(self, process: Process) -> Any:
        torch.manual_seed(0)
        if self.nodes:
            process = dataclasses.replace(process, node=self.nodes[process.rank])
        settings = StepSettings(optim=self.optim, clip_norm=self.clip_norm, precision=self.precision)
        return build_unit(self.parallel, CASES[self.case].model(), CASES[self.case].objective, settings, process)

    def batches(self, process: Process, start: int = 0) -> Iterator[StepBatch]:
        order = Order(self.size, self.global_batch, seed=3)
        return train_batches(
            CASES[self.case].dataset(self.size),
            order,
            start,
            self.steps,
            rank=process.rank,
            world_size=process.world_size,
            micro_batch=self.micro_batch,
        )


def train(process: Process, setup: Setup) -> Trained:
    unit = setup.unit(process)
    gradients, weights, losses = [], [], []
    for step in setup.batches(process):
        loss = unit.forward_backward(step)
        gradients.append({n: p.grad.clone() for n, p in unit.model.named_parameters() if p.grad is not None})
        unit.optimizer_step(0.1)
        weights.append({name: tensor.clone() for name, tensor in unit.model.state_dict().items()})
        total, count = process.group.sum(sum(float(term) * weight for term, weight in loss.terms), float(loss.count))
        losses.append(total / count)
    return Trained(gradients, weights, losses)


def train_alone(setup: Setup) -> Trained:
    with torch_settings(threads=1):
        return train(ALONE, setup)


def assert_equal(found: list[Numbers], expected: list[Numbers], tolerance: float = 0.0) -> None:
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name in one:
            difference = float((one[name].double() - other[name].double()).abs().max())
            assert difference <= tolerance, f"{name} after step {number + 1}: {difference}"


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        *(("mlp", 2), ("sum", 3), ("count", 2), ("two_views", 3), ("gpt", 3)),
        *(pytest.param(case, 2, marks=pytest.mark.slow) for case in ("sum", "two_views", "gpt")),
        *(pytest.param(case, 3, marks=pytest.mark.slow) for case in ("mlp", "count")),
    ],
)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"micro_batch": 2},
        {"micro_batch": 2, "size": 25},  # one sample in the last step: all but the first only stand in
        {"micro_batch": 1, "size": 26, "clip_norm": 0.05},
        {"micro_batch": 3, "size": 29},  # five samples: not all workers have as many micro-batches that count
    ],
    ids=str,
)
def test_workers_train_as_one_process_would(ranks: MakeRanks, case: str, world_size: int, sizes: dict) -> None:
    setup = Setup(case, **sizes)
    expected = train_alone(dataclasses.replace(setup, micro_batch=12))
    found = ranks(world_size)(train, setup)
    for worker in found:
        assert_equal(worker.gradients, expected.gradients, 1e-6)
        assert_equal(worker.weights, expected.weights, 1e-6)
        assert worker.losses == pytest.approx(expected.losses, abs=1e-6)
    for worker in found[1:]:
        assert_equal(worker.weights, found[0].weights)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", ["mlp", "sum", "count", "two_views", "gpt"])
def test_two_workers_are_bit_for_bit_one_that_accumulates_twice(ranks: MakeRanks, case: str, precision: str) -> None:
    setup = Setup(case, micro_batch=6, clip_norm=0.5, precision=precision)
    expected = train_alone(setup)
    for worker in ranks(2)(train, setup):
        assert_equal(worker.weights, expected.weights)
        assert worker.losses == expected.losses


@pytest.mark.parametrize(
    "parallel",
    [
        {"gradient_as_bucket_view": False},
        {"bucket_mb": 0.0005},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"hierarchical": True},
    ],
    ids=str,
)
def test_settings_of_ddp_change_no_number(ranks: MakeRanks, parallel: dict) -> None:
    setup = Setup("two_views", micro_batch=2, size=25)
    expected = train_alone(setup)
    varied = dataclasses.replace(setup, parallel=ParallelSection(**parallel), nodes=("a", "a"))
    for worker in ranks(2)(train, varied):
        assert_equal(worker.weights, expected.weights, 1e-6)


@pytest.mark.parametrize("nodes", [("a", "a", "b"), ("a", "b", "a"), ("a", "b", "c"), ("a", "a", "a")], ids="".join)
def test_summing_machine_by_machine_gives_the_same(ranks: MakeRanks, nodes: tuple[str, ...]) -> None:
    plain = Setup("gpt", micro_batch=2, size=25)
    expected = ranks(3)(train, plain)[0]
    levels = dataclasses.replace(plain, parallel=ParallelSection(hierarchical=True), nodes=nodes)
    found = ranks(3)(train, levels)
    for worker in found:
        assert_equal(worker.weights, expected.weights, 1e-6)
        assert_equal(worker.weights, found[0].weights)


def test_unused_parameters_are_looked_for_where_asked(ranks: MakeRanks) -> None:
    setup = Setup("partly_used", micro_batch=2, parallel=ParallelSection(find_unused_parameters=True))
    expected = train_alone(dataclasses.replace(setup, parallel=ParallelSection()))
    for worker in ranks(2)(train, setup):
        assert_equal(worker.weights, expected.weights, 1e-6)


def buckets_sent(process: Process, setup: Setup) -> list[int]:
    """How often gradients are sent, step by step."""
    unit, sent = setup.unit(process), []

    def count(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent[-1] += 1
        future = dist.all_reduce(bucket.buffer().div_(process.world_size), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    unit.ddp.register_comm_hook(None, count)
    for step in setup.batches(process):
        sent.append(0)
        unit.forward_backward(step)
        unit.optimizer_step(0.1)
    return sent


@pytest.mark.parametrize("case", ["mlp", "count"])
def test_gradients_are_sent_once_a_step_however_many_micro_batches(ranks: MakeRanks, case: str) -> None:
    whole = Setup(case, parallel=ParallelSection(bucket_mb=25))
    assert ranks(2)(buckets_sent, whole) == [[1] * 5] * 2
    assert ranks(2)(buckets_sent, dataclasses.replace(whole, micro_batch=1)) == [[1] * 5] * 2


@pytest.mark.parametrize(
    "parallel",
    [
        {"compress": "bf16"},
        {"compress": "fp16"},
        pytest.param(
            {"compress": "powersgd", "powersgd_rank": 2, "powersgd_start_step": 3},
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="refused on the CPU of a machine with a GPU"),
        ),
    ],
    ids=lambda parallel: parallel["compress"],
)
def test_packed_gradients_still_teach_and_keep_workers_the_same(ranks: MakeRanks, parallel: dict) -> None:
    plain = Setup("wide", size=24, steps=30)
    expected = ranks(3)(train, plain)[0]
    found = ranks(3)(train, dataclasses.replace(plain, parallel=ParallelSection(**parallel)))
    for worker in found:
        assert_equal(worker.weights, found[0].weights)
        assert sum(worker.losses[-2:]) < 0.7 * sum(worker.losses[:2]), "it learns"
        assert worker.losses == pytest.approx(expected.losses, abs=0.15), "about as without packing"
    assert any(not torch.equal(found[0].weights[-1][name], tensor) for name, tensor in expected.weights[-1].items())


def low_rank(process: Process) -> dict[str, torch.Tensor]:
    """Weights after some steps with many buckets of one size, so that Gloo would not notice if they were mixed up."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", model(batch)).pow(2).mean()

    section = ParallelSection(
        strategy="ddp", compress="powersgd", powersgd_rank=2, powersgd_start_step=2, bucket_mb=64 * 64 * 4 / 2**20
    )
    objective = Objective(loss, lambda model, batch, count: {})
    unit = build_unit(section, model, objective, StepSettings(OptimSection(name="sgd", lr=0.1)), process)
    for step in range(12):
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + process.rank))
        unit.forward_backward(StepBatch([MicroBatch(data, 4)], 4 * process.world_size))
        unit.optimizer_step(0.1)
    return {name: tensor.clone() for name, tensor in unit.full_weights()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused on the CPU of a machine with a GPU")
def test_buckets_that_are_packed_by_powersgd_are_not_mixed_up(ranks: MakeRanks) -> None:
    first, *others = [weights for _ in range(3) for weights in ranks(3)(low_rank)]
    for weights in others:
        assert_equal([weights], [first])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_powersgd_on_the_cpu_beside_a_gpu_is_refused(ranks: MakeRanks) -> None:
    messages = ranks(2)(refused_at_once, Setup("mlp", parallel=ParallelSection(compress="powersgd")))
    assert all(message.startswith("parallel.compress: PyTorch's powersgd fails on the CPU") for message in messages)


def refused_at_once(process: Process, setup: Setup) -> str:
    with pytest.raises(UserError) as caught:
        setup.unit(process)
    return str(caught.value)


def statistics(process: Process, setup: Setup) -> dict[str, Any]:
    """Batch norm's running statistics before an evaluation and after, and what it measures."""
    unit = setup.unit(process)
    for step in setup.batches(process):
        unit.forward_backward(step)
        unit.optimizer_step(0.1)
    before = {name: tensor.clone() for name, tensor in unit.model.named_buffers()}
    unit.model.eval()
    images, labels = CASES[setup.case].dataset(8).tensors
    measured = unit.evaluate(MicroBatch((images, labels), 8))
    after = {name: tensor.clone() for name, tensor in unit.model.named_buffers()}
    return {"before": before, "after": after, "loss": float(measured["loss"][0])}


@pytest.mark.parametrize("micro_batch", [6, 3])
def test_an_evaluation_sees_the_first_workers_statistics(ranks: MakeRanks, micro_batch: int) -> None:
    first, second = ranks(2)(statistics, Setup("norms", micro_batch=micro_batch))
    assert any(not torch.equal(first["before"][name], second["before"][name]) for name in first["before"])
    assert_equal([first["after"], second["after"]], [first["before"], first["before"]])
    assert first["loss"] == second["loss"]


def go_on_from_a_state(process: Process, setup: Setup, at: int) -> tuple[bool, list[Numbers], list[Numbers]]:
    """Whether all hold the same state at a step, and where the rest leads: undisturbed, and loaded into a new unit."""
    unit = setup.unit(process)
    kept: UnitState | None = None
    for number, step in enumerate(setup.batches(process), 1):
        unit.forward_backward(step)
        unit.optimizer_step(0.1)
        if number == at:
            state = unit.state()
            kept = UnitState({name: tensor.clone() for name, tensor in state.tensors.items()}, state.values)
    assert kept is not None
    # A checkpoint holds the state of the first worker.
    saved = {}
    for name, tensor in kept.tensors.items():
        saved[name] = tensor.clone()
        dist.broadcast(saved[name], 0)
    learned = {f"model.{name}" for name, _ in unit.model.named_parameters()} | {n for n in saved if "optim." in n}
    same = all(torch.equal(saved[name], kept.tensors[name]) for name in learned)
    other = setup.unit(process)
    other.load(UnitState(saved, kept.values))
    for step in setup.batches(process, at):
        other.forward_backward(step)
        other.optimizer_step(0.1)
    return same, [unit.state().tensors], [other.state().tensors]


@pytest.mark.parametrize("case", ["norms", "gpt", "two_views"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_state_is_the_same_on_all_workers_and_loads_into_all(
    ranks: MakeRanks, case: str, name: str, world_size: int
) -> None:
    """With three workers the order of a sum shows: a gradient must keep its place in its bucket over a resume."""
    optim = OptimSection(name=name, lr=0.1, weight_decay=0.1, momentum=0.9 if name == "sgd" else None)
    for bucket_mb in (25.0, 0.002):
        setup = Setup(case, micro_batch=3, optim=optim, parallel=ParallelSection(bucket_mb=bucket_mb))
        for same, undisturbed, resumed in ranks(world_size)(go_on_from_a_state, setup, 3):
            assert same
            assert_equal(resumed, undisturbed)


def apart(process: Process, setup: Setup) -> list[bool]:
    """After each step: whether all workers hold the same weights and optimizer state."""
    unit, same = setup.unit(process), []
    for step in setup.batches(process):
        unit.forward_backward(step)
        unit.optimizer_step(0.1)
        sums = [float(tensor.double().sum()) for tensor in unit.state().tensors.values()]
        same.append(len({tuple(values) for values in process.group.gather(sums)}) == 1)
    return same


@pytest.mark.parametrize("case", ["count", "norms"])
def test_local_steps_come_together_exactly_when_they_should(ranks: MakeRanks, case: str) -> None:
    optim = OptimSection(name="adamw", lr=0.01)
    setup = Setup(case, steps=9, micro_batch=2, optim=optim, parallel=ParallelSection(sync_every=4))
    expected = [step % 4 == 0 for step in range(1, 10)]
    assert ranks(3)(apart, setup) == [expected] * 3
    found = ranks(3)(go_on_from_a_state, dataclasses.replace(setup, steps=8), 4)
    for same, undisturbed, resumed in found:
        assert same
        assert_equal(resumed, undisturbed)


def test_local_steps_learn_about_as_well(ranks: MakeRanks) -> None:
    setup = Setup("wide", size=25, steps=40, optim=OptimSection(name="sgd", lr=0.1), micro_batch=4)
    plain = ranks(3)(train, setup)[0]
    local = ranks(3)(train, dataclasses.replace(setup, parallel=ParallelSection(sync_every=4)))[0]
    assert sum(local.losses[-3:]) < 0.9 * sum(local.losses[:3])
    assert sum(local.losses[-3:]) == pytest.approx(sum(plain.losses[-3:]), rel=0.3)


def test_batch_norm_over_workers_is_refused_without_gpus() -> None:
    with pytest.raises(UserError, match=r"^parallel\.sync_batch_norm: .*GPUs only; turn it off on the CPU"):
        Setup("norms", parallel=ParallelSection(strategy="ddp", sync_batch_norm=True)).unit(ALONE)


def refused(process: Process, case: str, size: int) -> str:
    """What the user is told; every worker must be told, or the others would wait for it."""
    setup = Setup("count", size=size)
    objective = {
        "differs": Objective(sum_and_count, measure, lambda batch: len(batch[0]) + 1),
        "nothing": Objective(sum_and_count, measure, lambda batch: 0),
        "mean": Objective(mean_loss, measure, count_rows),
        "nothing_after": Objective(lambda model, batch: (model(batch[0]).sum(), 0), measure),
    }[case]
    settings = StepSettings(optim=SGD)
    unit = build_unit(ParallelSection(), CASES["count"].model(), objective, settings, process)
    with pytest.raises(UserError) as caught:
        unit.forward_backward(next(iter(setup.batches(process))))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("differs", "task.count says 7 items and task.loss counts"),
        ("nothing", "task.count found nothing to learn from in a whole step"),
        ("mean", "task.loss returned a mean, but the task has count()"),
        ("nothing_after", "task.loss counted nothing to learn from in a whole step"),
    ],
)
def test_a_task_that_counts_wrongly_is_told_on_every_worker(ranks: MakeRanks, case: str, says: str) -> None:
    assert all(says in message for message in ranks(2)(refused, case, 36))


def test_the_strategy_follows_from_the_number_of_workers(ranks: MakeRanks) -> None:
    assert ranks(2)(kind_of_unit, "auto") == ["DdpUnit"] * 2
    assert ranks(2)(kind_of_unit, "ddp") == ["DdpUnit"] * 2
    assert kind_of_unit(ALONE, "auto") == kind_of_unit(ALONE, "single") == "SingleUnit"
    with pytest.raises(UserError, match=r"^parallel\.strategy: single is for one worker, and there are 3"):
        kind_of_unit(dataclasses.replace(ALONE, world_size=3), "single")


def kind_of_unit(process: Process, strategy: Any) -> str:
    unit = Setup("mlp", parallel=ParallelSection(strategy=strategy)).unit(process)
    assert isinstance(unit, DdpUnit) == (process.world_size > 1)
    return type(unit).__name__
