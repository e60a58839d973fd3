import math

import pytest
import torch
from torch import nn

from shoal.tasks.language_modelling import LanguageModellingTask
from shoal.tasks.section import LanguageModelling

VOCAB = 5
TOKENS = torch.tensor([[0, 1, 2], [3, 4, 0]])
TARGETS = torch.tensor([[1, 2, -100], [4, 0, 3]])


class Table(nn.Module):
    """The logits of the next token are a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(VOCAB * VOCAB).reshape(VOCAB, VOCAB).sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.rows[tokens]


def task(smoothing: float = 0.0) -> LanguageModellingTask:
    return LanguageModellingTask(LanguageModelling(name="language_modelling", label_smoothing=smoothing))


def by_hand(smoothing: float) -> float:
    """Cross-entropy summed over the targets that count, by the definition."""
    total = 0.0
    for token, target in zip(TOKENS.flatten().tolist(), TARGETS.flatten().tolist(), strict=True):
        if target != -100:
            logits = [math.sin(token * VOCAB + column) for column in range(VOCAB)]
            log_sum = math.log(sum(math.exp(logit) for logit in logits))
            log_probabilities = [logit - log_sum for logit in logits]
            total -= (1 - smoothing) * log_probabilities[target] + smoothing * sum(log_probabilities) / VOCAB
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_is_a_sum_over_the_targets_that_count_and_their_number(smoothing: float) -> None:
    loss, count = task(smoothing).loss(Table(), (TOKENS, TARGETS))
    assert loss.shape == () and loss.item() == pytest.approx(by_hand(smoothing), rel=1e-6)
    assert int(count) == 5 == int(task().count((TOKENS, TARGETS)))


def test_targets_that_do_not_count_send_no_gradient() -> None:
    model = Table()
    loss, _ = task().loss(model, (TOKENS[:, 2:], TARGETS[:, 2:]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.rows.grad is not None
    assert model.rows.grad[2].abs().sum() == 0 and model.rows.grad[0].abs().sum() > 0


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_metric_is_the_plain_loss(smoothing: float) -> None:
    with torch.no_grad():
        metrics = task(smoothing).metrics(Table(), (TOKENS, TARGETS))
    assert metrics.keys() == {"loss"}
    assert float(metrics["loss"][0]) == pytest.approx(by_hand(0.0), rel=1e-6) and int(metrics["loss"][1]) == 5


def test_what_is_counted_is_tokens() -> None:
    assert task().items == "tokens"
