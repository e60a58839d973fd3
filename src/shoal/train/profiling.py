"""A few steps recorded in full by PyTorch's profiler: a trace for Perfetto, and the hottest operators. Loads without
torch, because where they lie is asked for by those who read them."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.storage import write_atomically
from shoal.observe.records import Observer
from shoal.observe.run_folder import append_event, event_record
from shoal.observe.section import ProfileSection

if TYPE_CHECKING:
    import torch

    from shoal.core.process import Process

FOLDER = "profile"
"""In the run's folder."""
_MOST = 40
"""Operators that are kept."""

_LOG_LEVEL = "KINETO_LOG_LEVEL"

Tell = Callable[[str, dict[str, Any]], None]


def file_stem(rank: int) -> str:
    """What the files of a worker's profile begin with."""
    return f"rank-{rank:05d}"


def make_profiler(section: ProfileSection | None, run_dir: Path, process: "Process", observer: Observer) -> "Profiler":
    """What the loop drives: one that records where this worker is asked to, else one that does nothing."""
    if section is None:
        return Profiler()
    beyond = _beyond(section.ranks, process.world_size) if process.is_first else []
    is_asked = _records(section.ranks, process.rank)
    if not is_asked and not beyond:
        return Profiler()
    tell = observer.event if process.is_first else _tell_in(run_dir)
    recorder = _Recorder(section, run_dir / FOLDER, process.rank, process.device, tell)
    recorder.is_asked = is_asked
    if beyond:
        recorder.warning = (
            f"observe.profile.ranks: there is no worker {beyond[0]}; the last is {process.world_size - 1}"
        )
    return Profiler(recorder)


def _records(ranks: Sequence[int] | str, rank: int) -> bool:
    return ranks == "all" if isinstance(ranks, str) else rank in ranks


def _beyond(ranks: Sequence[int] | str, world_size: int) -> list[int]:
    return [] if isinstance(ranks, str) else [rank for rank in ranks if rank >= world_size]


def _tell_in(run_dir: Path) -> Tell:
    """The others' events go straight into the folder: what they observe, nobody sees."""

    def tell(name: str, fields: dict[str, Any]) -> None:
        append_event(run_dir / "events.jsonl", event_record(name, fields))

    return tell


class Profiler:
    """Told of every step; once all is recorded, or where nothing is to be, that costs next to nothing.

    Trouble never reaches the run: it becomes a warning, and nothing more is recorded.
    """

    def __init__(self, recorder: "_Recorder | None" = None) -> None:
        self._recorder = recorder

    def after_step(self, step: int) -> bool:
        """A step is done. Whether time has passed here that is no step's: when recording begins, and when it ends."""
        if self._recorder is None:
            return False
        return self._safely(lambda recorder: recorder.after_step(step))

    def close(self) -> None:
        """The run ends, whichever way: what is recorded by now is written."""
        if self._recorder is not None:
            self._safely(lambda recorder: recorder.close())
            self._recorder = None

    def _safely(self, do: "Callable[[_Recorder], bool]") -> bool:
        recorder = self._recorder
        assert recorder is not None
        try:
            took_time = do(recorder)
            if recorder.is_done:
                self._recorder = None
            return took_time
        except Exception as error:  # noqa: BLE001 - a full disk, another profiler, CUPTI: training goes on
            self._recorder = None
            _warn(recorder, error)
            return True


def _warn(recorder: "_Recorder", error: Exception) -> None:
    words = str(error).splitlines()[0] if str(error) else type(error).__name__
    try:
        recorder.tell("warning", {"message": f"nothing is profiled on worker {recorder.rank}: {words}"})
    except OSError:  # the disk may be what failed, and then nobody can be told
        return


