"""Gradients put aside and added up are those that FSDP2 adds up itself, to the last bit."""

from collections.abc import Callable

import pytest
import torch

from shoal.core.process import Process
from shoal.parallel.clip import local_gradient
from shoal.parallel.host_sums import HostSums
from tests.many import Ranks
from tests.parallel.test_fsdp import Setup

MakeRanks = Callable[[int], Ranks]
Gradients = dict[str, torch.Tensor | None]


def gradients(process: Process, setup: Setup, put_aside: bool, fail_first: bool = False) -> tuple[Gradients, int]:
    """Of the first step, and how often one was put aside; `fail_first`: after a step that did not come to its end."""
    unit, times = setup.unit(process), 0
    if put_aside:
        unit.host_sums = HostSums(unit.parameters)
        unit.before_last = unit.host_sums.before_last
        put = unit.host_sums._put_aside

        def counted() -> None:
            nonlocal times
            times += 1
            put()

        unit.host_sums._put_aside = counted
    step = next(iter(setup.batches(unit)))
    if fail_first:
        with pytest.raises(RuntimeError, match="out of memory"), unit.host_sums.step():
            unit.accumulate_over_workers(step, unit.loss_of, unit.before_last)
            with unit.before_last():
                pass
            raise RuntimeError("out of memory")
        unit.optimizer.zero_grad()
    unit.forward_backward(step)
    found = {unit.names[p]: None if p.grad is None else local_gradient(p).clone() for p in unit.parameters}
    return found, times


@pytest.mark.parametrize("model", ["odd", "reused", "partly_used"])
def test_sums_are_those_of_fsdp_itself(ranks: MakeRanks, model: str) -> None:
    setup = Setup(model, fsdp={"cpu_offload": True}, micro_batch=2)
    for fail_first in (False, True):
        found = ranks(2)(gradients, setup, put_aside=True, fail_first=fail_first)
        for (own, times), (expected, _) in zip(found, ranks(2)(gradients, setup, put_aside=False), strict=True):
            assert times == 3 * (1 + fail_first), "six samples a worker, two at a time"
            assert own.keys() == expected.keys() and any(gradient is not None for gradient in own.values())
            for name, gradient in expected.items():
                mine = own[name]
                assert (mine is None) == (gradient is None), name
                assert gradient is None or (mine is not None and torch.equal(mine, gradient)), name


def test_one_micro_batch_is_left_where_it_is(ranks: MakeRanks) -> None:
    setup = Setup(fsdp={"cpu_offload": True}, micro_batch=6)
    assert [times for _, times in ranks(2)(gradients, setup, put_aside=True)] == [0, 0]


def test_what_is_on_the_device_is_not_touched() -> None:
    plain = torch.nn.Linear(2, 2)
    plain.weight.grad = torch.ones(2, 2)
    sums = HostSums(plain.parameters())
    with sums.step(), sums.before_last():
        pass
    assert plain.weight.grad is not None and torch.equal(plain.weight.grad, torch.ones(2, 2))
