"""Gradients put aside and added up are those that FSDP2 adds up itself, to the last bit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from shoal.core.process import Process
from shoal.parallel.clip import local_gradient
from shoal.parallel.host_sums import HostSums
from tests.many import Ranks
from tests.parallel import test_fsdp, test_tensor

MakeRanks = Callable[[int], Ranks]
GPU = torch.device("cuda", 0)
OFFLOADED = {"cpu_offload": True}
SETUPS: dict[str, tuple[int, Any]] = {
    "odd": (2, test_fsdp.Setup("odd", fsdp=OFFLOADED)),
    "reused": (2, test_fsdp.Setup("reused", "sum", fsdp=OFFLOADED)),
    "partly_used": (2, test_fsdp.Setup("partly_used", fsdp=OFFLOADED)),
    "counted": (2, test_fsdp.Setup("blocks", "count", fsdp=OFFLOADED)),
    "late": (2, test_fsdp.Setup("blocks", fsdp=OFFLOADED | {"reduce_every_micro_batch": False})),
    "in_one_go": (2, test_fsdp.Setup("blocks", fsdp=OFFLOADED, micro_batch=6)),
    "tensor": (4, test_tensor.Setup("gpt", "offload", micro_batch=2)),
    "tensor_sum": (4, test_tensor.Setup("own", "offload", micro_batch=2)),
}
"""Workers, and what they train."""
NEVER = ("late", "in_one_go")


@dataclass(frozen=True)
class Went:
    """The first step of a worker."""

    gradients: dict[str, torch.Tensor | None]
    num_micro_batches: int
    times_put_aside: int


def take_a_step(process: Process, setup: Any, as_on_a_gpu: bool, fail_first: bool = False) -> Went:
    """`as_on_a_gpu`: as where offloaded gradients are far; `fail_first`: after a step that did not come to its end."""
    unit, times = setup.unit(process), 0
    assert not unit.host_sums._parameters, "here, nothing is far from where it is computed"
    if as_on_a_gpu:
        unit.host_sums._parameters = HostSums(unit.parameters, GPU)._parameters
        assert unit.host_sums._parameters
    put_aside = unit.host_sums._put_aside

    def counted() -> None:
        nonlocal times
        times += bool(unit.host_sums._parameters)
        put_aside()

    unit.host_sums._put_aside = counted
    step = next(iter(setup.batches(unit)))
    if fail_first:
        _fail_in_the_last(unit, step)
        assert not unit.host_sums._sums
        times = 0
    unit.forward_backward(step)
    found = {unit.names[p]: None if p.grad is None else local_gradient(p).clone() for p in unit.parameters}
    return Went(found, len(step.microbatches), times)


def _fail_in_the_last(unit: Any, step: Any) -> None:
    left = len(step.microbatches)

    def loss_of(batch: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("out of memory")
        return unit.loss_of(batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        unit.accumulate_over_workers(step, loss_of, unit.before_last)
    unit.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "fail_first"),
    [
        *((name, False) for name in SETUPS),
        *((name, True) for name in ("reused", "tensor")),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("odd", "partly_used", "counted", "tensor_sum")),
    ],
)
def test_sums_are_those_of_fsdp_itself(ranks: MakeRanks, name: str, fail_first: bool) -> None:
    world_size, setup = SETUPS[name]
    found = ranks(world_size)(take_a_step, setup, as_on_a_gpu=True, fail_first=fail_first)
    for own, expected in zip(found, ranks(world_size)(take_a_step, setup, as_on_a_gpu=False), strict=True):
        assert own.times_put_aside == (0 if name in NEVER else own.num_micro_batches) and not expected.times_put_aside
        assert own.gradients.keys() == expected.gradients.keys()
        assert any(gradient is not None for gradient in own.gradients.values())
        for weight, gradient in expected.gradients.items():
            mine = own.gradients[weight]
            assert (mine is None) == (gradient is None), weight
            assert gradient is None or (mine is not None and torch.equal(mine, gradient)), weight


def test_what_is_not_offloaded_is_not_touched() -> None:
    plain = torch.nn.Linear(2, 2)
    plain.weight.grad = torch.ones(2, 2)
    sums = HostSums(plain.parameters(), GPU)
    with sums.step(), sums.before_last():
        pass
    assert plain.weight.grad is not None and torch.equal(plain.weight.grad, torch.ones(2, 2))
