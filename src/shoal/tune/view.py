"""What a person sees while a search goes: a table on a terminal, plain lines elsewhere, or JSON lines on request."""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TextIO, cast

from shoal.core.errors import UserError
from shoal.core.section import one_of
from shoal.core.storage import to_json_line
from shoal.observe.console import Forgiving, format_metric
from shoal.observe.event_words import event_line
from shoal.observe.number_words import counted
from shoal.tune.results import best_trial, counts, saved_share
from shoal.tune.schedulers.moves import at
from shoal.tune.setup import Setup
from shoal.tune.trial import Trial

if TYPE_CHECKING:
    from rich.console import Group

    from shoal.tune.search import Search

_REFRESH_S = 0.5
_MOST_ROWS = 12
_BAR = 8
_WIDEST = 16
"""Characters of a column, at most."""
_WIDE = 1_000


def make_view(
    kind: str, setup: Setup, stream: TextIO | None = None, on_drawn: Callable[[], None] = lambda: None
) -> "TableView | LineView | JsonView | SilentView":
    """`auto` (a table on a terminal, lines elsewhere), `lines`, `json` or `silent`."""
    stream = cast(TextIO, Forgiving(stream or sys.stderr))
    if kind == "json":
        return JsonView(stream)
    if kind == "silent":
        return SilentView()
    if kind == "auto" and stream.isatty():
        return TableView(stream, setup, on_drawn)
    if kind in ("auto", "lines"):
        return LineView(stream, setup)
    raise UserError(f"progress: {kind!r} is not allowed; {one_of(kind, ('auto', 'lines', 'json', 'silent'))}")


def event_words(event: dict[str, Any], setup: Setup) -> str | None:  # noqa: PLR0911 - one return an event
    """An event in words, if a person wants to know."""
    what = event["event"]
    if what == "moves":
        lines = [_move_words(move, setup) for move in event["moves"] if move["move"] != "go"]
        return "\n".join(lines) or None
    if "trial" not in event:
        return None
    name = f"trial {event['trial']}"
    if what == "trial":
        return f"{name}: {config_words(event['config'])}"
    if what == "result":
        values = [_metric_words(o.metric, event["metrics"]) for o in setup.objectives if not o.is_of_end]
        return f"{name} {at(round(event['progress'], 2), setup.unit)}: {'  '.join(values)}"
    if what == "ended":
        reason = f": {event['reason']}" if event.get("reason") else ""
        return f"{name} {event['status']}{reason}"
    if what == "left" and event.get("reason"):
        return f"{name} waits: {event['reason']}"
    if what == "note" and (line := event_line(event["name"], event["fields"])) is not None:
        return f"{name}: {line}"
    return None


def _metric_words(name: str, metrics: dict[str, Any]) -> str:
    return f"{name} {format_metric(name, metrics.get(name))}"


def _move_words(move: dict[str, Any], setup: Setup) -> str:
    if move["move"] == "stop":
        return f"trial {move['trial']} stopped: {move['reason']}"
    then = at(move["progress"], setup.unit)
    return f"trial {move['trial']} takes over from trial {move['from']} {then}: {config_words(move['config'])}"


def config_words(config: dict[str, Any]) -> str:
    """`optim.lr=0.0012 train.global_batch=64`"""
    return " ".join(f"{key}={value_words(value)}" for key, value in config.items())


def value_words(value: Any) -> str:
    """A setting in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def headline(search: "Search") -> str:
    """`7 of 24 trials ended (2 done, 5 stopped), 2 running; best val_accuracy 98.33% by trial 3; 52% saved`"""
    setup, trials = search.setup, search.trials
    found = counts(trials)
    ended = {status: found.pop(status) for status in ("done", "stopped", "failed") if status in found}
    words = f"{sum(ended.values())} of {setup.num_trials} trials ended"
    if ended:
        words += f" ({', '.join(f'{count} {status}' for status, count in ended.items())})"
    if found:
        words += ", " + ", ".join(f"{count} {status}" for status, count in found.items())
    best = best_trial(trials, setup.objective)
    if best is not None:
        value = format_metric(setup.objective.metric, best.value(setup.objective))
        words += f"; best {setup.objective.metric} {value} by trial {best.number}"
    if ended.get("stopped"):
        words += f"; {saved_share(trials, setup):.0%} of all {setup.unit} saved"
    return words


class LineView:
    """A line an event, for logs."""

    def __init__(self, stream: TextIO, setup: Setup) -> None:
        self._stream = stream
        self._setup = setup

    def show(self, search: "Search") -> None:
        """Nothing: the events tell."""

    def event(self, event: dict[str, Any]) -> None:
        """In words."""
        if (words := event_words(event, self._setup)) is not None:
            self.note(words)

    def note(self, words: str) -> None:
        """A line."""
        self._stream.write(words + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to put back."""


