"""What the shipped recipes reach on real data: minutes each, so `make test-all` runs them; a quick one runs always."""

from pathlib import Path

import pytest

from shoal.launch.api import train


def reached(name: str, shared_data: Path, here: Path, **overrides: object) -> dict[str, float]:
    fields = {key.replace("__", "."): value for key, value in overrides.items()}
    summary = train(name, {"data.dir": str(shared_data), "data.download": False, **fields}, progress="silent")
    return dict(summary["metrics"])


def test_mnist_is_learnt_well_in_a_fraction_of_an_epoch(shared_data: Path, here: Path) -> None:
    assert reached("mnist", shared_data, here, train__steps=120, optim__warmup_steps=20)["val_accuracy"] >= 0.96


@pytest.mark.slow
def test_mnist_reaches_99_percent_within_5_epochs(shared_data: Path, here: Path) -> None:
    assert reached("mnist", shared_data, here)["val_accuracy"] >= 0.99


@pytest.mark.slow
def test_agnews_reaches_80_percent_on_6600_texts(shared_data: Path, here: Path) -> None:
    split = {
        "data__train_file": "test.csv",
        "data__val_file": None,
        "data__train_samples": 6600,
        "data__val_samples": 1000,
    }
    assert reached("agnews", shared_data, here, **split, train__epochs=8)["val_accuracy"] >= 0.80


@pytest.mark.slow
def test_shakespeare_reaches_the_published_nanogpt_figure(shared_data: Path, here: Path) -> None:
    assert reached("shakespeare", shared_data, here)["val_loss"] <= 1.88
