"""One device: gradients of the mean over the step's items, whatever the micro-batches; precision; state."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

from shoal.core.batch import MicroBatch, StepBatch
from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.models.simple_cnn import SimpleCnn
from shoal.parallel.section import OptimSection
from shoal.parallel.single import SingleUnit
from shoal.parallel.unit import StepSettings, UnitState

CPU = Process(0, 1, torch.device("cpu"))
INPUTS, TARGETS = torch.randn(12, 5), torch.randn(12, 3)


def mean_loss(model, batch):
    return (model(batch[0]) - batch[1]).pow(2).mean(dim=1).mean()


def sum_and_count(model, batch):
    """Over the rows whose first input is positive: how many is known only by looking."""
    rows = batch[0][:, 0] > 0
    return (model(batch[0]) - batch[1]).pow(2).mean(dim=1)[rows].sum(), rows.sum()


def count_rows(batch):
    return (batch[0][:, 0] > 0).sum()


def make(loss=mean_loss, count=None, model=None, **settings):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optim = settings.pop("optim", OptimSection(name="sgd", lr=0.1))
    objective = Objective(loss, lambda m, b, n: {"loss": (m(b[0]).sum(), n)}, count)
    return SingleUnit(model, objective, StepSettings(optim=optim, **settings), CPU)


def step_of(*sizes):
    edges = [0, *torch.tensor(sizes).cumsum(0).tolist()]
    parts = [MicroBatch((INPUTS[a:b], TARGETS[a:b]), b - a) for a, b in pairwise(edges)]
    return StepBatch(parts, sum(sizes))


def gradients(unit):
    return torch.cat([p.grad.flatten() for p in unit.model.parameters()])


@pytest.mark.parametrize("sizes", [(12,), (6, 6), (3, 3, 3, 3), (5, 7), (1, 10, 1)])
@pytest.mark.parametrize(
    ("loss", "count"),
    [(mean_loss, None), (sum_and_count, None), (sum_and_count, count_rows)],
    ids=["mean", "sum", "count"],
)
def test_micro_batches_give_the_gradient_of_the_mean_over_the_step(sizes, loss, count):
    reference = make().model
    whole = loss(reference, (INPUTS, TARGETS))
    value = whole / 1 if not isinstance(whole, tuple) else whole[0] / whole[1]
    value.backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    unit = make(loss, count)
    result = unit.forward_backward(step_of(*sizes))
    torch.testing.assert_close(gradients(unit), expected)
    total = sum(term * weight for term, weight in result.terms)
    torch.testing.assert_close(total / result.count, value.detach())


def test_one_micro_batch_is_exactly_a_plain_backward():
    reference = make().model
    mean_loss(reference, (INPUTS, TARGETS)).backward()
    unit = make()
    unit.forward_backward(step_of(12))
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(unit.model.parameters(), reference.parameters(), strict=True)
    )


def test_a_step_uses_the_given_learning_rate_and_clears_gradients():
    unit = make()
    before = [p.detach().clone() for p in unit.model.parameters()]
    unit.forward_backward(step_of(12))
    grads = [p.grad.clone() for p in unit.model.parameters()]
    unit.optimizer_step(0.5)
    for parameter, old, grad in zip(unit.model.parameters(), before, grads, strict=True):
        torch.testing.assert_close(parameter.detach(), old - 0.5 * grad)
        assert parameter.grad is None


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_scales_the_gradient_to_the_norm(precision):
    unit = make(clip_norm=0.01, precision=precision)
    before = torch.cat([p.detach().flatten().clone() for p in unit.model.parameters()])
    unit.forward_backward(step_of(6, 6))
    unit.optimizer_step(1.0)
    moved = before - torch.cat([p.detach().flatten() for p in unit.model.parameters()])
    assert float(moved.norm()) == pytest.approx(0.01, rel=1e-3)
    assert unit.report()["grad_norm"] > 0.01


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_the_model_computes_in_the_asked_precision_and_keeps_its_weights_in_fp32(precision, dtype):
    seen = []

    def loss(model, batch):
        output = model(batch[0])
        seen.append(output.dtype)
        return output.float().pow(2).mean()

    unit = make(loss, precision=precision)
    unit.forward_backward(step_of(12))
    unit.optimizer_step(0.1)
    assert seen == [dtype]
    assert all(p.dtype == torch.float32 for p in unit.model.parameters())


def test_fp16_skips_a_step_whose_gradients_overflow_and_halves_the_scale():
    unit = make(lambda model, batch: model(batch[0]).float().mean() * 1e6, precision="fp16")
    before = copy.deepcopy(unit.model.state_dict())
    scale = unit.report()["loss_scale"]
    unit.forward_backward(step_of(12))
    for parameter in unit.model.parameters():
        parameter.grad.fill_(torch.inf)
    unit.optimizer_step(0.1)
    assert unit.report()["loss_scale"] == scale / 2
    assert all(torch.equal(before[name], value) for name, value in unit.model.state_dict().items())


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_state_loads_into_another_unit_which_goes_on_the_same(name, precision):
    optim = OptimSection(name=name, lr=0.1, weight_decay=0.1, momentum=0.9 if name == "sgd" else None)
    one, other = make(optim=optim, precision=precision), make(optim=optim, precision=precision)
    for _ in range(3):
        one.forward_backward(step_of(12))
        one.optimizer_step(0.1)
    state = one.state()
    other.load(UnitState({k: v.clone() for k, v in state.tensors.items()}, state.values))
    for unit in (one, other):
        for _ in range(3):
            unit.forward_backward(step_of(6, 6))
            unit.optimizer_step(0.05)
    after, expected = other.state(), one.state()
    assert after.values == expected.values
    assert after.tensors.keys() == expected.tensors.keys()
    assert all(torch.equal(after.tensors[key], expected.tensors[key]) for key in expected.tensors)


def test_loading_does_not_share_memory_with_the_state():
    unit = make(optim=OptimSection(name="adam", lr=0.1))
    unit.forward_backward(step_of(12))
    unit.optimizer_step(0.1)
    state = UnitState({k: v.clone() for k, v in unit.state().tensors.items()}, unit.state().values)
    kept = {k: v.clone() for k, v in state.tensors.items()}
    unit.load(state)
    unit.forward_backward(step_of(12))
    unit.optimizer_step(0.1)
    assert all(torch.equal(kept[k], state.tensors[k]) for k in kept)


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape():
    unit = make()
    state = unit.state()
    with pytest.raises(UserError, match=r"model: 0\.weight is \(7, 4\) in the checkpoint"):
        unit.load(UnitState(state.tensors | {"model.0.weight": torch.zeros(7, 4)}, {}))
    with pytest.raises(UserError, match=r"another model \(differs in 9\.weight\)"):
        unit.load(UnitState(state.tensors | {"model.9.weight": torch.zeros(1)}, {}))


def test_tied_weights_are_kept_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(5, 5, bias=False)
            self.b = nn.Linear(5, 5, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))[:, :3]

    unit = make(model=Tied())
    assert list(unit.state().tensors) == ["model.a.weight"]
    state = unit.state()
    other = make(model=Tied())
    other.load(UnitState({"model.a.weight": torch.ones(5, 5)}, state.values))
    assert torch.equal(other.model.b.weight, torch.ones(5, 5))


def test_recomputing_activations_changes_no_gradient_and_counts_each_batch_once():
    torch.manual_seed(0)
    model = SimpleCnn((1, 8, 8), channels=[4, 4], hidden=8, num_classes=3)
    images, labels = torch.randn(6, 1, 8, 8), torch.randint(0, 3, (6,))

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    step = StepBatch([MicroBatch((images, labels), 6)], 6)
    plain = make(loss, model=copy.deepcopy(model))
    saving = make(loss, model=copy.deepcopy(model), activation_checkpointing=True)
    for unit in (plain, saving):
        for _ in range(2):
            unit.forward_backward(step)
            unit.optimizer_step(0.1)
    expected, found = plain.state().tensors, saving.state().tensors
    assert expected.keys() == found.keys()
    for name in expected:
        assert torch.equal(expected[name], found[name]), name


def test_compiled_gives_the_same_numbers_and_the_same_names():
    from torch._dynamo.utils import counters

    counters.clear()
    plain, compiled = make(), make(compile=True)
    for unit in (plain, compiled):
        unit.forward_backward(step_of(12))
        unit.optimizer_step(0.1)
    assert counters["stats"]["unique_graphs"] >= 1, "nothing was compiled"
    assert plain.state().tensors.keys() == compiled.state().tensors.keys()
    for name, tensor in plain.state().tensors.items():
        torch.testing.assert_close(compiled.state().tensors[name], tensor, rtol=1e-5, atol=1e-6)


def test_evaluation_needs_no_gradient():
    unit = make()
    measured = unit.evaluate(step_of(12).microbatches[0])
    assert not measured["loss"][0].requires_grad and measured["loss"][1] == 12


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_weight_that_is_cut_out_of_a_larger_one_trains_as_one_of_its_own(name: str) -> None:
    found = []
    for whole in (True, False):
        model = nn.Linear(5, 3)
        torch.manual_seed(1)
        cut = torch.randn(3, 9)[:, :5]
        model.weight = nn.Parameter(cut.contiguous() if whole else cut)
        unit = make(model=model, optim=OptimSection(name=name, lr=0.1))
        for _ in range(3):
            unit.forward_backward(step_of(6, 6))
            unit.optimizer_step(0.1)
        found.append(unit.model.weight.detach())
    assert torch.equal(*found)


def test_a_step_with_nothing_to_learn_from_is_told_however_it_is_counted() -> None:
    unit = make(lambda model, batch: (model(batch[0]).sum() * 0.0, torch.tensor(0)))
    with pytest.raises(UserError, match=r"task\.loss counted nothing to learn from in a whole step"):
        unit.forward_backward(step_of(12))


class _OftenUsed(nn.Module):
    """Whose second layer is used from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(5, 3), nn.Linear(5, 3), 0

    def forward(self, x):
        self.calls += 1
        return self.first(x) + (self.second(x) if self.calls > 1 else 0.0)


def test_a_weight_may_get_its_first_gradient_later_than_others() -> None:
    unit = make(model=_OftenUsed(), optim=OptimSection(name="sgd", lr=0.1, momentum=0.9))
    torch.manual_seed(0)
    model = copy.deepcopy(unit.model)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=False)
    for _ in range(3):
        unit.forward_backward(step_of(12))
        unit.optimizer_step(0.1)
        other.zero_grad()
        mean_loss(model, (INPUTS, TARGETS)).backward()
        other.step()
    for one, expected in zip(unit.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, expected)
