"""What a person sees while a run goes: a bar on a terminal, plain lines elsewhere, or JSON lines on request."""

import sys
import time
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shoal.core.errors import UserError
from shoal.core.section import one_of
from shoal.core.storage import NO_ROOM, to_json_line
from shoal.observe.event_words import event_line
from shoal.observe.records import Report

_REFRESH_S = 0.2
_LINE_EVERY_S = 2.0
_WAIT_EVERY_S = 10.0
_IN_BAR = ("train_loss", "samples_per_s")


def make_console(kind: str, stream: TextIO | None = None) -> "BarConsole | LineConsole | JsonConsole | SilentConsole":
    """`auto` (a bar on a terminal, lines elsewhere), `lines`, `json` or `silent`."""
    stream = cast(TextIO, Forgiving(stream or sys.stderr))
    if kind == "json":
        return JsonConsole(stream)
    if kind == "silent":
        return SilentConsole()
    if kind == "auto" and stream.isatty():
        return BarConsole(Console(file=stream))
    if kind in ("auto", "lines"):
        return LineConsole(stream)
    raise UserError(f"progress: {kind!r} is not allowed; {one_of(kind, ('auto', 'lines', 'json', 'silent'))}")


class Forgiving:
    """A stream whose reader may go away: from then on nothing is shown, and the run goes on. If it leads to a disk that
    is full, what is shown meanwhile is lost, and what comes after it is not."""

    def __init__(self, stream: TextIO) -> None:
        self.stream: TextIO | None = stream

    def write(self, text: str) -> int:
        """As a stream does."""
        if self.stream is not None:
            try:
                return self.stream.write(text)
            except (OSError, ValueError) as error:
                self._look_at(error)
        return len(text)

    def flush(self) -> None:
        """As a stream does."""
        if self.stream is not None:
            try:
                self.stream.flush()
            except (OSError, ValueError) as error:
                self._look_at(error)

    def _look_at(self, error: OSError | ValueError) -> None:
        if not isinstance(error, OSError) or error.errno not in NO_ROOM:
            self.stream = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream or sys.__stderr__, name)


def describe(metrics: dict[str, float], names: tuple[str, ...] = ()) -> str:
    """`train_loss 0.1234  val_accuracy 98.12%`: those of `names`, in their order, and every validation metric."""
    others = [name for name in sorted(metrics) if name.startswith("val_") and name not in names]
    shown = {name: metrics[name] for name in (*names, *others) if name in metrics} if names else metrics
    return "  ".join(f"{name} {format_metric(name, value)}" for name, value in shown.items())


def format_metric(name: str, value: Any) -> str:
    """A number as people read it: accuracies in percent, tiny and huge ones in powers of ten."""
    if not isinstance(value, int | float):
        return "-"
    if name.endswith("accuracy"):
        return f"{value:.2%}"
    if name.endswith("_per_s"):
        return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"
    if value != 0 and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.3g}"
    return f"{value:.4f}"


_SHOWN = ("train_loss", "val_loss", "val_accuracy", "val_perplexity", "lr", "samples_per_s", "tokens_per_s")


class LineConsole:
    """A line now and then, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.num_steps = 0
        self._next_line = 0.0
        self._next_wait = 0.0

    def report(self, report: Report) -> None:
        """At most one line every two seconds, and every evaluation."""
        now = time.perf_counter()
        is_evaluation = any(name.startswith("val_") for name in report.metrics)
        if now >= self._next_line or is_evaluation or report.step == self.num_steps:
            self._next_line = now + _LINE_EVERY_S
            self._write(
                f"step {report.step}/{self.num_steps}  epoch {report.epoch:.2f}  {describe(report.metrics, _SHOWN)}"
            )

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """In words, if a person wants to know; what is waited for is counted down in steps of ten seconds."""
        self.num_steps = fields.get("num_steps", self.num_steps)
        if name == "waiting":
            if (now := time.perf_counter()) < self._next_wait:
                return
            self._next_wait = now + _WAIT_EVERY_S
        if (line := event_line(name, fields)) is not None:
            self._write(line)

    def tick(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to put back."""

    def _write(self, line: str) -> None:
        self.stream.write(line + "\n")
        self.stream.flush()


class JsonConsole:
    """Every report and event as one JSON object a line, for log collectors."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def report(self, report: Report) -> None:
        """As in metrics.jsonl."""
        self._write({"event": "report", **report.to_record()})

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """As in events.jsonl."""
        self._write({"time": time.time(), "event": name, **fields})

    def tick(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to put back."""

    def _write(self, record: dict[str, Any]) -> None:
        self.stream.write(to_json_line(record) + "\n")
        self.stream.flush()


class SilentConsole:
    """Shows nothing."""

    def report(self, report: Report) -> None:
        """Nothing."""

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """Nothing."""

    def tick(self, step: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to put back."""


class BarConsole:
    """A progress bar with step, loss, rate and time left."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            auto_refresh=False,
            expand=True,
        )
        self._task: TaskID | None = None
        self._latest: dict[str, float] = {}
        self._next_refresh = 0.0

    def report(self, report: Report) -> None:
        """Evaluations stay as lines above the bar; the rest is in the bar."""
        self._latest |= report.metrics
        if any(name.startswith("val_") for name in report.metrics):
            words = describe(report.metrics, _SHOWN)
            self._progress.console.print(f"step {report.step}  epoch {report.epoch:.2f}  {words}", highlight=False)
        self._show(report.step)

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """In words above the bar, if a person wants to know."""
        if (line := event_line(name, fields)) is not None:
            self._progress.console.print(line, highlight=False, markup=False)
        if name == "start":
            if self._task is not None:  # the workers were started again
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task("train", total=fields["num_steps"], completed=fields["step"], words="")
            self._progress.start()

    def tick(self, step: int) -> None:
        """Move the bar, a few times a second."""
        if time.perf_counter() >= self._next_refresh:
            self._show(step)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def _show(self, step: int) -> None:
        self._next_refresh = time.perf_counter() + _REFRESH_S
        if self._task is not None:
            words = describe({name: self._latest[name] for name in _IN_BAR if name in self._latest})
            self._progress.update(self._task, completed=step, words=words)
            self._progress.refresh()
