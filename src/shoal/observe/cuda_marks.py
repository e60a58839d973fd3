"""Points in the time of a GPU: CUDA events on the stream that computes, used again and again."""

import torch


class CudaMarks:
    """Marks of one GPU, for `Clock`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.current_stream(device)
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """On the stream that computes, whichever is current here: some strategies wait for others on another."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def is_reached(self, mark: torch.cuda.Event) -> bool:
        """Whether the GPU has come there."""
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Between two that were reached."""
        return float(first.elapsed_time(second)) / 1e3

    def let_go(self, mark: torch.cuda.Event) -> None:
        """It may be used again."""
        self._free.append(mark)

    def wait(self) -> None:
        """Until the GPU has done all it was told."""
        torch.cuda.synchronize(self._device)
