import math

import pytest
import torch
from torch import nn

from shoal.tasks.classification import ClassificationTask
from shoal.tasks.section import Classification

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [0.5, 0.5, 3.0], [1.0, 0.0, 0.0]])
LABELS = torch.tensor([0, 1, 0, 2])


class Fixed(nn.Module):
    """Gives the same logits whatever comes in."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return LOGITS.to(inputs.dtype)


def task(smoothing: float = 0.0) -> ClassificationTask:
    return ClassificationTask(Classification(name="image_classification", label_smoothing=smoothing))


def by_hand(smoothing: float) -> list[float]:
    """Cross-entropy of each sample, by the definition."""
    losses = []
    for logits, label in zip(LOGITS.tolist(), LABELS.tolist(), strict=True):
        log_sum = math.log(sum(math.exp(logit) for logit in logits))
        log_probabilities = [logit - log_sum for logit in logits]
        spread = sum(log_probabilities) / len(logits)
        losses.append(-(1 - smoothing) * log_probabilities[label] - smoothing * spread)
    return losses


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_loss_is_the_mean_cross_entropy_with_smoothed_labels(smoothing: float) -> None:
    loss = task(smoothing).loss(Fixed(), (torch.zeros(4, 2), LABELS))
    assert loss.shape == () and loss.item() == pytest.approx(sum(by_hand(smoothing)) / 4, rel=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.5])
def test_metrics_are_plain_sums_and_their_counts(smoothing: float) -> None:
    metrics = task(smoothing).metrics(Fixed(), (torch.zeros(4, 2), LABELS))
    assert metrics.keys() == {"loss", "accuracy"}
    loss, count = metrics["loss"]
    assert float(loss) == pytest.approx(sum(by_hand(0.0)), rel=1e-6) and count == 4, "without the smoothing"
    correct, count = metrics["accuracy"]
    assert int(correct) == 2 and count == 4


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    class Identity(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs

    whole = task().metrics(Identity(), (LOGITS, LABELS))
    parts = [task().metrics(Identity(), (LOGITS[part], LABELS[part])) for part in (slice(0, 1), slice(1, 4))]
    for name, (value, count) in whole.items():
        assert float(value) == pytest.approx(sum(float(part[name][0]) for part in parts), rel=1e-6)
        assert count == sum(part[name][1] for part in parts)


def test_metrics_of_half_precision_logits_are_computed_in_full() -> None:
    loss, _ = task().metrics(Fixed(), (torch.zeros(4, 2, dtype=torch.bfloat16), LABELS))["loss"]
    assert isinstance(loss, torch.Tensor) and loss.dtype == torch.float32


def probabilities(smoothing: float = 0.0) -> torch.Tensor:
    return nn.functional.one_hot(LABELS, 3).float() * (1 - smoothing) + smoothing / 3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_labels_may_be_class_probabilities(smoothing: float) -> None:
    inputs = torch.zeros(4, 2)
    loss = task(smoothing).loss(Fixed(), (inputs, probabilities()))
    assert loss.item() == pytest.approx(sum(by_hand(smoothing)) / 4, rel=1e-6)
    assert task().loss(Fixed(), (inputs, probabilities(0.3))).item() == pytest.approx(sum(by_hand(0.3)) / 4, rel=1e-6)


def test_a_mixed_loss_is_the_mixture_of_the_losses() -> None:
    mixed = 0.7 * probabilities() + 0.3 * probabilities().roll(1, 0)
    losses = [
        task(0.1).loss(Fixed(), (torch.zeros(4, 2), labels)).item() for labels in (mixed, LABELS, LABELS.roll(1, 0))
    ]
    assert losses[0] == pytest.approx(0.7 * losses[1] + 0.3 * losses[2], rel=1e-6)


def test_metrics_of_class_probabilities_are_against_the_likeliest_class() -> None:
    metrics = task().metrics(Fixed(), (torch.zeros(4, 2), probabilities(0.3)))
    assert int(metrics["accuracy"][0]) == 2 and metrics["accuracy"][1] == 4
    assert float(metrics["loss"][0]) == pytest.approx(sum(by_hand(0.3)), rel=1e-6) and metrics["loss"][1] == 4


def test_half_precision_logits_learn_from_class_probabilities() -> None:
    model = nn.Linear(2, 3, dtype=torch.bfloat16)
    loss = task(0.1).loss(model, (torch.ones(4, 2, dtype=torch.bfloat16), probabilities()))
    loss.backward()
    assert torch.isfinite(loss) and model.weight.grad is not None
