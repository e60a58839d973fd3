"""A pipeline on real processes: the numbers of one process, whatever the schedule, the task and the sizes."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.core.weights import named_weights, weights_sha256
from shoal.data.dataset import MemoryDataset
from shoal.data.loader import evaluation_batches, train_batches
from shoal.data.order import Order
from shoal.models.gpt import Gpt
from shoal.models.vit import Vit
from shoal.parallel.build import build_unit
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.train.evaluate import evaluate
from shoal.train.restore import restore_newest
from shoal.train.save import Checkpoints
from shoal.train.state import Identity, TrainState
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]
Numbers = dict[str, torch.Tensor]
ALONE = Process(0, 1, CPU)

GPIPE = {"strategy": "pipeline", "pipeline": {"schedule": "gpipe"}}
ONE_EACH = {"strategy": "pipeline", "pipeline": {"schedule": "1f1b"}}
LOOPED = {"strategy": "pipeline", "pipeline": {"schedule": "interleaved"}}
TWO_PIPELINES = {"strategy": "pipeline", "pipeline": {"stages": 2}}
TWO_LOOPED = {"strategy": "pipeline", "pipeline": {"stages": 2, "schedule": "interleaved"}, "bucket_mb": 0.0005}
LAYOUTS = {"gpipe": GPIPE, "1f1b": ONE_EACH, "two_pipelines": TWO_PIPELINES, "two_looped": TWO_LOOPED}
"""On four processes."""


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
    )


class Parted(nn.Module):
    """With a frozen first block, a part that nobody uses, a weight in two blocks, and an output in a dictionary."""

    shoal_stages = ("enter", "leave")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 8).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.blocks[0].requires_grad_(False)
        self.blocks[3].weight = self.blocks[1].weight
        self.idle = nn.Linear(2, 2)
        self.head = nn.Linear(8, 3)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embed(x))

    def leave(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(x), "size": x.square().mean(1)}

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Centred(nn.Module):
    """With a running mean that training reads, by a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.training:
            self.centre = self.centre * 0.5 + x.detach().mean(0) * 0.5
        return x * (1 + self.centre)


class Experts(nn.Module):
    """A sample goes through one of several layers; one that no sample goes through is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
        found = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = (chosen == number).nonzero().squeeze(1)
            found = found.index_add(0, rows, self.experts[number](x[rows]))
        return x + found


def experts() -> nn.Module:
    shared = Experts()
    return nn.Sequential(shared, Experts(), Experts(), shared, nn.Linear(6, 3))


class Trimmed(nn.Module):
    """Cuts off what is padding in all samples."""

    shoal_stages = ("enter", "leave")

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def enter(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embed(tokens[:, : int((tokens != 0).sum(1).max())])

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sum_and_count(model, batch):
    """Over the rows whose first input is not very small: how many is known only by looking."""
    rows = batch[0][:, 0] > -0.6
    return F.cross_entropy(model(batch[0])[rows], batch[1][rows], reduction="sum"), rows.sum()


def count_rows(batch):
    return (batch[0][:, 0] > -0.6).sum()


def loss_of_parts(model, batch):
    found = model(batch[0])
    return F.cross_entropy(found["logits"], batch[1]) + 0.1 * found["size"].mean()


def token_loss(model, batch):
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def measure(model, batch, num_samples):
    """Asks the model twice, as a task's metrics and its loss do one after the other."""
    correct = (model(batch[0]).argmax(1) == batch[1]).sum()
    return {"correct": (correct, num_samples), "loss": (mean_loss(model, batch) * num_samples, num_samples)}


def measure_parts(model, batch, num_samples):
    return {"loss": (loss_of_parts(model, batch) * num_samples, num_samples)}


