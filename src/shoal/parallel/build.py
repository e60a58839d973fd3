"""The strategy of a recipe, by name."""

from collections.abc import Iterable

import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.parallel.section import ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit

Initial = Iterable[tuple[str, torch.Tensor]]
"""Every tensor of a model as a whole, by name, one at a time."""

CAN_FILL = frozenset({"fsdp", "pipeline", "tensor"})
"""Strategies that take a model on the meta device, and fill each worker's part of it."""


def choose_strategy(section: ParallelSection, world_size: int) -> str:
    """The strategy by name: `auto` is one process where there is one, and data parallel where there are more."""
    if section.strategy == "auto":
        return "single" if world_size == 1 else "ddp"
    if section.strategy == "single" and world_size > 1:
        raise UserError(f"parallel.strategy: single is for one worker, and there are {world_size}; use ddp or auto")
    return section.strategy


def build_unit(
    section: ParallelSection,
    model: nn.Module,
    objective: Objective,
    settings: StepSettings,
    process: Process,
    initial: Initial | None = None,
) -> TrainUnit:
    """The model made ready to train under the recipe's strategy.

    Args:
        section: Of the recipe.
        model: With its weights, or on the meta device.
        objective: Of the task.
        settings: How a step computes.
        process: Which worker this is. Every worker must call this.
        initial: The weights of a model that is on the meta device; None where it holds them.
    """
    strategy = choose_strategy(section, process.world_size)
    assert initial is None or strategy in CAN_FILL
    # Each is loaded when it is asked for: they bring in much of torch that the others do without.
    if strategy == "single":
        from shoal.parallel.single import SingleUnit

        return SingleUnit(model, objective, settings, process)
    if strategy == "ddp":
        from shoal.parallel.ddp import DdpUnit

        return DdpUnit(model, objective, settings, process, section)
    if strategy == "fsdp":
        from shoal.parallel.fsdp import FsdpUnit

        return FsdpUnit(model, objective, settings, process, section, initial)
    if strategy == "deepspeed":
        from shoal.parallel.deepspeed import DeepSpeedUnit

        return DeepSpeedUnit(model, objective, settings, process, section)
    if strategy == "pipeline":
        from shoal.parallel.pipeline import PipelineUnit

        return PipelineUnit(model, objective, settings, process, section, initial)
    from shoal.parallel.tensor import TensorUnit

    return TensorUnit(model, objective, settings, process, section, initial)
