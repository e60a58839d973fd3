"""Whether all workers of FSDP2 have used the same weights."""

import zlib
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from shoal.core.errors import UserError
from shoal.core.group import Group


class SameUsed:
    """Whether all workers have used the same weights in a step.

    FSDP sums the gradients that a worker has, one after the other: those of workers that have others would be added to
    them. The answer is waited for in the next step, when it has long been there, and before anything is saved.
    """

    def __init__(self, group: Group, names: Mapping[nn.Parameter, str], instead: str) -> None:
        """`instead`: what a user can ask for who has such a model."""
        self._group, self._names, self._instead = group, names, instead
        self._wait: Callable[[], list[float]] | None = None
        self._missing: str | None = None

    def ask(self, parameters: Iterable[nn.Parameter]) -> None:
        """After a backward pass."""
        missing = [self._names[parameter] for parameter in parameters if parameter.grad is None]
        self._missing = missing[0] if missing else None
        which = zlib.crc32("\n".join(missing).encode())
        self._wait = self._group.start_max(which, -which)

    def check(self) -> None:
        """Every worker raises, or none."""
        if self._wait is None:
            return
        most, least = self._wait()
        self._wait = None
        if most != -least:
            example = f", here {self._missing}" if self._missing else ""
            raise UserError(
                f"model: workers have used different weights in a step (some were not used{example}), and fsdp adds up "
                f"gradients in their order; use {self._instead}"
            )
