"""The course of a metric over a run of any length, in bounded memory."""

_MOST = 1024
"""More than a terminal has columns, braille dots counted."""


class Curve:
    """Means over stretches of reports; when they become too many, each two become one."""

    def __init__(self) -> None:
        self._points: list[tuple[float, float]] = []
        self._stretch = 1
        self._steps = self._values = 0.0
        self._count = 0
        self.last: tuple[int, float] | None = None
        self.lowest: tuple[int, float] | None = None
        self.highest: tuple[int, float] | None = None

    def add(self, step: int, value: float) -> None:
        """A report."""
        self.last = here = (step, value)
        if self.lowest is None or self.highest is None:
            self.lowest = self.highest = here
        elif value < self.lowest[1]:
            self.lowest = here
        elif value > self.highest[1]:
            self.highest = here
        self._steps += step
        self._values += value
        self._count += 1
        if self._count == self._stretch:
            self._points.append((self._steps / self._count, self._values / self._count))
            self._steps, self._values, self._count = 0.0, 0.0, 0
            if len(self._points) == _MOST:
                self._points = [_middle(*pair) for pair in zip(self._points[::2], self._points[1::2], strict=True)]
                self._stretch *= 2

    def points(self) -> list[tuple[float, float]]:
        """(step, value), by step; the last is the last report itself, so that a curve ends where the run is."""
        return [*self._points, self.last] if self._count and self.last is not None else list(self._points)


def _middle(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    return (one[0] + other[0]) / 2, (one[1] + other[1]) / 2
