"""A few steps recorded in full by PyTorch's profiler: a trace for Perfetto, and the hottest operators. Loads without
torch, because where they lie is asked for by those who read them."""

import contextlib
import json
import os
import re
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

_FILE = re.compile(r"rank-(\d+)(\.json|\.trace\.json\.gz)", re.ASCII)
_LOG_LEVEL = "KINETO_LOG_LEVEL"

Tell = Callable[[str, dict[str, Any]], None]


def file_stem(rank: int) -> str:
    """What the files of a worker's profile begin with."""
    return f"rank-{rank:05d}"


def make_profiler(
    section: ProfileSection | None, run_dir: Path, process: "Process", observer: Observer, num_steps: int | None = None
) -> "Profiler":
    """What the loop drives: one that records where this worker is asked to, else one that does nothing.

    `num_steps`: the run's last step, after which nothing is recorded, lest its last evaluation be taken for steps.
    """
    if section is None:
        return Profiler()
    if not process.is_first and not _records(section.ranks, process.rank):
        return Profiler()
    tell = observer.event if process.is_first else _tell_in(run_dir)
    return Profiler(_Recorder(section, run_dir / FOLDER, process, tell, num_steps))


def _records(ranks: Sequence[int] | str, rank: int) -> bool:
    return ranks == "all" if isinstance(ranks, str) else rank in ranks


def _beyond(ranks: Sequence[int] | str, world_size: int) -> str | None:
    """That workers are asked for who are not there, in words."""
    beyond = [] if isinstance(ranks, str) else sorted({rank for rank in ranks if rank >= world_size})
    if not beyond:
        return None
    there = f"there are workers 0 to {world_size - 1}" if world_size > 1 else "the only worker is 0"
    nobody = ", so nothing is profiled" if len(beyond) == len(set(ranks)) else ""
    return f"observe.profile.ranks: there is no worker {', '.join(map(str, beyond))}; {there}{nobody}"


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
    """Steps `after` + 1 to `after` + `steps` of this start; the one before them only warms the profiler up.

    The first worker has one also if it is not to record: it speaks for all, who make as many steps.
    """

    def __init__(
        self, section: ProfileSection, folder: Path, process: "Process", tell: Tell, num_steps: int | None
    ) -> None:
        self.rank = process.rank
        self.tell = tell
        self.is_done = False
        self._is_asked = _records(section.ranks, process.rank)
        self._is_first = process.is_first
        self._world_size = process.world_size
        self._device = process.device
        self._section = section
        self._folder = folder
        self._num_steps = num_steps
        self._profile: Any = None
        self._seen = 0
        self._first_step: int | None = None
        self._last_step = 0
        self._began = 0.0
        self._seconds = 0.0

    def after_step(self, step: int) -> bool:
        self._seen += 1
        after, steps = self._section.after, self._section.steps
        if self._seen == 1:
            self._begin()
        if not self._is_asked:
            self.is_done = self._seen >= after + steps
            return False
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
            if self._seen == after + steps or step == self._num_steps:
                return self.close()
            self._profile.step()  # which marks the step in the trace
        return self._seen < after

    def _begin(self) -> None:
        """What an earlier start has left would be taken for this one's: each removes its own, the first all others'."""
        beyond = _beyond(self._section.ranks, self._world_size)
        if self._is_first and beyond is not None:
            self.tell("warning", {"message": beyond})
        for path in self._folder.glob("rank-*"):
            name = _FILE.fullmatch(path.name)
            is_own = name is not None and int(name[1]) == self.rank
            is_nobodys = name is not None and self._is_first and not self._will_record(int(name[1]))
            if is_own or is_nobodys:
                path.unlink(missing_ok=True)

    def _will_record(self, rank: int) -> bool:
        return rank < self._world_size and _records(self._section.ranks, rank)

    def close(self) -> bool:
        """Stop, and write what there is."""
        recorded = 0 if self._first_step is None else self._last_step - self._first_step + 1
        if not self._is_asked or recorded == 0:
            if self._profile is not None:
                self._profile.stop()
            self.is_done = True
            self._tell_what_is_missing(min(max(self._seen - self._section.after, 0), self._section.steps))
            return self._is_asked
        self._write()
        self._tell_what_is_missing(recorded)
        return True

    def _write(self) -> None:
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

    def _tell_what_is_missing(self, recorded: int) -> None:
        """A run that was too short for what was asked."""
        after, steps = self._section.after, self._section.steps
        if not self._is_first or recorded >= steps or not any(map(self._will_record, range(self._world_size))):
            return
        made = f"{self._seen} step{'s were' if self._seen != 1 else ' was'} made"
        message = f"only {recorded} of {steps} steps are profiled" if recorded else "nothing is profiled"
        message += f": {made}, and recording begins after {after}; train longer, or set observe.profile.after lower"
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
