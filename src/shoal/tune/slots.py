"""Places for trials on a Ray cluster: each holds the workers of one trial, and is handed from one trial to the next.

A place is reserved all or nothing, and given up as a whole when it cannot be made whole again. So trials never wait for
each other with half of what they need. The actors and the warm process of a place stay while trials come and go: a
trial starts in the time that a fork takes.
"""

import time
from dataclasses import dataclass

from shoal.launch.policy import Size, missing_resources, num_fitting
from shoal.launch.ray_crew import RayCrew, alive_nodes, can_grow

_LOOK_EVERY_S = 1.0
_RELIEF_S = 5.0
"""Whoever lacks room has what was given up for it within so long."""
_AGAIN_S = 30.0
"""After a place could not be had, no other is asked for so long, unless the cluster has grown."""


@dataclass
class Slot:
    """A place for one trial."""

    crew: RayCrew
    size: Size
    is_busy: bool = False


class Slots:
    """All of them."""

    def __init__(self, size: Size, per_worker: dict[str, float], nursery: str, most: int | None) -> None:
        self._size = size
        self._per_worker = per_worker
        self._nursery = nursery
        self._most = most
        self._slots: list[Slot] = []
        self._looked = 0.0
        self._fitting = 0
        self._refused: tuple[float, int] | None = None
        """When a place could last not be had, and how many workers the cluster had room for then."""
        self._relieved = 0.0

    @property
    def limit(self) -> int:
        """How many trials the cluster has room for."""
        now = time.monotonic()
        if now - self._looked > _LOOK_EVERY_S:
            self._looked = now
            self._fitting = num_fitting(self._per_worker, alive_nodes())
        fitting = self._fitting // self._size.least
        if can_grow():  # which a place that is asked for makes it do
            fitting += 1
        return fitting if self._most is None else min(fitting, self._most)

    def obstacle(self) -> str | None:
        """What the cluster lacks for a single trial, in words."""
        return None if can_grow() else missing_resources(self._per_worker, self._size.least, alive_nodes())

    def take(self, wanted: int) -> Slot | None:
        """A place for one more trial, one that is free or a new one, where there is room.

        `wanted`: how many trials there are to run beside each other, which share what there is.
        """
        size, is_full = self._share(wanted), self._is_full()
        for slot in [slot for slot in self._slots if not slot.is_busy]:
            if slot.size == size or is_full:
                slot.is_busy = True
                return slot
            self._close(slot)  # what is asked for instead may need its room
        if is_full or len(self._slots) >= self.limit:
            return None
        slot = Slot(RayCrew(size, self._per_worker, self._nursery), size, is_busy=True)
        self._slots.append(slot)
        return slot

    def _share(self, wanted: int) -> Size:
        """An equal share of the cluster, where trials may have more workers than they need."""
        at_a_time = max(1, min(wanted, self.limit))
        share = self._fitting // at_a_time
        return Size(self._size.least, min(max(share, self._size.least), self._size.most))

    def _is_full(self) -> bool:
        """Whether a place could not be had a moment ago: others use the cluster too."""
        if self._refused is None:
            return False
        when, fitting = self._refused
        return time.monotonic() - when < _AGAIN_S and self._fitting <= fitting

    def _close(self, slot: Slot) -> None:
        self._slots.remove(slot)
        slot.crew.close()

    def give_back(self, slot: Slot, is_whole: bool = True) -> None:
        """A trial needs it no more; `is_whole`: whether another may have it as it is."""
        slot.is_busy = False
        if not is_whole:
            self._refused = time.monotonic(), self._fitting
            self._close(slot)
        self.trim()

    def trim(self) -> None:
        """Close places that nobody uses, where others lack what they hold."""
        idle = [slot for slot in self._slots if not slot.is_busy]
        for slot in list(idle):
            held = sum(slot.size.most for slot in self._slots)
            if len(self._slots) > self.limit or held > max(self._fitting, self.limit * self._size.least):
                self._close(slot)
                idle.remove(slot)
        now = time.monotonic()
        if not idle or now - self._relieved < _RELIEF_S:
            return
        short = [slot for slot in self._slots if slot.is_busy and slot.crew.is_short()]
        if short:
            self._relieved, self._refused = now, (now, self._fitting)
            for slot in idle[: len(short)]:
                self._close(slot)

    def close(self) -> None:
        """Let go of everything."""
        for slot in self._slots:
            slot.crew.close()
        self._slots = []
