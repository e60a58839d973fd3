"""The strategy of a recipe, by name."""

from torch import nn

from shoal.core.errors import UserError
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.parallel.ddp import DdpUnit
from shoal.parallel.section import ParallelSection
from shoal.parallel.single import SingleUnit
from shoal.parallel.unit import StepSettings, TrainUnit


def choose_strategy(section: ParallelSection, world_size: int) -> str:
    """The strategy by name: `auto` is one process where there is one, and data parallel where there are more."""
    if section.strategy == "auto":
        return "single" if world_size == 1 else "ddp"
    if section.strategy == "single" and world_size > 1:
        raise UserError(f"parallel.strategy: single is for one worker, and there are {world_size}; use ddp or auto")
    return section.strategy


def build_unit(
    section: ParallelSection, model: nn.Module, objective: Objective, settings: StepSettings, process: Process
) -> TrainUnit:
    """The model made ready to train under the recipe's strategy."""
    if choose_strategy(section, process.world_size) == "single":
        return SingleUnit(model, objective, settings, process)
    return DdpUnit(model, objective, settings, process, section)