def measure_tokens(model, batch, num_samples):
    return {"loss": token_loss(model, batch)}


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module]
    objective: Objective
    shape: tuple[int, ...] = (6,)
    vocabulary: int | None = None

    def data(self, size: int) -> MemoryDataset:
        generator = torch.Generator().manual_seed(5)
        if self.vocabulary is None:
            inputs = torch.randn(size, *self.shape, generator=generator)
            return MemoryDataset(inputs, torch.randint(0, 3, (size,), generator=generator))
        tokens = torch.randint(0, self.vocabulary, (size, self.shape[0] + 1), generator=generator)
        return MemoryDataset(tokens[:, :-1], tokens[:, 1:])


GPT = {"layers": 4, "heads": 2, "dim": 8}
CASES = {
    "mean": Case(layers, Objective(mean_loss, measure)),
    "sums": Case(layers, Objective(sum_and_count, measure)),
    "count": Case(layers, Objective(sum_and_count, measure, count_rows)),
    "parted": Case(Parted, Objective(loss_of_parts, measure_parts)),
    "experts": Case(experts, Objective(mean_loss, measure)),
    "trimmed": Case(Trimmed, Objective(mean_loss, measure)),
    "centred": Case(lambda: nn.Sequential(*[Centred() for _ in range(4)]), Objective(mean_loss, measure)),
    "norms": Case(norms, Objective(mean_loss, measure)),
    "tied": Case(lambda: Gpt(17, 8, **GPT), Objective(token_loss, measure_tokens), (8,), 17),
    "untied": Case(lambda: Gpt(17, 8, **GPT, tie_weights=False), Objective(token_loss, measure_tokens), (8,), 17),
    "dropout": Case(lambda: Gpt(17, 8, **GPT, dropout=0.2), Objective(token_loss, measure_tokens), (8,), 17),
    "vit": Case(
        lambda: Vit((1, 8, 8), 4, 3, layers=4, heads=2, dim=8, mlp_dim=16), Objective(mean_loss, measure), (1, 8, 8)
    ),
}
SGD = OptimSection(name="sgd", lr=0.1, momentum=0.9, weight_decay=0.1)


