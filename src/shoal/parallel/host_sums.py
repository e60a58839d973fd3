"""Gradients that FSDP2 keeps in the host's memory, added up over the micro-batches of a step."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shoal.core.parts import is_distributed


class HostSums:
    """Puts a micro-batch's gradients aside before those of the next one come.

    FSDP2 sends a gradient into pinned memory and computes on meanwhile, but only where there is none yet. One that is
    to be added to another goes through memory that a GPU cannot reach by itself, and everything waits for it.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], computes_on: torch.device) -> None:
        found = parameters if computes_on.type != "cpu" else ()
        self._parameters: list[Any] = [p for p in found if is_distributed(p) and p.device.type == "cpu"]
        self._sums: dict[Any, Any] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around all micro-batches of a step: at the end, the sums are the gradients."""
        try:
            yield
            if self._sums:
                self._put_aside()
                for parameter, total in self._sums.items():
                    parameter.grad = total
        finally:  # nothing is left of a step that failed
            self._sums = {}

    @contextlib.contextmanager
    def before_last(self) -> Iterator[None]:
        """Around each of them but the last."""
        yield
        self._put_aside()

    def _put_aside(self) -> None:
        """What has arrived: FSDP2's backward pass ends when everything has."""
        for parameter in self._parameters:
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                continue
            total = self._sums.setdefault(parameter, gradient)
            if total is not gradient:
                total.to_local().add_(gradient.to_local())