class JsonView:
    """Every event of the journal as one JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, search: "Search") -> None:
        """Nothing."""

    def event(self, event: dict[str, Any]) -> None:
        """As in the journal."""
        self._stream.write(to_json_line(event) + "\n")
        self._stream.flush()

    def note(self, words: str) -> None:
        """As a log line."""
        self.event({"time": time.time(), "event": "log", "level": "info", "logger": "shoal", "message": words})

    def close(self) -> None:
        """Nothing to put back."""


class SilentView:
    """Shows nothing."""

    def show(self, search: "Search") -> None:
        """Nothing."""

    def event(self, event: dict[str, Any]) -> None:
        """Nothing."""

    def note(self, words: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing to put back."""


class TableView:
    """The trials that run and those that are best, in a table that stays at the bottom of the terminal."""

    def __init__(self, stream: TextIO, setup: Setup, on_drawn: Callable[[], None] = lambda: None) -> None:
        """`on_drawn`: called when lines that others write would tear the table apart."""
        from rich.console import Console
        from rich.live import Live

        self._setup = setup
        self._console = Console(file=stream, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._on_drawn = on_drawn
        self._is_started = False
        self._is_stop_told = False
        self._next = 0.0

    def show(self, search: "Search") -> None:
        """Draw it anew, twice a second, and when nothing runs any more."""
        if (now := time.monotonic()) < self._next and search.segments:
            return
        self._next = now + _REFRESH_S
        if not self._is_started:
            self._live.start()
            self._is_started = True
            self._on_drawn()
        if search.stopped_by is not None and not self._is_stop_told:
            self._is_stop_told = True
            self.note(f"{search.stopped_by}: trials save after this step and end; once more to stop at once")
        self._live.update(search_table(search, self._console.width), refresh=True)

    def event(self, event: dict[str, Any]) -> None:
        """Ends and what went wrong, as lines above the table."""
        is_shown = event["event"] in ("ended", "note", "moves", "left")
        if is_shown and (words := event_words(event, self._setup)) is not None:
            self.note(words)

    def note(self, words: str) -> None:
        """A line above the table."""
        self._console.print(words, markup=False, overflow="ellipsis", no_wrap=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._is_started:
            self._live.stop()


def search_table(search: "Search", width: int = _WIDE) -> "Group":
    """The headline, and a table: those that run first, then the best of the others; of their settings the first, as
    many as `width` has room for. A table that is too wide would lose its first columns too.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text  # what a user has named or set is no markup

    setup, objective = search.setup, search.setup.objective
    rows = sorted(
        search.trials.values(),
        key=lambda trial: (trial.status != "running", objective.loss(trial.value(objective)), trial.number),
    )
    left_out = [f"and {len(rows) - _MOST_ROWS} more"] if len(rows) > _MOST_ROWS else []
    rows = rows[:_MOST_ROWS]
    columns = [
        ("trial", [str(trial.number) for trial in rows]),
        ("status", [str(trial.status) for trial in rows]),
        (setup.unit, [_bar(trial, search) for trial in rows]),
        *((o.metric, [format_metric(o.metric, trial.value(o)) for trial in rows]) for o in setup.objectives),
    ]
    room = width - sum(_width(*column) for column in columns) - 1
    keys = setup.space.keys
    for index, (name, key) in enumerate(zip(_short_names(keys), keys, strict=True)):
        cells = [value_words(trial.config[key]) if key in trial.config else "" for trial in rows]
        room -= _width(name, cells)
        if room < 0:
            left_out.append(f"no room for {counted(len(keys) - index, 'setting')}")
            break
        columns.append((name, cells))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.collapse_padding = True
    for index, (name, _) in enumerate(columns):
        justify: Literal["left", "right"] = "left" if index < 3 else "right"  # the metrics, and settings
        table.add_column(Text(name), justify=justify, no_wrap=True, overflow="ellipsis", max_width=_WIDEST)
    for index, trial in enumerate(rows):
        style = "red" if trial.status == "failed" else "dim" if trial.status == "stopped" else ""
        table.add_row(*(Text(cells[index]) for _, cells in columns), style=style)
    table.caption = Text("; ".join(left_out)) if left_out else None
    # Not as its title, which would be as narrow as the table.
    return Group(Text(headline(search), style="bold"), table)


def _width(name: str, cells: list[str]) -> int:
    """Of a column, with what is between it and the next."""
    return min(max(map(len, [name, *cells])), _WIDEST) + 2


def _bar(trial: Trial, search: "Search") -> str:
    """How far it is."""
    segment = search.segments.get(trial.number)
    progress = trial.progress
    if segment is not None and search.setup.unit == "steps":
        progress = max(progress, float(segment.step))
    elif segment is not None and segment.steps_per_epoch:
        progress = max(progress, segment.step / segment.steps_per_epoch)
    share = min(progress / search.setup.length_of(trial.config), 1.0)
    return f"{'━' * round(_BAR * share):{_BAR}} {progress:.4g}"


def _short_names(keys: list[str]) -> list[str]:
    """The last part of each field, where that tells them apart."""
    last = [key.rpartition(".")[2] for key in keys]
    return [short if last.count(short) == 1 else key for short, key in zip(last, keys, strict=True)]