@dataclass(frozen=True)
class Setup:
    case: str
    parallel: dict[str, Any] = field(default_factory=dict)
    size: int = 36
    global_batch: int = 12
    micro_batch: int = 2
    steps: int = 5
    optim: OptimSection = SGD
    clip_norm: float | None = 0.5
    precision: str = "fp32"
    recompute: bool = False
    compile: bool = False
    evaluate_every: int = 100

    def unit(self, process: Process, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        settings = StepSettings(
            optim=self.optim,
            clip_norm=self.clip_norm,
            precision=self.precision,
            activation_checkpointing=self.recompute,
            compile=self.compile,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
        )
        case = CASES[self.case]
        return build_unit(ParallelSection(**self.parallel), case.model(), case.objective, settings, process)

    def batches(self, unit: TrainUnit, start: int = 0) -> Iterator[StepBatch]:
        order = Order(self.size, self.global_batch, seed=3)
        return train_batches(
            CASES[self.case].data(self.size),
            order,
            start,
            self.steps,
            rank=unit.data_rank,
            world_size=unit.data_size,
            micro_batch=self.micro_batch,
        )

    def validation(self, unit: TrainUnit, size: int = 11, batch: int = 4) -> Iterator[MicroBatch]:
        return evaluation_batches(
            CASES[self.case].data(size), rank=unit.data_rank, world_size=unit.data_size, batch=batch
        )


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    metrics: dict[str, float]
    weights: Numbers
    """Whole; on the first worker alone."""
    report: dict[str, float]


def run(process: Process, unit: Any, setup: Setup, start: int = 0) -> Trained:
    losses, found = [], []
    for number, step in enumerate(setup.batches(unit, start), start + 1):
        loss = unit.forward_backward(step)
        unit.optimizer_step(0.1)
        total, count = process.group.sum(sum(float(term) * weight for term, weight in loss.terms), float(loss.count))
        losses.append(total / count)
        found.append(unit.report().get("grad_norm", 0.0))
        if number % setup.evaluate_every == 0:
            evaluate(unit, setup.validation(unit), lambda: None, 0, process.group)
    metrics = evaluate(unit, setup.validation(unit), lambda: None, 0, process.group) or {}
    weights = {name: tensor.clone() for name, tensor in unit.full_weights()}
    return Trained(losses, found, metrics, weights, unit.report())


def train(process: Process, setup: Setup) -> Trained:
    return run(process, setup.unit(process), setup)


def alone(setup: Setup) -> Trained:
    """In one process, with a thread, as the others have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(ALONE, dataclasses.replace(setup, parallel={}))
    finally:
        torch.set_num_threads(threads)


def assert_close(found: Numbers, expected: Numbers, tolerance: float) -> None:
    assert list(found) == sorted(expected)
    for name, tensor in found.items():
        difference = float((tensor.double() - expected[name].double()).abs().max())
        assert difference <= tolerance, f"{name}: {difference}"


def assert_same_training(found: list[Trained], expected: Trained, tolerance: float = 2e-6) -> None:
    for worker in found:
        assert worker.losses == pytest.approx(expected.losses, abs=tolerance)
        assert worker.norms == pytest.approx(expected.norms, rel=2e-5, abs=tolerance)
        assert worker.metrics == pytest.approx(expected.metrics, abs=tolerance)
    assert_close(found[0].weights, expected.weights, tolerance)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *[("tied", layout) for layout in LAYOUTS],
        *[pytest.param("parted", layout, marks=pytest.mark.slow) for layout in LAYOUTS if layout != "1f1b"],
        ("parted", "1f1b"),
        ("mean", "1f1b"),
        pytest.param("mean", "two_looped", marks=pytest.mark.slow),
        pytest.param("sums", "gpipe", marks=pytest.mark.slow),
        ("sums", "two_pipelines"),
        pytest.param("count", "1f1b", marks=pytest.mark.slow),
        ("count", "two_looped"),
        ("untied", "two_looped"),
        pytest.param("vit", "gpipe", marks=pytest.mark.slow),
        ("vit", "two_looped"),
    ],
)
def test_a_pipeline_trains_as_one_process_would(ranks: MakeRanks, case: str, layout: str) -> None:
    # Steps of 12, 12 and 5 samples: the micro-batches of the short one are fewer, and not all of one size.
    setup = Setup(case, LAYOUTS[layout], size=29)
    assert_same_training(ranks(4)(train, setup), alone(setup))


@pytest.mark.parametrize(
    "sizes",
    [
        {"micro_batch": 12},  # one micro-batch, fewer than stages
        {"micro_batch": 1, "size": 25},  # one sample in the last step: of two pipelines, one has none
        {"micro_batch": 5, "size": 26, "clip_norm": None},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(ONE_EACH, id="1f1b", marks=pytest.mark.slow),
        pytest.param(TWO_PIPELINES, id="two", marks=pytest.mark.slow),
        pytest.param(TWO_LOOPED, id="two_looped"),
    ],
)
def test_no_number_of_micro_batches_is_too_few_or_too_odd(ranks: MakeRanks, parallel: dict, sizes: dict) -> None:
    for case in ("sums", "tied"):
        setup = Setup(case, parallel, **sizes)
        assert_same_training(ranks(4)(train, setup), alone(setup))


def test_four_workers_of_two_stages_each(ranks: MakeRanks) -> None:
    """The micro-batches of a step, 9, are made 10, which is what that schedule can take."""
    setup = Setup("eight", LOOPED, global_batch=18, micro_batch=2)
    assert_same_training(ranks(4)(train, setup), alone(setup))


CASES["eight"] = Case(
    lambda: nn.Sequential(
        nn.Linear(6, 8), *[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)], nn.Linear(8, 3)
    ),
    Objective(mean_loss, measure),
)


def test_pipelines_may_use_other_parts_of_a_model(ranks: MakeRanks) -> None:
    """With weight decay and momentum, which must leave alone what nobody used."""
    setup = Setup("experts", TWO_PIPELINES, size=4, global_batch=2, micro_batch=1, steps=8)
    assert_same_training(ranks(4)(train, setup), alone(setup))


def holds(process: Process, setup: Setup) -> dict[str, Any]:
    unit = setup.unit(process)
    run(process, unit, setup)
    own = {name: tensor for name, tensor in unit.model.named_parameters() if not tensor.is_meta}
    return {
        "names": set(own),
        "tied": {name: tensor.detach().clone() for name, tensor in own.items() if name == "token_embedding.weight"},
        "all": [name for name, _ in unit.model.named_parameters()],
        "optimizer": {unit.names[parameter] for parameter in unit.optimizer.state},
        "data": (unit.data_rank, unit.data_size),
    }


def test_a_worker_holds_its_stage_alone_and_tied_weights_stay_the_same_to_the_last_bit(ranks: MakeRanks) -> None:
    adam = OptimSection(name="adamw", lr=0.1, weight_decay=0.1)
    found = ranks(4)(holds, Setup("tied", TWO_PIPELINES, optim=adam, size=29))
    names = [name for name, _ in CASES["tied"].model().named_parameters()]
    for rank, worker in enumerate(found):
        assert worker["all"] == names, "by the names it has in one process"
        assert worker["optimizer"] == worker["names"]
        blocks = {name.split(".")[1] for name in worker["names"] if name.startswith("blocks.")}
        assert blocks == ({"0", "1"} if rank < 2 else {"2", "3"})
        assert worker["data"] == (rank % 2, 2)
    assert found[0]["names"] & found[2]["names"] == {"token_embedding.weight"}
    tied = [worker["tied"]["token_embedding.weight"] for worker in found]
    assert all(torch.equal(tied[0], other) for other in tied[1:])


def differences(process: Process, setup: Setup, other: Setup) -> Numbers:
    """Weights after one and the other, subtracted."""
    one, two = train(process, setup).weights, train(process, other).weights
    return {name: (tensor - two[name]).abs().max() for name, tensor in one.items() if tensor.numel()}


@pytest.mark.parametrize(
    "case", ["dropout", "norms", *(pytest.param(more, marks=pytest.mark.slow) for more in ("centred", "sums"))]
)
def test_training_twice_gives_the_same_bits_and_evaluating_in_between_changes_none(ranks: MakeRanks, case: str) -> None:
    for parallel in (ONE_EACH, TWO_LOOPED):
        setup = Setup(case, parallel, size=29, micro_batch=3)
        often = dataclasses.replace(setup, evaluate_every=1)
        for worker in ranks(4)(differences, setup, often):
            assert all(float(value) == 0.0 for value in worker.values())


def test_recomputed_activations_change_no_number(ranks: MakeRanks) -> None:
    setup = Setup("tied", GPIPE, size=29)
    for worker in ranks(4)(differences, setup, dataclasses.replace(setup, recompute=True)):
        assert all(float(value) < 1e-6 for value in worker.values())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lower_precision_trains_about_the_same(ranks: MakeRanks, precision: str) -> None:
    """Activations travel in the type that a layer gives them in, and one loss scale goes for all."""
    setup = Setup("mean", TWO_PIPELINES, precision=precision, size=29)
    found, expected = ranks(4)(train, setup), alone(setup)
    assert_same_training(found, expected, 5e-3)
    assert [worker.report for worker in found] == [found[0].report] * 4
    assert ("loss_scale" in found[0].report) == (precision == "fp16")


def test_loss_scaling_begins_also_where_a_pipeline_has_no_sample(ranks: MakeRanks) -> None:
    setup = Setup("mean", TWO_PIPELINES, precision="fp16", size=1, steps=2)
    assert_same_training(ranks(4)(train, setup), alone(setup), 5e-3)


def overflow(process: Process) -> list[float]:
    """The loss scale after a step whose gradients are infinite on one worker, and the weights' change by it."""
    setup = Setup("mean", TWO_PIPELINES, precision="fp16", clip_norm=None)
    unit = setup.unit(process)
    before = {name: tensor.clone() for name, tensor in unit.full_weights()}
    unit.forward_backward(next(iter(setup.batches(unit))))
    if process.rank == 3:
        unit.parameters[0].grad[0] = torch.inf
    unit.optimizer_step(0.1)
    after = dict(unit.full_weights())
    changed = [float((after[name] - before[name]).abs().max()) for name in after if after[name].numel()]
    return [unit.report()["loss_scale"], max(changed)]


def test_a_step_that_overflows_on_one_worker_is_left_out_on_all(ranks: MakeRanks) -> None:
    assert ranks(4)(overflow) == [[2.0**15, 0.0]] * 4


@pytest.mark.slow
def test_compiled_blocks_give_the_same(ranks: MakeRanks) -> None:
    setup = Setup("tied", TWO_PIPELINES, size=29)
    assert_same_training(ranks(4)(train, dataclasses.replace(setup, compile=True), timeout_s=600.0), alone(setup), 1e-5)


def statistics(process: Process, setup: Setup) -> dict[str, Any]:
    unit = setup.unit(process)
    trained = run(process, unit, setup)
    state = unit.state().tensors
    return {
        "metrics": trained.metrics,
        "buffers": {name: tensor.clone() for name, tensor in unit.model.named_buffers() if not tensor.is_meta},
        "saved": [name for name in state if "running" in name or "tracked" in name],
    }


def test_batch_norm_works_on_micro_batches_and_the_first_pipelines_statistics_count(ranks: MakeRanks) -> None:
    """Also on the short step's, of three and of two samples."""
    setup = Setup("norms", GPIPE, size=29, micro_batch=3)
    assert_same_training(ranks(4)(train, setup), alone(setup))
    found = ranks(4)(statistics, dataclasses.replace(setup, parallel=TWO_PIPELINES))
    names = {name for name, _ in norms().named_buffers()}
    assert found[0]["buffers"].keys() | found[2]["buffers"].keys() == names
    assert {name for worker in found[::2] for name in worker["saved"]} == {f"model.{name}" for name in names}
    assert found[1]["saved"] == found[3]["saved"] == []
    for first, second in ((0, 1), (2, 3)):
        for name, buffer in found[first]["buffers"].items():
            assert torch.equal(buffer, found[second]["buffers"][name]), "as the evaluation has seen them"


def test_micro_batches_that_fill_a_schedule_are_in_no_statistics(ranks: MakeRanks) -> None:
    """Of five micro-batches, which are made six."""
    setup = Setup("norms", LOOPED, size=20, global_batch=15, micro_batch=3)
    assert_same_training(ranks(2)(train, setup), alone(setup))


class Drawing:
    """A task that mixes inputs at random, and needs the same mixture for its loss."""

    def __init__(self) -> None:
        self.drawn: list[list[float]] = []

    def loss(self, model, batch):
        share = (random.random(), float(torch.rand(())))
        self.drawn.append(list(share))
        return (model(batch[0] * share[0]) - share[1]).square().mean()


def draw(process: Process) -> list[list[float]]:
    setup, task = Setup("mean", ONE_EACH, micro_batch=4, steps=2), Drawing()
    unit = build_unit(
        ParallelSection(**ONE_EACH), layers(), Objective(task.loss, measure), StepSettings(optim=SGD), process
    )
    for step in setup.batches(unit):
        unit.forward_backward(step)
        unit.optimizer_step(0.1)
    return task.drawn


def test_a_task_draws_the_same_where_its_inputs_and_where_its_loss_is_computed(ranks: MakeRanks) -> None:
    first, *_, last = ranks(4)(draw)
    assert len(first) == 6 and len(last) == 12, "the last worker asks for the inputs' shapes as well"
    assert first == last[:3] + last[6:9] == last[3:6] + last[9:]
    assert len({tuple(pair) for pair in first}) == 6


def fill(process: Process) -> str | None:
    """The hash of a model that is built on the meta device and filled."""
    torch.manual_seed(7)
    whole = CASES["tied"].model()
    with torch.device("meta"):
        model = CASES["tied"].model()
    initial = ((name, tensor.detach()) for name, tensor in [*whole.named_parameters(), *whole.named_buffers()])
    section, settings = ParallelSection(**TWO_PIPELINES), StepSettings(optim=SGD)
    unit = build_unit(section, model, CASES["tied"].objective, settings, process, initial)
    weights = dict(unit.full_weights())
    assert list(weights) == sorted(named_weights(whole))
    return weights_sha256(weights) if process.is_first else None


def test_a_model_without_memory_gets_its_weights_and_the_first_worker_tells_all_of_them(ranks: MakeRanks) -> None:
    torch.manual_seed(7)
    expected = weights_sha256(named_weights(CASES["tied"].model()))
    assert ranks(4)(fill) == [expected, None, None, None]


def begin_apart(process: Process) -> Numbers:
    unit = Setup("tied", TWO_PIPELINES).unit(process, seed=process.rank)
    return {name: tensor.detach().clone() for name, tensor in unit.model.named_parameters() if not tensor.is_meta}


def test_those_who_hold_the_same_weights_begin_with_the_same(ranks: MakeRanks) -> None:
    found = ranks(4)(begin_apart)
    for one, other in ((0, 1), (2, 3)):
        assert all(torch.equal(tensor, found[other][name]) for name, tensor in found[one].items())
    assert torch.equal(found[0]["token_embedding.weight"], found[3]["token_embedding.weight"])


IDENTITY = Identity(train_samples=36, fixed={})


def save_midway(process: Process, setup: Setup, folder: Path, at: int) -> Trained:
    """Save at a step, and go on to the last."""
    unit = setup.unit(process)
    run(process, unit, dataclasses.replace(setup, steps=at))
    state = TrainState()
    state.step = at
    saver = Saver(folder, CheckpointSection(), process)
    checkpoints = Checkpoints(saver, unit, state, process, IDENTITY, Order(setup.size, setup.global_batch, 0))
    checkpoints.save()
    went = run(process, unit, setup, at)
    checkpoints.finish("done")
    return went


def go_on(process: Process, setup: Setup, folder: Path) -> Trained:
    """From a checkpoint, with weights that were others before."""
    unit = setup.unit(process, seed=100 + process.rank)
    at = restore_newest(folder, unit, process, IDENTITY, seed=0).state.step
    return run(process, unit, setup, at)


ADAM = OptimSection(name="adamw", lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *(("dropout", "1f1b"), ("parted", "two_looped"), ("norms", "1f1b")),
        *(pytest.param(case, "two_looped", marks=pytest.mark.slow) for case in ("dropout", "norms")),
    ],
)
def test_a_resumed_run_is_to_the_last_bit_the_undisturbed_one(
    ranks: MakeRanks, tmp_path: Path, case: str, layout: str
) -> None:
    setup = Setup(case, LAYOUTS[layout], optim=ADAM)
    undisturbed = ranks(4)(save_midway, setup, tmp_path, 3)
    resumed = ranks(4)(go_on, setup, tmp_path)
    for one, other in zip(undisturbed, resumed, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert one.metrics == other.metrics
    for name, tensor in undisturbed[0].weights.items():
        assert torch.equal(tensor, resumed[0].weights[name]), name


def test_a_checkpoint_goes_from_a_pipeline_to_other_strategies_and_back(ranks: MakeRanks, tmp_path: Path) -> None:
    ways = [(TWO_LOOPED, [GPIPE, {"strategy": "ddp"}]), ({"strategy": "ddp"}, [TWO_PIPELINES, GPIPE])]
    for number, (saved, others) in enumerate(ways):
        setup, folder = Setup("tied", saved, optim=ADAM, size=28), tmp_path / str(number)
        undisturbed = ranks(4)(save_midway, setup, folder, 3)[0]
        went = [ranks(4)(go_on, dataclasses.replace(setup, parallel=other), folder)[0] for other in others]
        went += ranks(1)(go_on, dataclasses.replace(setup, parallel={}), folder)
        for each in went:
            assert each.losses == pytest.approx(undisturbed.losses, abs=1e-5)
            assert each.metrics == pytest.approx(undisturbed.metrics, abs=1e-5)


def test_statistics_go_with_a_checkpoint(ranks: MakeRanks, tmp_path: Path) -> None:
    setup = Setup("norms", GPIPE, optim=ADAM, size=28)
    undisturbed = ranks(4)(save_midway, setup, tmp_path, 3)[0]
    (one,) = ranks(1)(go_on, dataclasses.replace(setup, parallel={}), tmp_path)
    assert one.losses == pytest.approx(undisturbed.losses, abs=1e-5)
    assert one.metrics == pytest.approx(undisturbed.metrics, abs=1e-5)


def read_names(process: Process, folder: Path) -> list[str]:
    """Of the model, those that a worker reads from a checkpoint."""
    unit = Setup("untied", ONE_EACH).unit(process)

    class Watched(dict[str, torch.Tensor]):
        asked: list[str] = []

        @property
        def shapes(self) -> dict[str, tuple[int, ...]]:
            return {name: tuple(tensor.shape) for name, tensor in self.items()}

        def __getitem__(self, name: str) -> torch.Tensor:
            self.asked.append(name)
            return super().__getitem__(name)

    whole = Watched({f"model.{name}": torch.ones(tensor.shape) for name, tensor in unit.model.state_dict().items()})
    unit.load(dataclasses.replace(unit.state(), tensors=whole))
    assert all(bool((tensor == 1).all()) for tensor in unit.model.parameters() if not tensor.is_meta)
    return whole.asked


def test_a_worker_reads_its_own_part_of_a_checkpoint(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(4)(read_names, tmp_path)
    read = [name for names in found for name in names]
    assert len(read) == len(set(read)) == len(CASES["untied"].model().state_dict())


def hooked() -> nn.Module:
    model = layers()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[index]
    return model


def refused(process: Process, case: str) -> str:
    """What the user is told; every worker must be told, or the others would wait for it."""
    model: Callable[[], nn.Module] = layers
    objective, at_once = Objective(mean_loss, measure), False
    parallel, micros = ONE_EACH, 2
    if case == "attribute":
        objective = Objective(
            lambda model, batch: mean_loss(model, batch) + sum(p.sum() for p in model.parameters()), measure
        )
    elif case == "keyword":
        objective = Objective(lambda model, batch: model(input=batch[0]).sum(), measure)
    elif case == "number":
        objective = Objective(lambda model, batch: model(batch[0], 3).sum(), measure)
    elif case == "rows":
        objective = Objective(lambda model, batch: model(batch[0], batch[1][:1]).sum(), measure)
    elif case == "twice":
        objective = Objective(lambda model, batch: mean_loss(model, batch) + mean_loss(model, batch), measure)
    elif case == "never":
        objective = Objective(lambda model, batch: batch[0].sum(), measure)
    elif case == "not_a_loss":
        objective = Objective(lambda model, batch: model(batch[0]), measure)
    elif case == "differs":
        objective = Objective(sum_and_count, measure, lambda batch: len(batch[0]) + 1)
    elif case == "nothing":
        objective = Objective(sum_and_count, measure, lambda batch: 0)
    elif case == "mean":
        objective = Objective(mean_loss, measure, count_rows)
    elif case == "nothing_after":
        objective = Objective(lambda model, batch: (model(batch[0]).sum(), 0), measure)
    elif case == "frozen":
        model, at_once = lambda: layers().requires_grad_(False), True
    elif case == "plain":
        model, at_once = lambda: nn.Linear(6, 3), True
    elif case == "hook":
        model, at_once = hooked, True
    elif case == "few_blocks":
        model, at_once = lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)), True
    elif case == "uneven":
        parallel, at_once = {"strategy": "pipeline", "pipeline": {"stages": 3}}, True
    with pytest.raises(UserError) as caught:
        unit = build_unit(ParallelSection(**parallel), model(), objective, StepSettings(optim=SGD), process)
        assert not at_once
        data = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
        unit.forward_backward(StepBatch([MicroBatch(data, 4)] * micros, 8))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("attribute", "task.loss uses model.parameters, but a pipeline has no worker with all of it; call it once, as"),
        ("keyword", "task.loss calls the model with input=...; in a pipeline, call it once, as model(inputs)"),
        ("number", "task.loss calls the model with a int; in a pipeline, call it once"),
        ("rows", "tensors of shapes (4, 6), (1,); in a pipeline, the first dimension of each must be the samples"),
        ("twice", "task.loss calls the model twice; in a pipeline, call it once"),
        ("never", "task.loss does not call the model it is given"),
        ("not_a_loss", "task.loss returned a tensor of shape (4, 3)"),
        ("differs", "task.count says 10 items and task.loss counts"),
        ("nothing", "task.count found nothing to learn from in a whole step"),
        ("mean", "task.loss returned a mean, but the task has count()"),
        ("nothing_after", "task.loss counted nothing to learn from in a whole step"),
        ("frozen", "model: has no parameter that trains"),
        ("plain", "parallel.strategy: pipeline needs a model that says how it is cut, and Linear does not"),
        ("hook", "model: has a hook on the gradient of 0.weight, which a divided model does not keep"),
        ("few_blocks", "4 workers need 4 blocks or more, and the model has 3; nearest that works: 2"),
        ("uneven", "parallel.pipeline.stages: 3 does not divide the 4 workers into equal groups"),
    ],
)
def test_what_cannot_work_is_told_on_every_worker(ranks: MakeRanks, case: str, says: str) -> None:
    assert [message for message in ranks(4)(refused, case) if says not in message] == []


