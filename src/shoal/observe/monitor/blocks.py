"""The reports of a run of any length in bounded memory, for the ledger: as they are, or some neighbours as one."""

from typing import Any

_MOST = 2048


class Blocks:
    """Reports, of which each two become one when they are too many: what a ledger says of them stays the same but for
    those at its seams."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._stretch = 1
        self._open: dict[str, Any] | None = None
        self._count = 0

    def add(self, time: float, step: int, seconds: dict[str, float]) -> None:
        """A report."""
        if self._open is None:
            self._open = {"time": time, "step": step, "seconds": dict(seconds)}
        else:
            self._open["time"], self._open["step"] = time, step
            _add(self._open["seconds"], seconds)
        self._count += 1
        if self._count == self._stretch:
            self._blocks.append(self._open)
            self._open, self._count = None, 0
            if len(self._blocks) == _MOST:
                self._blocks = [_join(*pair) for pair in zip(self._blocks[::2], self._blocks[1::2], strict=True)]
                self._stretch *= 2

    def reports(self) -> list[dict[str, Any]]:
        """As `shoal.observe.ledger.make_ledger` takes them."""
        return [*self._blocks, self._open] if self._open is not None else list(self._blocks)


def _join(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    _add(one["seconds"], other["seconds"])
    return {"time": other["time"], "step": other["step"], "seconds": one["seconds"]}


def _add(seconds: dict[str, float], more: dict[str, float]) -> None:
    for phase, value in more.items():
        seconds[phase] = seconds.get(phase, 0.0) + value
