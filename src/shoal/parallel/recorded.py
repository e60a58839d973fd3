"""A step that the GPU repeats from a recording (a CUDA graph), instead of being told each operation by the host."""

import gc
from typing import Any, Literal

import torch

from shoal.core.batch import StepBatch
from shoal.core.errors import UserError
from shoal.parallel.replica import Replica
from shoal.parallel.unit import StepLoss, StepSettings, untimed

_SHARE = 3
"""Part of the GPU's memory that steps may take to be recorded unasked: what a recording computes in is kept for it, and
evaluation needs memory beside."""
_AS_USUAL = 3
"""Steps before the recording: kernels are compiled and chosen, and the optimizer makes its state."""


class RecordedStep:
    """The passes of a step and its update, recorded once they have run as usual and repeated from then on.

    The same kernels run in the same order on the same memory, so that not a bit of what is learned changes. Steps of
    another shape than the recorded one, such as the last of an epoch, run as usual.
    """

    def __init__(self, unit: Replica, asked: bool | Literal["auto"]) -> None:
        self._unit = unit
        self._is_asked = asked is True
        self._tells = unit.tell
        self._given_up = False
        self.forget()
        torch.cuda.reset_peak_memory_stats(unit.device)
        # Where a recorded update finds its learning rate; the usual one must compute with the same number.
        for group in unit.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=unit.device)
            if "capturable" in group:
                group["capturable"] = True

    def forget(self) -> None:
        """For when the optimizer's state is no longer where it was."""
        self._recording: _Recording | None = None
        self._steps_seen = 0
        self.is_pending = False
        """Whether the passes of this step were repeated, so that its update must be too."""

    def forward_backward(self, step: StepBatch, expected: float) -> StepLoss | None:
        """The passes of a step from the recording, which is made when it is time; None where they must run as usual."""
        self.is_pending = False
        if self._given_up or not _is_regular(step, self._unit.settings) or not self._unit.model.training:
            return None
        if self._steps_seen < _AS_USUAL:
            self._steps_seen += 1
            return None
        unit = self._unit
        batch = unit.to_device(step.microbatches[0].data)
        if self._recording is None:
            self._recording = self._record(batch, expected)
        if self._recording is None or not self._recording.takes(batch):
            return None
        self._recording.fill(batch, expected)
        unit.lap("h2d")
        self._recording.passes.replay()
        unit.lap("forward_backward")
        self.is_pending = True
        return self._recording.loss

    def update(self) -> None:
        """The update of the step whose passes were repeated."""
        assert self._recording is not None
        self._recording.update.replay()
        self._unit.grad_norm = self._recording.grad_norm  # which a usual step has replaced

    def _record(self, batch: Any, expected: float) -> "_Recording | None":
        unit = self._unit
        if not _is_plain(batch, unit.device):
            self._give_up("a batch is not a tuple of tensors")
            return None
        if unit.returns_sums and unit.objective.count is None:
            self._give_up("task.loss returns (sum, count), and the task has no count(batch) to know it beforehand")
            return None
        if not self._is_asked and not _leaves_room(unit.device):
            self._given_up = True
            return None
        unit.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(unit.device)
        gc.collect()
        torch.cuda.empty_cache()  # what the usual steps computed in is needed no more
        lap, unit.lap = unit.lap, untimed
        try:
            return _Recording(unit, batch, expected)
        except torch.OutOfMemoryError:
            self._give_up("the GPU has too little memory for that")
            return None
        except RuntimeError as error:
            # PyTorch cannot be trusted to give memory back in this process after a recording that was broken off.
            raise UserError(
                f"train.cuda_graphs: this step cannot be recorded ({str(error).splitlines()[0]}); set it to false"
            ) from error
        finally:
            unit.lap = lap
            unit.optimizer.zero_grad(set_to_none=True)

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._tells(f"steps are not recorded as CUDA graphs: {why}")


class _Recording:
    """The two graphs and the memory that they read and write."""

    def __init__(self, unit: Replica, batch: Any, expected: float) -> None:
        self.inputs = [tensor.clone() for tensor in batch]
        self._expected = expected
        self._divisor = torch.full((), expected, dtype=torch.float32, device=unit.device)
        own_batch = type(batch)(self.inputs)
        num_samples = len(self.inputs[0])
        self.passes, self.update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Other threads copy checkpoints and batches meanwhile, which the default mode takes for a part of this.
        with torch.cuda.graph(self.passes, capture_error_mode="thread_local"):
            with unit.autocast:
                loss = unit.loss_of(own_batch)
            # A task that counts has another divisor in every step.
            divisor: Any = self._divisor if unit.objective.count is not None else expected
            share, term, count = unit.share(loss, num_samples, divisor, 1)
            share.backward()  # type: ignore[no-untyped-call]
        assert term is not None
        self.loss = StepLoss([term], count)
        with torch.cuda.graph(self.update, pool=self.passes.pool(), capture_error_mode="thread_local"):
            unit.update()
        self.grad_norm = unit.grad_norm
        self._gradients = [parameter.grad for parameter in unit.parameters]
        """Kept, because the graphs write and read them."""

    def takes(self, batch: Any) -> bool:
        """Whether a batch fits in the memory that was recorded with."""
        return len(batch) == len(self.inputs) and all(
            isinstance(given, torch.Tensor) and given.shape == own.shape and given.dtype == own.dtype
            for given, own in zip(batch, self.inputs, strict=True)
        )

    def fill(self, batch: Any, expected: float) -> None:
        """Put a batch where the graphs look for it."""
        for own, given in zip(self.inputs, batch, strict=True):
            own.copy_(given)
        if expected != self._expected:
            self._expected = expected
            self._divisor.fill_(expected)


def _is_regular(step: StepBatch, settings: StepSettings) -> bool:
    """Whether a step is like most: one micro-batch with all its samples."""
    return len(step.microbatches) == 1 and step.num_samples == settings.global_batch == settings.micro_batch


def _leaves_room(device: torch.device) -> bool:
    """Whether the steps so far took so little memory that evaluation has enough beside a recording."""
    total = torch.cuda.get_device_properties(device).total_memory * torch.cuda.get_per_process_memory_fraction(device)
    return torch.cuda.max_memory_allocated(device) * _SHARE <= total


def _is_plain(batch: Any, device: torch.device) -> bool:
    return type(batch) in (tuple, list) and all(
        isinstance(leaf, torch.Tensor) and leaf.device.type == device.type for leaf in batch
    )
