"""The fused projection and cross-entropy against float64. On a CPU its GPU kernel is written out in PyTorch."""

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from shoal.core.kernels import can_compile_kernels
from shoal.models import linear_cross_entropy as module
from shoal.models.gpt import Gpt
from shoal.models.linear_cross_entropy import IGNORE, linear_cross_entropy
from shoal.tasks.language_modelling import LanguageModellingTask
from shoal.tasks.section import LanguageModelling

ON_GPU = can_compile_kernels()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
TOKENS, DIM, VOCABULARY = 200, 64, 96


def kernel_in_words(
    logits: torch.Tensor, targets: torch.Tensor, losses: torch.Tensor, packed: torch.Tensor | None, scale: float
) -> None:
    """What the kernel does."""
    exact = logits.float()
    losses.copy_(F.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORE))
    counts = (targets != IGNORE)[:, None]
    gradients = (exact.softmax(1) - F.one_hot(targets.clamp(min=0), exact.shape[1])) * counts
    logits.copy_(gradients)
    if packed is not None:
        packed.copy_((gradients * scale).to(packed.dtype))


@pytest.fixture(autouse=True)
def a_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real one on a GPU; elsewhere Triton is not there."""
    if not ON_GPU:
        found = ModuleType("shoal.models.cross_entropy_kernel")
        found.losses_and_gradients_ = kernel_in_words  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, found.__name__, found)
        # CPUs have no product of halves that comes out as fp32.
        plain = torch.addmm
        monkeypatch.setattr(torch, "addmm", lambda a, b, c, out_dtype: plain(a, b.to(out_dtype), c.to(out_dtype)))
    yield


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(VOCABULARY, DIM, device=DEVICE) * 0.1).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device=DEVICE)
    targets[::5] = IGNORE
    return hidden, weight, targets


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float64."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(h @ w.t(), targets, reduction="sum")
    loss.backward()
    assert h.grad is not None and w.grad is not None
    return loss.item(), h.grad, w.grad


def off(found: torch.Tensor | None, right: torch.Tensor) -> float:
    assert found is not None
    return float((found.double() - right).norm() / right.norm())


@pytest.mark.parametrize("most", [1 << 30, VOCABULARY * 130], ids=["in_one", "in_parts"])
@pytest.mark.parametrize(
    ("dtype", "fp8", "loss_off", "gradient_off"),
    [
        (torch.float32, False, 1e-6, 1e-6),
        (torch.bfloat16, False, 1e-4, 4e-3),
        (torch.bfloat16, True, 1e-3, 5e-2),
    ],
    ids=["fp32", "bf16", "fp8"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
def test_loss_and_gradients_are_those_of_float64(
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    dtype: torch.dtype,
    fp8: bool,
    loss_off: float,
    gradient_off: float,
    compiled: bool,
) -> None:
    monkeypatch.setattr(module, "_MOST_LOGITS", most)
    hidden, weight, targets = inputs(dtype)
    right, of_hidden, of_weight = exact(hidden, weight, targets)

    def doubled() -> torch.Tensor:
        return 2 * linear_cross_entropy(hidden * 1, weight, targets, fp8)

    torch._dynamo.reset()
    loss = (torch.compile(doubled, backend="aot_eager") if compiled else doubled)()
    loss.backward()
    assert loss.item() / 2 == pytest.approx(right, rel=loss_off)
    assert off(hidden.grad, 2 * of_hidden) < gradient_off
    assert off(weight.grad, 2 * of_weight) < gradient_off
    assert hidden.grad.dtype == dtype and weight.grad.dtype == weight.dtype


def test_fp8_is_not_simply_exact() -> None:
    """Otherwise the test above would say nothing of it."""
    hidden, weight, targets = inputs(torch.bfloat16)
    _, of_hidden, _ = exact(hidden, weight, targets)
    linear_cross_entropy(hidden, weight, targets, fp8=True).backward()
    assert off(hidden.grad, of_hidden) > 1e-2


def test_without_gradients_only_the_loss_is_computed() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets)
    assert not loss.requires_grad and loss.item() == pytest.approx(exact(hidden, weight, targets)[0])
    *_, of_hidden, of_weight = module._summed(hidden, weight, targets, [], False)
    assert of_hidden.numel() == of_weight.numel() == 0


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_a_target_that_there_is_not_is_noticed() -> None:
    hidden, weight, targets = inputs()
    targets[3] = VOCABULARY
    assert linear_cross_entropy(hidden, weight, targets).isnan()


def test_parts_cover_all_tokens_and_hold_few_logits() -> None:
    for num_tokens, vocabulary in ((1, 7), (1000, 50_304), (49_152, 50_304), (333, 1 << 24)):
        parts = module._parts(num_tokens, vocabulary)
        assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])] and parts[-1][1] == num_tokens
        assert all((last - first) * vocabulary <= module._MOST_LOGITS or last - first <= 128 for first, last in parts)


def test_a_gpt_that_sums_its_loss_learns_the_same() -> None:
    torch.manual_seed(0)
    model = Gpt(VOCABULARY, 16, layers=1, heads=2, dim=32).to(DEVICE)
    task = LanguageModellingTask(LanguageModelling(name="language_modelling"))
    tokens = torch.randint(0, VOCABULARY, (4, 16), device=DEVICE)
    targets = torch.where(tokens % 7 == 0, IGNORE, tokens)
    found = []
    for sums in (False, True):
        model.zero_grad()
        model.sums_loss = sums
        loss, count = task.loss(model, (tokens, targets))
        loss.backward()
        found.append((loss.item(), int(count), [parameter.grad.clone() for parameter in model.parameters()]))
        measured = task.metrics(model, (tokens, targets))["loss"]
        assert float(measured[0]) == pytest.approx(loss.item(), rel=1e-6)
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-6)
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-6)


def test_with_smoothed_labels_the_loss_is_that_of_logits() -> None:
    model = Gpt(VOCABULARY, 16, layers=1, heads=2, dim=32).to(DEVICE)
    task = LanguageModellingTask(LanguageModelling(name="language_modelling", label_smoothing=0.1))
    tokens = torch.randint(0, VOCABULARY, (2, 16), device=DEVICE)
    model.sums_loss = False
    plain, _ = task.loss(model, (tokens, tokens))
    model.sums_loss = True
    again, _ = task.loss(model, (tokens, tokens))
    assert plain.item() == again.item()