def test_one_worker_is_no_pipeline() -> None:
    with pytest.raises(UserError, match=r"^parallel\.pipeline\.stages: a pipeline of one worker is none"):
        Setup("mean", ONE_EACH).unit(ALONE)


def trim(process: Process) -> list[str]:
    """What the first worker says, which then sends what the other one waits for."""
    flow = Setup("trimmed", GPIPE).unit(process).flow
    full, trimmed = (torch.ones(3, 5, dtype=torch.int64), torch.tensor([[1, 2, 0, 0, 0]] * 3))
    told = []
    flow.forward((full,))
    for go in (lambda: flow.forward((trimmed,)), lambda: flow.train([(trimmed,)], lambda output: output.sum())):
        if process.is_first:
            with pytest.raises(UserError) as caught:
                go()
            flow.send(torch.zeros(3, 5, 4), 1)
            told.append(str(caught.value))
        else:
            go()
    if process.is_first:
        flow.receive(((3, 5, 4), torch.float32), 1)  # the gradient
    return told


def test_a_shape_between_stages_that_depends_on_values_is_refused(ranks: MakeRanks) -> None:
    told, _ = ranks(2)(trim)
    assert len(told) == 2
    for message in told:
        assert message.startswith("model: Linear gives (3, 2, 4) of torch.float32, and has given (3, 5, 4) of")


def uneven_lengths(process: Process) -> str:
    unit = Setup("tied", ONE_EACH).unit(process)
    micros = [MicroBatch((torch.zeros(2, size, dtype=torch.int64),) * 2, 2) for size in (5, 7)]
    with pytest.raises(UserError) as caught:
        unit.forward_backward(StepBatch(micros, 4))
    for size in (5, 7, 5):  # but from step to step they may change
        unit.forward_backward(StepBatch([MicroBatch((torch.zeros(2, size, dtype=torch.int64),) * 2, 2)] * 2, 4))
        unit.optimizer_step(0.1)
    return str(caught.value)


def test_samples_may_be_of_another_length_in_every_step_but_not_within_one(ranks: MakeRanks) -> None:
    for message in ranks(4)(uneven_lengths):
        assert message.startswith(
            "data: the samples of one step have shapes [(5,)] and [(7,)] in different micro-batches"
        )
