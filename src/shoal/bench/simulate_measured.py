"""The network of this machine, as its own collectives show it: Gloo over the loopback interface."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from shoal.bench.simulate_links import ACROSS, ALL, PAIRS, Case
from shoal.bench.simulate_network import Collective, Members, Message

_Point = tuple[float, float, float]
"""Bytes, seconds, and how busy it is."""


class Loopback:
    """What so many workers of this machine have measured; no other number of them."""

    waits = True

    def __init__(self, workers: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Records of `simulate_links`, of one round or of several."""
        self.workers = workers
        found: dict[Case, dict[int, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
        for record in records:
            found[record["who"], record["collective"], record["dtype"]][record["bytes"]].append(record)
        self._points = {
            case: [_point(size, rows) for size, rows in sorted(sizes.items())] for case, sizes in found.items()
        }

    def message(self, collective: Collective, num_bytes: float, members: Members, dtype: str = "fp32") -> Message:
        """On the straight line between the nearest sizes that were measured."""
        if members.size == 1:
            return Message(0.0)
        points = self._points[self._who(members), collective, dtype]
        after = next((number for number, point in enumerate(points) if point[0] > num_bytes), len(points) - 1)
        if after == 0:
            return Message(points[0][1], points[0][2])
        (size, seconds, busy), (more, longer, busier) = points[after - 1], points[after]
        share = (num_bytes - size) / (more - size)
        kept = min(1.0, share)  # beyond the largest size, messages are as busy as that one
        if share > 1:  # and noise makes none cheaper
            return Message(longer + (share - 1) * max(0.0, longer - seconds), busier)
        return Message(seconds + share * (longer - seconds), busy + kept * (busier - busy))

    def _who(self, members: Members) -> str:
        if members.size == self.workers:
            return ALL
        return ACROSS if members.on_node == 1 else PAIRS

    def line(self, collective: Collective) -> tuple[float, float]:
        """Of all workers in fp32: the latency in seconds, and seconds a byte, by the line that fits best."""
        points = self._points[ALL, collective, "fp32"]
        return fit([(size, seconds) for size, seconds, _ in points])

    def summary(self) -> dict[str, Any]:
        """Latency and rate of every collective, and what adding up costs an all-reduce beside passing on."""
        lines = {name: self.line(name) for name in get_args(Collective)}
        share = (self.workers - 1) / self.workers
        reducing = (lines["all_reduce"][1] - 2 * lines["all_gather"][1]) / share
        return {
            "latency_us": {name: 1e6 * alpha for name, (alpha, _) in lines.items()},
            "gb_per_s": {name: 1e-9 / beta if beta > 0 else None for name, (_, beta) in lines.items()},
            "reduce_ns_per_kb": max(0.0, 1e12 * reducing),
        }


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """alpha and beta of seconds = alpha + beta * bytes, none below zero, with the least squares of relative errors."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    y = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - x) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    together = sum(w * (size - x) * (seconds - y) for w, (size, seconds) in zip(weights, points, strict=True))
    beta = max(0.0, together / spread) if spread else 0.0
    return max(0.0, y - beta * x), beta


def _point(size: int, records: Sequence[Mapping[str, Any]]) -> _Point:
    """The medians over the rounds; noise may make a small message look as if it cost nothing."""
    waited, beside = (
        statistics.median(itertools.chain.from_iterable(record[name] for record in records))
        for name in ("waited_s", "beside_s")
    )
    waited = max(waited, 1e-6)
    return float(size), waited, min(1.5, max(0.0, beside / waited))
