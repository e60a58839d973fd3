"""Workers that share every layer: the numbers of one process, weights that stay the same, states for any other."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.checkpoint.pieces import pieces_to_write
from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.parts import is_distributed
from shoal.core.process import Process
from shoal.core.weights import named_weights
from shoal.data.dataset import MemoryDataset
from shoal.data.loader import evaluation_batches, train_batches
from shoal.data.order import Order
from shoal.models.gpt import Gpt
from shoal.models.vit import Vit
from shoal.parallel.build import build_unit
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.tensor import TensorUnit
from shoal.parallel.unit import StepSettings, TrainUnit, UnitState
from shoal.tasks.build import task_objective
from shoal.tasks.language_modelling import LanguageModellingTask
from shoal.tasks.section import LanguageModelling
from shoal.train.evaluate import evaluate
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]
Numbers = dict[str, torch.Tensor]
ALONE = Process(0, 1, CPU)
BATCH, SAMPLES = 8, 20
"""Three steps an epoch, the last of them of 4 samples: with two groups and micro-batches of 3, some are for show."""
VOCABULARY, TOKENS = 17, 8
"""Two workers cannot have equal shares of the vocabulary."""

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "sequence": (2, {}),
    "plain": (2, {"tensor": {"sequence": False}}),
    "ddp": (4, {"tensor": {"size": 2}}),
    "fsdp": (4, {"tensor": {"size": 2, "across": "fsdp"}}),
    "fsdp_last": (4, {"tensor": {"size": 2, "across": "fsdp"}, "fsdp": {"reduce_every_micro_batch": False}}),
    "offload": (4, {"tensor": {"size": 2, "across": "fsdp"}, "fsdp": {"cpu_offload": True}}),
    "size_1": (2, {"tensor": {"size": 1}}),
}
"""Workers, and the parallel section."""


class Own(nn.Module):
    """A user's: gated, with a parameter of a block's own, and two norms that are one."""

    shoal_tensor = {
        "embedding": "vocabulary",
        "start": "split",
        "blocks.*": "gather",
        "blocks.*.gate": "columns",
        "blocks.*.up": "columns",
        "blocks.*.down": "rows",
        "norms.*": "tokens",
        "scale": "tokens",
        "head": "logits",
    }
    num_tokens = TOKENS

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.start = nn.Identity()
        self.blocks = nn.ModuleList(Gated() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(12) for _ in range(2))
        self.norms[1].weight = self.norms[0].weight
        self.scale = nn.Parameter(torch.ones(12))
        self.position = nn.Parameter(torch.zeros(TOKENS, 12))
        self.again = nn.ParameterList([self.position])
        self.head = nn.Linear(12, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.start(self.embedding(tokens) + self.position * self.again[0])
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + self.scale * block(norm(x), 1.0)
        logits: torch.Tensor = self.head(x)
        logits += 0.5  # in place, as a task might
        return logits


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12, bias=False)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        out: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x) * factor)
        return out


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sum_and_count(model, batch):
    """Says how many only afterwards."""
    logits = model(batch[0])
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), (batch[1] != -100).sum()


def measure(model, batch, num_samples):
    return {"loss": (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), num_samples)}


def measure_tokens(model, batch, num_samples):
    return {"loss": sum_and_count(model, batch)}


TEXT = task_objective(LanguageModellingTask(LanguageModelling(name="language_modelling")))
SIZES: dict[str, Any] = {"layers": 2, "heads": 4, "dim": 16}
MODELS: dict[str, tuple[Callable[[float], nn.Module], Objective]] = {
    "gpt": (lambda p: Gpt(VOCABULARY, TOKENS, **SIZES, dropout=p), TEXT),
    "untied": (lambda p: Gpt(VOCABULARY, TOKENS, **SIZES, dropout=p, tie_weights=False, bias=False), TEXT),
    "vit": (lambda p: Vit((1, 8, 8), 4, 3, **SIZES, mlp_dim=24, dropout=p), Objective(mean_loss, measure)),
    "even_vit": (lambda p: Vit((1, 4, 12), 4, 3, **SIZES, mlp_dim=24, dropout=p), Objective(mean_loss, measure)),
    "own": (lambda p: Own(), Objective(sum_and_count, measure_tokens)),
}
"""The first vision transformer has 5 tokens, which cannot be divided; the second 4."""


@dataclass(frozen=True)
class Setup:
    """What is trained, and how."""

    model: str = "gpt"
    layout: str | None = None
    steps: int = 5
    micro_batch: int = 3
    dropout: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict, hash=False)
    seed: int = 1

    @property
    def parallel(self) -> dict[str, Any]:
        return {} if self.layout is None else {"strategy": "tensor"} | LAYOUTS[self.layout][1]

    def unit(self, process: Process, on_meta: bool = False) -> TrainUnit:
        make, objective = MODELS[self.model]
        torch.manual_seed(self.seed)
        model = make(self.dropout)
        initial = None
        if on_meta:
            weights = {name: tensor.clone() for name, tensor in named_weights(model).items()}
            initial = iter(weights.items())
            with torch.device("meta"):
                model = make(self.dropout)
        settings = StepSettings(optim=OptimSection(lr=3e-3, weight_decay=0.1), **{"clip_norm": 0.5} | self.settings)
        unit = build_unit(ParallelSection(**self.parallel), model, objective, settings, process, initial)
        torch.manual_seed(100 + unit.random_rank)
        return unit

    def dataset(self) -> MemoryDataset:
        generator = torch.Generator().manual_seed(5)
        if "vit" in self.model:
            shape = (1, 4, 12) if self.model == "even_vit" else (1, 8, 8)
            return MemoryDataset(torch.randn(SAMPLES, *shape, generator=generator), torch.arange(SAMPLES) % 3)
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, TOKENS), generator=generator)
        targets = (tokens * 7 + 3) % VOCABULARY
        targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
        return MemoryDataset(tokens, targets)

    def batches(self, unit: TrainUnit, first: int = 0) -> Iterator[StepBatch]:
        share = {"rank": unit.data_rank, "world_size": unit.data_size}
        order = Order(SAMPLES, BATCH, seed=3)
        return train_batches(self.dataset(), order, first, first + self.steps, **share, micro_batch=self.micro_batch)


@dataclass
class Went:
    losses: list[float]
    counts: list[int]
    norms: list[float]
    metrics: dict[str, float]
    weights: Numbers
    same: Numbers
    """What every worker of a group has whole, as this one has it."""


def go(process: Process, setup: Setup, unit: TrainUnit, first: int = 0) -> Went:
    went = Went([], [], [], {}, {}, {})
    for step in setup.batches(unit, first):
        loss = unit.forward_backward(step)
        unit.optimizer_step(3e-3)
        total = sum(float(value) * weight for value, weight in loss.terms)
        summed, count = process.group.sum(total, float(loss.count))
        went.losses.append(summed / count)
        went.counts.append(int(count))
        went.norms.append(unit.report().get("grad_norm", 0.0))
    held_out = evaluation_batches(setup.dataset(), rank=unit.data_rank, world_size=unit.data_size, batch=7)
    went.metrics = evaluate(unit, held_out, lambda: None, 0, process.group) or {}
    went.weights = {name: tensor.clone() for name, tensor in unit.full_weights()}
    went.same = {name: part for name, part in local_parts(unit.model) if not name.endswith("(divided)")}
    return went


def local_parts(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if is_distributed(parameter):
            divided = any(placement.is_shard() for placement in parameter.placements)
            yield name + ("(divided)" if divided else ""), parameter.to_local().detach().clone()
        else:
            yield name, parameter.detach().clone()


def train(process: Process, setup: Setup, on_meta: bool = False) -> Went:
    return go(process, setup, setup.unit(process, on_meta))


@functools.cache
def alone(model: str, steps: int = 5) -> Went:
    return train(ALONE, Setup(model, steps=steps))


def workers(layout: str) -> int:
    return LAYOUTS[layout][0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(("gpt", layout) for layout in ("sequence", "plain", "fsdp")),
        *(pytest.param("gpt", layout, marks=pytest.mark.slow) for layout in ("ddp", "fsdp_last", "offload", "size_1")),
        *(("untied", "fsdp"), ("own", "sequence"), ("own", "fsdp"), ("vit", "fsdp"), ("even_vit", "sequence")),
        *(pytest.param(model, "sequence", marks=pytest.mark.slow) for model in ("untied", "vit")),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("own", "plain"), ("even_vit", "fsdp"))),
    ],
)
def test_the_numbers_of_one_process(ranks: MakeRanks, model: str, layout: str) -> None:
    expected = alone(model)
    for went in ranks(workers(layout))(train, Setup(model, layout)):
        assert went.losses == pytest.approx(expected.losses, abs=1e-5)
        assert went.counts == expected.counts, "the loss of the same samples is told once"
        assert went.norms == pytest.approx(expected.norms, rel=1e-4)
        assert went.metrics == pytest.approx(expected.metrics, abs=1e-5)
        assert went.weights.keys() == expected.weights.keys()
        for name, tensor in expected.weights.items():
            torch.testing.assert_close(went.weights[name], tensor, atol=3e-4, rtol=0, msg=lambda m, n=name: n + m)
    assert max(expected.losses) - min(expected.losses) > 1e-2, "so the numbers mean something"


@pytest.mark.parametrize(
    "layout", ["fsdp", *(pytest.param(more, marks=pytest.mark.slow) for more in ("sequence", "plain", "ddp"))]
)
def test_with_dropout_what_all_have_stays_the_same_to_the_last_bit(ranks: MakeRanks, layout: str) -> None:
    setup = Setup("gpt", layout, steps=10, dropout=0.3)
    all_went = ranks(workers(layout))(train, setup)
    for went in all_went:
        assert went.same.keys() == all_went[0].same.keys()
        assert all(torch.equal(tensor, all_went[0].same[name]) for name, tensor in went.same.items())
        assert all(torch.equal(tensor, all_went[0].weights[name]) for name, tensor in went.weights.items())
    assert layout == "fsdp" or {"position_embedding.weight", "norm.weight", "blocks.1.mlp.project.bias"} < set(
        all_went[0].same
    )
    again = dataclasses.replace(setup, settings={"activation_checkpointing": True})
    assert ranks(workers(layout))(train, again)[0].losses == all_went[0].losses, "it is drawn again as it was"
    assert all_went[0].losses != pytest.approx(alone("gpt", steps=10).losses, abs=1e-3)


def told(process: Process, setup: Setup) -> tuple[list[float], int, int, list[str]]:
    """What a worker computes and draws in training, what it tells of the loss, and what of an evaluation."""
    unit = setup.unit(process)
    hidden: list[torch.Tensor] = []
    unit.model.norm.register_forward_hook(lambda _module, _inputs, output: hidden.append(output.detach()))
    step = next(setup.batches(unit))
    loss = unit.forward_backward(step)
    metrics = unit.evaluate(step.microbatches[0])
    length = hidden[0].shape[1]
    alike = [float(hidden[0].double().sum())] if length == TOKENS else []
    return [*alike, float(torch.rand(()))], len(loss.terms), int(loss.count), list(metrics)


@pytest.mark.parametrize("layout", ["sequence", "plain", "ddp"])
def test_a_group_computes_and_draws_alike_and_its_first_worker_tells(ranks: MakeRanks, layout: str) -> None:
    found = ranks(workers(layout))(told, Setup("gpt", layout, dropout=0.3))
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first[0] == second[0] and len(first[0]) == (2 if layout == "plain" else 1)
        assert first[1] and first[2] and first[3] == ["loss"]
        assert second[1:] == (0, 0, [])
    assert len({drawn for (*_, drawn), *_ in found}) == workers(layout) // 2, "groups draw by themselves"


def gradients(process: Process, setup: Setup) -> Numbers:
    """What the workers of a group must have alike, before any worker has heard of the others'."""
    unit = setup.unit(process)
    assert isinstance(unit, TensorUnit)
    unit.to_average = []
    unit.forward_backward(next(setup.batches(unit)))
    own = {unit.names[p]: p.grad for p in unit.parameters if unit.names[p] not in unit.of_own_tokens}
    assert all(not placement.is_partial() for g in own.values() if is_distributed(g) for placement in g.placements)
    return {n: g.to_local() if is_distributed(g) else g for n, g in own.items() if not is_divided(g)}


