import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.tasks.build import build_task, task_objective
from shoal.tasks.classification import ClassificationTask
from shoal.tasks.language_modelling import LanguageModellingTask
from shoal.tasks.section import Classification, CustomTask, LanguageModelling

SOURCE = """
class Good:
    def __init__(self, size=1, *, rate=0.5): self.size, self.rate = size, rate
    def loss(self, model, batch): return model(batch).mean()
class Needy:
    def __init__(self, size): pass
    def loss(self, model, batch): pass
class Lossless:
    def metrics(self, model, batch): pass
class Uncallable:
    loss = 3
def function(**args): return Good(**args)
number = 3
"""


@pytest.fixture
def module(here: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of one's own in the working directory."""
    (here / "own_of_task_build.py").write_text(SOURCE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_of_task_build", raising=False)
    return "own_of_task_build"


def test_a_section_becomes_its_task() -> None:
    for name in ("image_classification", "text_classification"):
        task = build_task(Classification.model_validate({"name": name, "label_smoothing": 0.2}))
        assert isinstance(task, ClassificationTask) and task.label_smoothing == 0.2
    task = build_task(LanguageModelling(name="language_modelling", label_smoothing=0.1))
    assert isinstance(task, LanguageModellingTask) and task.label_smoothing == 0.1


def test_a_class_of_ones_own_is_made_with_its_arguments(module: str) -> None:
    task = build_task(CustomTask(name=f"{module}:Good", args={"size": 7, "rate": 0.1}))
    assert (type(task).__name__, task.size, task.rate) == ("Good", 7, 0.1)
    assert build_task(CustomTask(name=f"{module}:Good")).size == 1
    assert build_task(CustomTask(name=f"{module}:function", args={"size": 2})).size == 2, "a function will do"


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("Godo", {}, "task.name: module 'own_of_task_build' has no 'Godo'; did you mean Good?"),
        ("number", {}, "task.name: own_of_task_build:number is a int, not a class or function"),
        ("Good", {"sise": 7}, "task.args: own_of_task_build:Good(size=1, *, rate=0.5) does not take them"),
        (
            "Needy",
            {},
            "task.args: own_of_task_build:Needy(size) does not take them: missing a required argument: 'size'",
        ),
        ("Lossless", {}, "task.name: own_of_task_build:Lossless has no method loss(model, batch)"),
        ("Uncallable", {}, "task.name: own_of_task_build:Uncallable has no method loss(model, batch)"),
    ],
)
def test_what_cannot_be_a_task_is_told(module: str, name: str, args: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        build_task(CustomTask(name=f"{module}:{name}", args=args))
    assert says in str(caught.value)


def test_a_class_without_a_signature_is_no_task_either() -> None:
    with pytest.raises(UserError, match=r"task.name: builtins:dict has no method loss\(model, batch\)"):
        build_task(CustomTask(name="builtins:dict"))


class Own:
    """A task that gives what the test puts in."""

    def __init__(self, loss: Any, metrics: Any = None) -> None:
        self.loss = lambda model, batch: loss
        if metrics is not None:
            self.metrics = lambda model, batch: metrics


@pytest.mark.parametrize(
    ("task", "measured"),
    [
        # the mean over the batch, or (sum, count)
        (Own(torch.tensor(0.5)), {"loss": (4.0, 8)}),
        (Own((torch.tensor(6.0), 3)), {"loss": (6.0, 3)}),
        # metrics besides: the loss is measured unless they hold one of their own
        (Own(torch.tensor(0.5), {"f1": 0.25}), {"f1": (2.0, 8), "loss": (4.0, 8)}),
        (Own(torch.tensor(0.5), {"hits": (torch.tensor(3), 5)}), {"hits": (3, 5), "loss": (4.0, 8)}),
        (Own(None, {"loss": torch.tensor(2.0)}), {"loss": (16.0, 8)}),
    ],
)
def test_metrics_are_sums_with_their_counts_and_always_hold_the_loss(task: Own, measured: dict[str, Any]) -> None:
    objective = task_objective(task)
    found = objective.metrics(nn.Identity(), torch.zeros(8), 8)
    assert {name: (float(total), int(count)) for name, (total, count) in found.items()} == measured
    assert objective.items == "samples" and objective.count is None


def test_a_loss_that_is_none_is_told_in_evaluation_too() -> None:
    with pytest.raises(UserError, match=r"task.loss returned a tensor of shape \(8,\)"):
        task_objective(Own(torch.zeros(8))).metrics(nn.Identity(), torch.zeros(8), 8)


def test_a_task_that_counts_says_what_and_how_many() -> None:
    objective = task_objective(build_task(LanguageModelling(name="language_modelling")))
    assert objective.items == "tokens" and objective.count is not None
    assert int(objective.count((None, torch.tensor([1, -100, 2])))) == 2
