"""What to do when something happens to a run. Pure functions from values to decisions; the launcher acts on them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["user", "run", "exception", "network", "died", "lost", "hung"]


@dataclass(frozen=True)
class Failure:
    """The end of one worker that was not meant."""

    rank: int
    kind: Kind
    """user: the input is wrong. run: told in words. exception: raised by the code that was run. network: another
    worker's end explains it. died: the process ended without a word. lost: its machine or agent is gone. hung."""
    message: str
    node: str = ""
    traceback: str = ""
    type: str = ""
    notes: tuple[str, ...] = ()


_CAUSES: tuple[Kind, ...] = ("lost", "hung", "user", "run", "exception", "died", "network")
"""What explains the rest, first: when a machine goes, its workers die and all others lose their connections."""
_RETRIED = {"lost", "hung", "died", "network"}


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from."""
    return min(failures, key=lambda failure: (_CAUSES.index(failure.kind), failure.rank))


def is_retried(failure: Failure) -> bool:
    """Whether starting again can help: an error in the user's code or input would only happen again."""
    return failure.kind in _RETRIED


def may_restart(restarts_in_a_row: int, max_restarts: int) -> bool:
    """Whether one more restart is within the budget; `restarts_in_a_row` have been made without a new checkpoint."""
    return restarts_in_a_row < max_restarts


def restarts_in_a_row(before: int, saved_step: int | None, saved_step_then: int | None) -> int:
    """Restarts that count: none of those before a checkpoint that has been saved since the last one."""
    return 0 if (saved_step or 0) > (saved_step_then or 0) else before


@dataclass(frozen=True)
class Size:
    """How many workers a run may have."""

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        """Whether it may change."""
        return self.least < self.most


def size_to_start(ready: int, size: Size, expected_soon: bool) -> int | None:
    """How many workers to start with now, or None to wait: for the least, or for more that are about to be ready."""
    if ready >= size.most:
        return size.most
    if ready < size.least or expected_soon:
        return None
    return ready


def size_to_grow_to(running: int, ready: int, size: Size, since_start_s: float, settle_s: float) -> int | None:
    """How many workers to go on with, where more are ready than run; not at once, so that a restart pays off."""
    possible = min(ready, size.most)
    return possible if possible > running and since_start_s >= settle_s else None


def hung_ranks(still_s: Mapping[int, float], timeout_s: float) -> list[int]:
    """The workers without progress for longer than is borne."""
    return sorted(rank for rank, seconds in still_s.items() if seconds > timeout_s)


def missing_resources(
    per_worker: Mapping[str, float], workers: int, nodes: Sequence[Mapping[str, float]]
) -> str | None:
    """What stands against `workers` of that size on these machines, in words; None if they fit."""
    fitting = num_fitting(per_worker, nodes)
    if fitting >= workers:
        return None
    for name, amount in per_worker.items():
        there = sum(node.get(name, 0.0) for node in nodes)
        if amount and there < amount * workers:
            who = "1 worker needs" if workers == 1 else f"{workers} workers need"
            return f"{who} {amount * workers:g} {name} and the cluster has {there:g}"
    size = ", ".join(f"{amount:g} {name}" for name, amount in per_worker.items())
    machines = f"{len(nodes)} machines" if len(nodes) > 1 else "one machine"
    return f"{workers} workers of {size} each do not fit on {machines}; {fitting} would"


def num_fitting(per_worker: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> int:
    """How many workers of that size these machines have place for."""
    return sum(_fitting(per_worker, node) for node in nodes)


def _fitting(per_worker: Mapping[str, float], node: Mapping[str, float]) -> int:
    needed = {name: amount for name, amount in per_worker.items() if amount}
    if not needed:
        return 1_000_000
    # Tenths of a GPU do not divide evenly in binary: ten of them are one.
    return int(min(node.get(name, 0.0) / amount + 1e-9 for name, amount in needed.items()))
