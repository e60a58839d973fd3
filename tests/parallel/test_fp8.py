"""Layers in 8-bit floats against float64. On a CPU their GPU kernels are written out in PyTorch."""

import copy
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import UserError
from shoal.models.gpt import Gpt
from shoal.models.transformer import FeedForward
from shoal.parallel import fp8
from shoal.parallel.fp8 import Fp8FeedForward, Fp8Linear, use_fp8

ON_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
DEVICE = torch.device("cuda" if ON_GPU else "cpu")


def gelu_packed(before: torch.Tensor, scale: torch.Tensor, is_tanh: bool, packed: torch.Tensor) -> None:
    most = torch.finfo(packed.dtype).max
    after = F.gelu(before.float(), approximate="tanh" if is_tanh else "none")
    packed.copy_((after * scale).clamp(-most, most).to(packed.dtype))


def gelu_backward_packed(
    gradient: torch.Tensor,
    before: torch.Tensor,
    scale: torch.Tensor,
    is_tanh: bool,
    after: torch.Tensor,
    of_before: torch.Tensor,
    packed: torch.Tensor,
) -> None:
    name, most = "tanh" if is_tanh else "none", torch.finfo(packed.dtype).max
    after.copy_(F.gelu(before.float(), approximate=name))
    found = torch.ops.aten.gelu_backward(gradient.float(), before.float(), approximate=name)
    of_before.copy_(found)
    packed.copy_((found * scale).clamp(-most, most).to(packed.dtype))


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real ones on a GPU; elsewhere Triton is not there."""
    if not ON_GPU:
        import shoal.parallel

        found = ModuleType("shoal.parallel.fp8_kernels")
        found.gelu_packed, found.gelu_backward_packed = gelu_packed, gelu_backward_packed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, found.__name__, found)
        monkeypatch.setattr(shoal.parallel, "fp8_kernels", found, raising=False)
    yield


def off(found: torch.Tensor | None, right: torch.Tensor | None) -> float:
    assert found is not None and right is not None
    return float((found.double() - right).norm() / right.norm())


def compare(layer: nn.Module, exact: nn.Module, compiled: bool) -> dict[str, float]:
    """How far off output and gradients are, with gradients as small as those of a mean over many tokens."""
    x = torch.randn(4, 64, 64, device=DEVICE, requires_grad=True)
    right = x.detach().double().requires_grad_()
    torch._dynamo.reset()
    out = (torch.compile(layer, backend="aot_eager") if compiled else layer)(x)
    expected = exact(right)
    gradient = torch.randn(expected.shape, device=DEVICE) * 1e-7
    out.backward(gradient.to(out.dtype))
    expected.backward(gradient.double())
    found = {"out": off(out, expected), "x": off(x.grad, right.grad)}
    for (name, parameter), other in zip(layer.named_parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None and parameter.grad.dtype == parameter.dtype
        found[name] = off(parameter.grad, other.grad)
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", ["tanh", "none"])
def test_a_feed_forward_is_nearly_that_of_float64(gelu: str, bias: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    layer = FeedForward(64, 256, bias=bias, gelu=gelu).to(DEVICE)  # type: ignore[arg-type]
    exact = copy.deepcopy(layer).double()
    for linear in (layer.expand, layer.project):
        linear.__class__ = Fp8Linear
    layer.__class__ = Fp8FeedForward
    found = compare(layer, exact, compiled)
    assert max(found.values()) < 0.12, found
    assert found["project.weight"] < 0.05, "whose gradient is computed in bfloat16"
    assert found["out"] > 0.01, "8 bits are 8 bits"


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_nearly_that_of_float64(bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 128, bias=bias).to(DEVICE)
    exact = copy.deepcopy(layer).double()
    layer.__class__ = Fp8Linear
    found = compare(layer, exact, compiled=False)
    assert found["weight"] < 0.01 and max(found.values()) < 0.08, found


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_packing_bears_any_size_of_values_and_outliers_that_were_not_looked_at(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (1e-12, 1e-3, 1.0, 1e4):
        rows = torch.randn(64, 32) * size
        rows[3, 3] = 3 * rows[::16].abs().max()  # within what is spared
        rows[5, 5] = 1e3 * rows.abs().max()  # beyond
        packed, unscale = fp8._pack_sampled(rows, dtype)
        back = packed.float() * unscale
        assert back.isfinite().all()
        others = torch.ones_like(rows, dtype=torch.bool)
        others[5, 5] = False
        torch.testing.assert_close(back[others], rows[others], rtol=0.13, atol=float(0.05 * size))
        assert 0 < back[5, 5] < rows[5, 5], "cut off, not made infinite"
    zeros, unscale = fp8._pack_sampled(torch.zeros(16, 16), dtype)
    assert (zeros.float() * unscale == 0).all()


def test_only_layers_that_gain_by_it_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with torch.device("meta"):
        model = Gpt(64, 8, layers=2, heads=12, dim=768)
    names = {name for name, _ in model.named_parameters()}
    use_fp8(model, torch.device("cuda"))
    changed = [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]
    assert changed == [f"blocks.{block}.mlp.{name}" for block in (0, 1) for name in ("expand", "project")]
    assert type(model.blocks[0].mlp) is Fp8FeedForward and type(model.head) is nn.Linear
    assert model.fp8_head and model.half_stream
    with torch.device("meta"):
        odd = Gpt(65, 8, layers=2, heads=12, dim=768)
    use_fp8(odd, torch.device("cuda"))
    assert not odd.fp8_head, "a vocabulary that its products cannot take"
    assert {name for name, _ in model.named_parameters()} == names, "checkpoints stay what they are"


def test_what_cannot_or_need_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"train\.fp8: needs a GPU with 8-bit floats"):
        use_fp8(nn.Linear(4, 4), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UserError, match="Ada, Hopper or newer"):
        use_fp8(nn.Linear(4, 4), torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(UserError, match="no repeated block of Gpt has a linear layer that is large enough"):
        use_fp8(Gpt(64, 8, layers=2, heads=2, dim=64), torch.device("cuda"))
    assert fp8._is_large(nn.Linear(1024, 4096, device="meta"))
    assert not fp8._is_large(nn.Linear(1024, 4097, device="meta"))


def test_a_stream_of_halves_is_one_only_under_autocast() -> None:
    model = Gpt(64, 8, layers=1, heads=2, dim=32).to(DEVICE)
    model.half_stream = True
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=DEVICE)
    assert model.embed(tokens).dtype == torch.float32
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert model.embed(tokens).dtype == torch.bfloat16
        model.half_stream = False
        assert model.embed(tokens).dtype == torch.float32
