"""Evaluation leaves the model, its mode and the generators as they were."""

from collections.abc import Callable

import torch
from torch import nn

from shoal.core.batch import MicroBatch
from shoal.core.group import Group
from shoal.core.process import Process
from shoal.parallel.unit import StepLoss
from shoal.train.evaluate import evaluate, named_for_validation
from shoal.train.window import LossWindow
from tests.many import Ranks


class Unit:
    def __init__(self):
        self.model = nn.Dropout(0.5)
        self.device = torch.device("cpu")

    def evaluate(self, batch):
        assert not self.model.training
        torch.rand(5)
        return {"loss": (batch.data.sum(), batch.num_samples), "tokens": (torch.tensor(2.0), torch.tensor(4))}


def batches():
    return [MicroBatch(torch.tensor([1.0, 2.0, 3.0]), 3), MicroBatch(torch.tensor([10.0]), 1)]


def test_means_are_over_all_samples():
    assert evaluate(Unit(), batches(), lambda: None, 0, Group()) == {"loss": 4.0, "tokens": 0.5}


def test_generators_and_mode_do_not_move():
    unit = Unit()
    before = torch.get_rng_state()
    evaluate(unit, batches(), lambda: None, 0, Group())
    assert torch.equal(before, torch.get_rng_state()) and unit.model.training


def test_a_stop_ends_it_without_a_result():
    unit = Unit()
    answers = iter([None, "SIGINT"])
    assert evaluate(unit, batches(), lambda: next(answers), 0, Group()) is None
    assert unit.model.training


def test_perplexity_follows_from_the_loss_of_tokens():
    assert named_for_validation({"loss": 0.0}, "tokens") == {"val_loss": 0.0, "val_perplexity": 1.0}
    assert named_for_validation({"loss": 0.0}, "samples") == {"val_loss": 0.0}
    assert named_for_validation({"loss": 1e9}, "tokens")["val_perplexity"] > 1e300


class Shares:
    """A worker's batches, and metrics that some of them do not have."""

    def __init__(self, rank: int) -> None:
        self.model = nn.Identity()
        self.device = torch.device("cpu")
        self.rank = rank

    def evaluate(self, batch):
        measured = {"loss": (batch.data.sum(), batch.num_samples)}
        if self.rank == 1:
            measured["rare"] = (torch.tensor(3.0), 6)
        return measured


def evaluate_share(process: Process, shares: list[list[list[float]]]) -> dict[str, float] | None:
    """Evaluate this worker's share; an empty batch is one that stands in."""
    batches = [MicroBatch(torch.tensor(values or [1e9]), len(values)) for values in shares[process.rank]]
    return evaluate(Shares(process.rank), batches, lambda: None, 0, process.group)


def test_every_worker_gets_the_means_over_all_of_them(ranks: Callable[[int], Ranks]) -> None:
    shares = [[[1.0, 2.0], [6.0]], [[3.0], [8.0]], [[4.0], []]]
    assert ranks(3)(evaluate_share, shares) == [{"loss": 4.0, "rare": 0.5}] * 3


def test_a_worker_without_any_sample_adds_nothing(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3)(evaluate_share, [[[1.0]], [[]], [[]]]) == [{"loss": 1.0}] * 3


def add_up(process: Process) -> tuple[tuple[float, int], tuple[float, int]]:
    window = LossWindow(0.5, 1)
    for step in range(2):
        terms = [(torch.tensor(1.0 + process.rank), 2)] if process.rank < 2 else []  # one that only stands in has none
        window.add(StepLoss(terms, 2 * len(terms) if step else torch.tensor(2 * len(terms))))
    return window.read(), window.read_all(process.group)


def test_the_loss_between_reports_is_added_up_over_workers(ranks: Callable[[int], Ranks]) -> None:
    own = [(4.5, 5), (8.5, 5), (0.5, 1)]
    assert ranks(3)(add_up) == [(part, (13.5, 11)) for part in own]