class _Recorder:
    """Steps `after` + 1 to `after` + `steps` of this start; the one before them only warms the profiler up."""

    def __init__(
        self, section: ProfileSection, folder: Path, rank: int, device: "torch.device", tell: Callable[..., None]
    ) -> None:
        self.rank = rank
        self.tell = tell
        self.is_done = False
        self.is_asked = True
        """Whether this worker records at all."""
        self.warning: str | None = None
        """To be told once the run is under way."""
        self._section = section
        self._folder = folder
        self._device = device
        self._profile: Any = None
        self._seen = 0
        self._first_step: int | None = None
        self._last_step = 0
        self._began = 0.0
        self._seconds = 0.0

    def after_step(self, step: int) -> bool:
        self._seen += 1
        if self._seen == 1:
            self._begin()
        if self.is_done:
            return False
        after, steps = self._section.after, self._section.steps
        if self._seen < after - 1:
            return False
        if self._profile is None:
            self._start(warmup=self._seen < after)
        elif self._seen <= after:
            self._profile.step()  # from warming up to recording
        if self._seen == after:
            self._first_step, self._last_step = step + 1, step
            self._began = self._now()
            return True
        if self._seen > after:
            self._last_step = step
            if self._seen == after + steps:
                return self.close()
            self._profile.step()  # which marks the step in the trace
        return self._seen < after

    def _begin(self) -> None:
        if self.warning is not None:
            self.tell("warning", {"message": self.warning})
        self.is_done = not self.is_asked
        if self.is_asked:
            for suffix in (".json", ".trace.json.gz"):  # of an earlier start: it would be taken for this one's
                (self._folder / f"{file_stem(self.rank)}{suffix}").unlink(missing_ok=True)

    def close(self) -> bool:
        """Stop, and write what there is."""
        if not self.is_asked:
            return False
        if self._profile is None or self._first_step is None or self._last_step < self._first_step:
            if self._profile is not None:
                self._profile.stop()
            self._tell_that_nothing_was()
            return True
        self._seconds = self._now() - self._began
        self._profile.stop()
        self.is_done = True
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"{file_stem(self.rank)}.trace.json.gz"
        partial = trace.with_name(f".{trace.name.removesuffix('.gz')}.partial.gz")  # it is packed if it ends so
        try:
            self._profile.export_chrome_trace(str(partial))
            partial.replace(trace)
            record = self._record()
            write_atomically(self._folder / f"{file_stem(self.rank)}.json", json.dumps(record, indent=1) + "\n")
        finally:
            partial.unlink(missing_ok=True)
        self.tell("profile", {"rank": self.rank, "steps": record["steps"], "path": str(trace)})
        return True

    def _start(self, warmup: bool) -> None:
        from torch._C._autograd import _profiler_enabled
        from torch.profiler import ProfilerActivity, profile, schedule

        if _profiler_enabled():  # which ours would end, or be refused by, depending on PyTorch's version
            raise RuntimeError("another profiler is at work in this process")

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        # One more than there are: it is for us to stop, also when the run ends earlier.
        plan = schedule(wait=0, warmup=1, active=self._section.steps + 1, repeat=1) if warmup else None
        started = profile(activities=activities, schedule=plan)
        with _quiet():
            started.start()
        self._profile = started

    def _now(self) -> float:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _record(self) -> dict[str, Any]:
        averages = self._profile.key_averages()
        return {
            "rank": self.rank,
            "steps": [self._first_step, self._last_step],
            "seconds": round(self._seconds, 6),
            "device": device_name(self._device),
            "operators": hottest(averages, on_gpu=self._device.type == "cuda"),
        }

    def _tell_that_nothing_was(self) -> None:
        self.is_done = True
        message = (
            f"nothing is profiled on worker {self.rank}: it made {self._seen} steps, and recording begins after "
            f"{self._section.after}; lower observe.profile.after"
        )
        self.tell("warning", {"message": message})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Kineto says on stderr, into our progress bar, that it starts and stops, unless it is told not to before its first
    use."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "6"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]


def device_name(device: "torch.device") -> str:
    """`cpu`, or what the GPU is called."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def hottest(averages: Any, on_gpu: bool) -> list[dict[str, Any]]:
    """The operators that took most time themselves, without what they called: on a GPU, of the GPU's.

    Kernels are counted with the operator that launched them, and not once more by themselves.
    """
    rows = [
        {
            "name": average.key,
            "calls": average.count,
            "self_cpu_s": average.self_cpu_time_total / 1e6,
            "self_device_s": average.self_device_time_total / 1e6,
            "cpu_s": average.cpu_time_total / 1e6,
            "device_s": average.device_time_total / 1e6,
        }
        for average in averages
        if average.device_type.name == "CPU" and not average.key.startswith("ProfilerStep")
    ]
    first, second = ("self_device_s", "self_cpu_s") if on_gpu else ("self_cpu_s", "self_device_s")
    return sorted(rows, key=lambda row: (-row[first], -row[second]))[:_MOST]
