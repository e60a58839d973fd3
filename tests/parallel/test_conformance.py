"""Every strategy trains what one process trains: losses, gradient norms and metrics, for every combination."""

from collections.abc import Callable

import pytest

from tests.many import Ranks
from tests.parallel.conform import STRATEGIES, Case, Went, train_anew

MakeRanks = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def alone(ranks: MakeRanks) -> Went:
    (went,) = ranks(1)(train_anew, Case())
    return went


SLOW = ("fsdp_reduce_last", "fsdp_offload", "zero3_offload", "tensor", "tensor_ddp", "tensor_fsdp")
"""What these do otherwise is also in tests of their strategy, and of checkpoints of any."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in STRATEGIES])
def test_a_strategy_gives_the_numbers_of_one_process(ranks: MakeRanks, alone: Went, name: str) -> None:
    went = ranks(4)(train_anew, Case(parallel=STRATEGIES[name]))
    for each in went:
        assert each.losses == pytest.approx(alone.losses, abs=1e-5)
        assert each.norms == pytest.approx(alone.norms, abs=1e-5)
        assert each.metrics == pytest.approx(alone.metrics, abs=1e-5)
    assert alone.losses[-1] < alone.losses[0] - 0.05, "it learns, so the numbers mean something"