def is_divided(tensor: Any) -> bool:
    return is_distributed(tensor) and any(placement.is_shard() for placement in tensor.placements)


@pytest.mark.parametrize("layout", ["sequence", "plain"])
@pytest.mark.parametrize("model", ["gpt", "even_vit"])
def test_gradients_of_what_is_not_divided_come_out_alike(ranks: MakeRanks, model: str, layout: str) -> None:
    first, second = ranks(2)(gradients, Setup(model, layout))
    whole = {"gpt": "position_embedding.weight", "even_vit": "patches.weight"}[model]
    assert {whole, "blocks.0.attention.project.bias"} <= set(first)
    assert ("blocks.0.norm1.weight" in first) == (layout == "plain")
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name]), name


def state_after_training(process: Process, setup: Setup) -> tuple[list[Any], Went]:
    """The pieces that this worker would write, and how it goes on."""
    unit = setup.unit(process)
    go(process, setup, unit)
    state = unit.state()
    pieces = [
        (piece.name, piece.block.clone(), piece.whole_shape, piece.offset)
        for piece in pieces_to_write(state.tensors, state.of_first, process.rank, process.world_size)
    ]
    return pieces, go(process, setup, unit, setup.steps)


def put_together(pieces: list[Any]) -> Numbers:
    """Whole tensors from the pieces of all workers, of which there is one for every element."""
    whole: Numbers = {}
    written: Numbers = {}
    for name, block, shape, offset in pieces:
        place = tuple(slice(start, start + length) for start, length in zip(offset, block.shape, strict=True))
        whole.setdefault(name, torch.zeros(shape))[place] = block
        written.setdefault(name, torch.zeros(shape))[place] += 1
    assert all((count == 1).all() for count in written.values())
    return whole


