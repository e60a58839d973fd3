"""Hyperband: brackets of trials, some of many with little, some of few with much, each halved when all are there.

Li et al., "Hyperband", 2018. Nothing depends on who is faster: the same trials give the same decisions.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from shoal.tune.schedulers.moves import Go, Move, Stop, Trials, at
from shoal.tune.trial import SAME, Objective, Trial


@dataclass(frozen=True)
class Bracket:
    """Trials that are compared with each other."""

    size: int
    rungs: tuple[float, ...]


@dataclass(frozen=True)
class Hyperband:
    """As `Scheduler`."""

    objective: Objective
    length: float
    grace: float
    reduction: int
    unit: str = "epochs"

    @cached_property
    def shapes(self) -> list[Bracket]:
        """Of one round, the most daring first."""
        most = int(math.log(max(self.length / self.grace, 1.0), self.reduction) + 1e-9)
        found = []
        for halvings in range(most, -1, -1):
            size = math.ceil((most + 1) / (halvings + 1) * self.reduction**halvings)
            found.append(Bracket(size, tuple(self.length / self.reduction**left for left in range(halvings, 0, -1))))
        return found

    def bracket(self, number: int) -> tuple[int, Bracket]:
        """The bracket of a trial by its number, and which one that is."""
        a_round = sum(shape.size for shape in self.shapes)
        place = number % a_round
        for index, shape in enumerate(self.shapes):
            if place < shape.size:
                return number // a_round * len(self.shapes) + index, shape
            place -= shape.size
        raise AssertionError

    def until(self, trial: Trial) -> float | None:
        """The next rung of its bracket."""
        _, shape = self.bracket(trial.number)
        return next((rung for rung in shape.rungs if rung > trial.progress + SAME), None)

    def verdict(self, trial: Trial, trials: Trials) -> str | None:
        """Never: it pauses at a rung."""
        return None

    def moves(self, trials: Trials, expects_more: bool) -> list[Move]:
        """Of each rung that all have reached: the best go on."""
        members: dict[int, list[Trial]] = {}
        for trial in trials.values():
            members.setdefault(self.bracket(trial.number)[0], []).append(trial)
        found: list[Move] = []
        for bracket in members.values():
            shape = self.bracket(bracket[0].number)[1]
            if len(bracket) == shape.size or not expects_more:
                for rung in shape.rungs:
                    found += self._halve(bracket, rung)
        return found

    def _halve(self, bracket: list[Trial], rung: float) -> list[Move]:
        there = [trial for trial in bracket if trial.at(rung) is not None]
        waited_for = [trial for trial in bracket if trial.at(rung) is None and not trial.is_ended]
        paused = [trial for trial in there if trial.status == "paused" and self._rung_of(trial) == rung]
        if waited_for or not paused:
            return []
        ranked = sorted(there, key=lambda trial: (trial.loss_at(rung, self.objective), trial.number))
        going_on = max(1, len(ranked) // self.reduction)
        chosen = {trial.number for trial in ranked[:going_on]}
        there_then = f"of {len(ranked)} {at(rung, self.unit)}, and {going_on} went on"
        return [
            Go(trial.number)
            if trial.number in chosen
            else Stop(trial.number, f"place {ranked.index(trial) + 1} {there_then}")
            for trial in paused
        ]

    def _rung_of(self, trial: Trial) -> float | None:
        """The last rung that it has reached."""
        _, shape = self.bracket(trial.number)
        return max((rung for rung in shape.rungs if rung <= trial.progress + SAME), default=None)
