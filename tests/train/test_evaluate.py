"""Evaluation leaves the model, its mode and the generators as they were."""

import torch
from torch import nn

from shoal.core.batch import MicroBatch
from shoal.train.evaluate import evaluate, named_for_validation


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
    assert evaluate(Unit(), batches(), lambda: None, 0) == {"loss": 4.0, "tokens": 0.5}


def test_generators_and_mode_do_not_move():
    unit = Unit()
    before = torch.get_rng_state()
    evaluate(unit, batches(), lambda: None, 0)
    assert torch.equal(before, torch.get_rng_state()) and unit.model.training


def test_a_stop_ends_it_without_a_result():
    unit = Unit()
    answers = iter([None, "SIGINT"])
    assert evaluate(unit, batches(), lambda: next(answers), 0) is None
    assert unit.model.training


def test_perplexity_follows_from_the_loss_of_tokens():
    assert named_for_validation({"loss": 0.0}, "tokens") == {"val_loss": 0.0, "val_perplexity": 1.0}
    assert named_for_validation({"loss": 0.0}, "samples") == {"val_loss": 0.0}
    assert named_for_validation({"loss": 1e9}, "tokens")["val_perplexity"] > 1e300
