"""From a `task:` section to the functions a step runs, for shipped tasks and for the user's own class alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.imports import call_object
from shoal.core.objective import Count, Measured, Objective, check_loss
from shoal.core.section import Section
from shoal.tasks.classification import ClassificationTask
from shoal.tasks.language_modelling import LanguageModellingTask
from shoal.tasks.section import Classification, CustomTask, LanguageModelling


def build_task(section: Section) -> Any:
    """An object with `loss(model, batch)`, and perhaps `model()`, `datasets()`, `metrics(model, batch)`."""
    if isinstance(section, Classification):
        return ClassificationTask(section)
    if isinstance(section, LanguageModelling):
        return LanguageModellingTask(section)
    assert isinstance(section, CustomTask)
    task = call_object(section.name, "task", section.args)
    if not callable(getattr(task, "loss", None)):
        raise UserError(f"task.name: {section.name} has no method loss(model, batch)")
    return task


def task_objective(task: Any) -> Objective:
    """The functions of a task in the one form that strategies use."""
    count = getattr(task, "count", None)
    if count is not None and not callable(count):
        raise UserError(f"task.name: count of {type(task).__name__} should be a method, count(batch)")

    def measure(model: nn.Module, batch: Any, num_samples: int) -> Measured:
        own = task.metrics(model, batch) if hasattr(task, "metrics") else {}
        if not isinstance(own, Mapping):
            raise UserError(f"task.metrics returned {type(own).__name__}; return a mapping of names to values")
        measured: Measured = {name: _as_sum(name, value, num_samples) for name, value in own.items()}
        if "loss" not in measured:
            loss = task.loss(model, batch)
            check_loss(loss)
            measured["loss"] = _as_sum("loss", loss, num_samples)
        return measured

    return Objective(
        loss=task.loss,
        metrics=measure,
        count=count,
        items=getattr(task, "items", "samples"),
        is_traceable=type(task) in (ClassificationTask, LanguageModellingTask),
    )


def _as_sum(name: str, value: Any, num_samples: int) -> tuple[torch.Tensor, Count]:
    """(sum, count) as given, or a mean over the samples turned into one; in double, where half precision overflows."""
    given, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    try:
        number = torch.as_tensor(given).detach().double()
    except (TypeError, ValueError, RuntimeError):
        number = torch.empty(0)
    if number.ndim != 0:
        raise UserError(f"task.metrics: {name} should be a number, the mean over the batch, or (sum, count)")
    return (number * num_samples, num_samples) if count is None else (number, count)
