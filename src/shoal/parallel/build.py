"""The strategy of a recipe, by name."""

from torch import nn

from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.parallel.section import ParallelSection
from shoal.parallel.single import SingleUnit
from shoal.parallel.unit import StepSettings, TrainUnit

_STRATEGIES = {"single": SingleUnit}


def build_unit(
    section: ParallelSection, model: nn.Module, objective: Objective, settings: StepSettings, process: Process
) -> TrainUnit:
    """The model made ready to train under the recipe's strategy."""
    return _STRATEGIES[section.strategy](model, objective, settings, process)
