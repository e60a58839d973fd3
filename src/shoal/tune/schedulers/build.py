"""The scheduler that a search asks for."""

from collections.abc import Collection

from shoal.tune.schedulers.asha import Asha
from shoal.tune.schedulers.hyperband import Hyperband
from shoal.tune.schedulers.median import Median
from shoal.tune.schedulers.moves import Scheduler
from shoal.tune.schedulers.none import ToTheEnd
from shoal.tune.schedulers.pb2 import Pb2
from shoal.tune.schedulers.pbt import Pbt
from shoal.tune.section import TuneSection
from shoal.tune.space import Space
from shoal.tune.trial import Objective

POPULATIONS = ("pbt", "pb2")


def build_scheduler(
    section: TuneSection,
    objective: Objective,
    length: float,
    unit: str,
    grace: float,
    interval: float,
    space: Space,
    free: Collection[str],
) -> Scheduler:
    """By its name."""
    if section.scheduler == "asha":
        return Asha(objective, length, grace, section.reduction, unit)
    if section.scheduler == "hyperband":
        return Hyperband(objective, length, grace, section.reduction, unit)
    if section.scheduler == "median":
        return Median(objective, grace, unit)
    if section.scheduler in POPULATIONS:
        kind = Pbt if section.scheduler == "pbt" else Pb2
        return kind(
            objective, length, interval, section.quantile, section.resample, section.seed, space, frozenset(free)
        )
    return ToTheEnd()
