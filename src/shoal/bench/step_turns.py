"""A contender's side of taking turns: it trains on and on, and says after every step that it has; here it is held until
it is its turn again, and timed. So nothing is built, compiled or started twice, whoever owns the loop."""

import json
import resource
import socket
import time
from pathlib import Path
from typing import Any

import torch

from shoal.core.rng import seed_all


class Link:
    """Messages with whoever measures, one a line."""

    def __init__(self, address: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(address))
        self._file = self._socket.makefile("rw", encoding="utf-8")

    def tell(self, message: dict[str, Any]) -> None:
        """Answer."""
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any] | None:
        """The next command; None when there will be none."""
        line = self._file.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        """Say no more."""
        self._file.close()
        self._socket.close()


class Turns:
    """First an opening, whose losses are kept, from the first step after the weights were made; then turns."""

    def __init__(self, link: Link, device: torch.device) -> None:
        self._link = link
        self._device = device
        self.facts: dict[str, Any] = {}
        """What this contender says of itself."""
        self.num_opening = 0
        """Steps of the opening; known once `begin` has returned."""
        self.is_over = False
        self._began = self._first_s = 0.0
        self._losses: list[tuple[torch.Tensor, int]] | None = None
        """Of the opening; None when that is past."""
        self._left = 0
        self._steps = 0
        """Of the turn that is being timed, or is about to be."""
        self._is_timed = False

    def begin(self, seed: int, **versions: str) -> None:
        """Say that all is built, by which versions of whose packages, and wait for the word to train.

        From `seed` on all draw the same, for as long as they draw in the same order.
        """
        known = self.facts.get("versions", {})
        self._link.tell({"ready": {**self.facts, "versions": known | versions}})
        command = self._link.hear()
        if command is None:
            raise SystemExit(0)
        self.num_opening = self._left = command["opening"]
        self._losses = []
        seed_all(seed)
        self._began = time.perf_counter()

    def after_step(self, loss: torch.Tensor | None = None, items: int = 1) -> bool:
        """A step is done; whether to go on.

        Args:
            loss: The mean over the items of the step.
            items: What the loss is a mean of.
        """
        if self._losses is not None:
            assert loss is not None
            if not self._losses:
                self.first_step_done()
            self._losses.append((loss.detach().clone(), items))  # a compiled step may write to it again
        self._left -= 1
        return self._left > 0 or self._next()

    def first_step_done(self) -> None:
        """Note how long the first step took."""
        self.wait_for_device()
        self._first_s = time.perf_counter() - self._began

    def _next(self) -> bool:
        """What comes when the steps that were asked for are done."""
        if self._losses is not None:
            self.wait_for_device()
            return self.opened([(float(loss), items) for loss, items in self._losses])
        self.wait_for_device()
        if not self._is_timed:  # that was for the machine to get going again
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self._is_timed, self._left = True, self._steps
            self._began, self._cpu_began = time.perf_counter(), time.process_time()
            return True
        found = {"seconds": time.perf_counter() - self._began, "cpu_s": time.process_time() - self._cpu_began}
        found |= self._memory()
        self._answer(found)
        return self.wait()

    def opened(self, losses: list[tuple[float, int]]) -> bool:
        """Tell the mean losses of the steps of the opening, and wait for the first turn; whether there is one."""
        self._losses = None
        self._answer({"first_s": self._first_s, "opening_s": time.perf_counter() - self._began, "losses": losses})
        return self.wait()

    def wait(self) -> bool:
        """Until it is this contender's turn; whether there is another."""
        command = self._link.hear()
        if command is None:
            self.is_over = True
            return False
        self._steps, self._left, self._is_timed = command["steps"], command["settle"], False
        return True

    def _answer(self, found: dict[str, Any]) -> None:
        """Let somebody else have the device, and its memory, which all contenders share."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._link.tell(found)

    def wait_for_device(self) -> None:
        """Until the device has done all it was told."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _memory(self) -> dict[str, int]:
        """The most that it had at once: of the GPU, in tensors and in all that was taken for them; else of the host."""
        if self._device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated(self._device)
            return {"peak_bytes": allocated, "reserved_bytes": torch.cuda.max_memory_reserved(self._device)}
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}