def go_on(process: Process, setup: Setup, saved: Numbers) -> Went:
    unit = setup.unit(process)
    unit.load(UnitState(saved, {"scaler": None}))
    return go(process, setup, unit, setup.steps)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("untied", "fsdp"),
        *(pytest.param("gpt", layout, marks=pytest.mark.slow) for layout in ("ddp", "sequence")),
        pytest.param("own", "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_state_is_written_once_and_loads_anywhere(ranks: MakeRanks, model: str, layout: str) -> None:
    setup = Setup(model, layout, steps=3)
    found = ranks(workers(layout))(state_after_training, setup)
    saved = put_together([piece for pieces, _ in found for piece in pieces])
    one = Setup(model, steps=3).unit(ALONE)
    go(ALONE, Setup(model, steps=3), one)
    as_alone = one.state().tensors
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {n: (t.shape, t.dtype) for n, t in as_alone.items()}
    for went, (_, undisturbed) in zip(
        ranks(workers(layout))(go_on, dataclasses.replace(setup, seed=9), saved), found, strict=True
    ):
        assert went.losses == undisturbed.losses, "to the last bit"
        assert all(torch.equal(tensor, undisturbed.weights[name]) for name, tensor in went.weights.items())
    for other in (None, "plain", "fsdp"):
        elsewhere = dataclasses.replace(setup, layout=other, seed=9)
        went = go_on(ALONE, elsewhere, saved) if other is None else ranks(workers(other))(go_on, elsewhere, saved)[0]
        assert went.losses == pytest.approx(found[0][1].losses, abs=1e-5), other


def test_a_state_of_another_model_is_refused(ranks: MakeRanks) -> None:
    saved = dict(Setup("untied").unit(ALONE).state().tensors)
    for message in ranks(2)(refused, Setup("gpt", "sequence"), saved):
        assert message.startswith("model: the checkpoint is of another model (differs in ")


def refused(process: Process, setup: Setup, saved: Numbers) -> str:
    with pytest.raises(UserError) as caught:
        setup.unit(process).load(UnitState(saved))
    return str(caught.value)


def begin_on_meta(process: Process, setup: Setup) -> tuple[bool, bool, float]:
    """Whether it goes as from a model in memory, with as many parameters, and the share of the weights that is here."""
    eager, on_meta = (go(process, setup, setup.unit(process, kind)) for kind in (False, True))
    unit = setup.unit(process, on_meta=True)
    whole = sum(tensor.numel() for _, tensor in unit.full_weights())
    parts = {part.data_ptr(): part for part in map(memory_of, unit.model.parameters())}
    same = all(torch.equal(tensor, eager.weights[name]) for name, tensor in on_meta.weights.items())
    num_parameters = len(list(setup.unit(process).model.parameters()))
    as_many = len(list(unit.model.parameters())) == len(parts) == num_parameters
    return same and eager.losses == on_meta.losses, as_many, sum(p.nbytes() for p in parts.values()) / 4 / whole


def memory_of(parameter: nn.Parameter) -> torch.UntypedStorage:
    return (parameter.to_local() if is_distributed(parameter) else parameter).untyped_storage()


@pytest.mark.parametrize(
    ("model", "layout", "share"),
    [
        ("gpt", "sequence", 0.6),
        ("gpt", "fsdp", 0.31),
        ("own", "ddp", 0.75),
        pytest.param("own", "fsdp", 0.41, marks=pytest.mark.slow),
        pytest.param("gpt", "offload", 0.31, marks=pytest.mark.slow),
    ],
)
def test_a_model_without_memory_is_filled_part_by_part(ranks: MakeRanks, model: str, layout: str, share: float) -> None:
    for same, as_many, found in ranks(workers(layout))(begin_on_meta, Setup(model, layout, steps=2)):
        assert same and as_many, "tied weights are one parameter still"
        assert found < share


def of_other_length(process: Process, layout: str) -> str:
    unit = Setup("gpt", layout).unit(process)
    tokens = torch.zeros(2, 5, dtype=torch.long)
    try:
        unit.evaluate(MicroBatch((tokens, tokens), 2))
    except UserError as error:
        return str(error)
    return ""


def test_a_batch_that_cannot_be_divided_is_an_error(ranks: MakeRanks) -> None:
    for message in ranks(2)(of_other_length, "sequence"):
        assert message.startswith("parallel.tensor.sequence: 2 workers cannot have equal shares of a batch of 5 tokens")
    assert ranks(2)(of_other_length, "plain") == ["", ""]


def refused_at_once(process: Process, model: str, size: int) -> str:
    make, objective = MODELS[model] if model in MODELS else (lambda p: nn.Linear(2, 2), TEXT)
    section = ParallelSection(strategy="tensor", tensor={"size": size})
    with pytest.raises(UserError) as caught:
        build_unit(section, make(0.0), objective, StepSettings(optim=OptimSection()), process)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "size", "says"),
    [
        ("linear", 3, "parallel.strategy: tensor needs a model that says how its layers are divided (shoal_tensor)"),
        ("gpt", 3, "parallel.tensor.size: 3 workers cannot have equal shares of the model's 4 heads"),
        ("gpt", 2, "parallel.tensor.size: 2 does not divide the 3 workers into equal groups"),
    ],
)
def test_what_cannot_work_is_refused_on_every_worker(ranks: MakeRanks, model: str, size: int, says: str) -> None:
    for message in ranks(3)(refused_at_once, model, size):
        assert message.startswith(says)


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        ("bf16", "fsdp"),
        ("fp16", "sequence"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("bf16", "sequence"), ("fp16", "fsdp"))),
    ],
)
def test_short_numbers_are_about_right(ranks: MakeRanks, layout: str, precision: str) -> None:
    setup = Setup("gpt", layout, settings={"precision": precision})
    for went in ranks(workers(layout))(train, setup):
        assert went.losses == pytest.approx(alone("gpt").losses, abs=5e-2)
        assert went.losses != pytest.approx(alone("gpt").losses, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sequence", "fsdp"])
def test_compiled_block_by_block(ranks: MakeRanks, layout: str) -> None:
    setup = Setup("gpt", layout, settings={"compile": True})
    for went in ranks(workers(layout))(train, setup, timeout_s=600.0):
        assert went.losses == pytest.approx(alone("gpt").losses, abs=1e-5)
