"""The workers of a run as a table: what each does with its time, and what it uses."""

from collections.abc import Callable, Sequence

from rich.text import Text

from shoal.observe.monitor.facts import Facts
from shoal.observe.monitor.lines import fit, order, stretches, title
from shoal.observe.monitor.look import Look
from shoal.observe.monitor.worker_rows import Worker, some_of
from shoal.observe.number_words import share, size

_MARK = " ◀ slowest"


def workers(facts: Facts, width: int, height: int, look: Look) -> list[Text]:
    """A title, and a line a worker as far as there is room."""
    rows = some_of(facts.workers, height - 2)
    words = "workers"
    if len(rows) < len(facts.workers):
        which = "slowest, median, fastest" if len(rows) >= 3 else "the slowest"
        words += f": {len(rows)} of {len(facts.workers)} ({which}); {len(facts.workers) - len(rows)} left out"
    columns = _columns(facts.workers, width)
    heading = Text(f"{'rank':>4}  ", no_wrap=True)
    for name, column_width, _ in columns:
        heading.append(f"{name:>{column_width}}  ")
    heading.append("where its time goes" + _untold(facts))
    heading.stylize("dim")
    return [
        title(words, width, look),
        fit(heading, width, look),
        *(_row(worker, columns, width, look) for worker in rows),
    ]


def _untold(facts: Facts) -> str:
    """What to say where only who they are is known."""
    if any(worker.shares for worker in facts.workers):
        return ""
    return f": not {'told yet' if facts.status == 'running' else 'known'} (see observe.workers_every_s)"


_Column = tuple[str, int, Callable[[Worker], str]]


def _columns(all_workers: Sequence[Worker], width: int) -> list[_Column]:
    """Those that say something and leave room for the bar, the least important left out first."""
    hosts = {worker.host for worker in all_workers}
    host_width = min(max((len(host) for host in hosts), default=0), 20)
    wanted: list[tuple[bool, _Column]] = [
        (any(worker.own_share for worker in all_workers), ("busy", 4, lambda worker: share(worker.own_share))),
        (_has(all_workers, "gpu_busy"), ("gpu", 4, lambda worker: _share_of(worker, "gpu_busy"))),
        (_has(all_workers, "gpu_memory_bytes"), ("gpu mem", 7, lambda worker: _size_of(worker, "gpu_memory_bytes"))),
        (_has(all_workers, "cpu_cores"), ("cores", 5, lambda worker: _number_of(worker, "cpu_cores", ".2f"))),
        (_has(all_workers, "memory_bytes"), ("memory", 6, lambda worker: _size_of(worker, "memory_bytes"))),
        (len(hosts) > 1, ("host", max(host_width, 4), lambda worker: worker.host[:20])),
        (_has(all_workers, "gpu_celsius"), ("gpu C", 5, lambda worker: _number_of(worker, "gpu_celsius", ".0f"))),
        (_has(all_workers, "gpu_power_w"), ("gpu W", 5, lambda worker: _number_of(worker, "gpu_power_w", ".0f"))),
        (
            width >= 140 and _has(all_workers, "net_sent_bytes_per_s"),
            ("net out/s", 9, lambda worker: _size_of(worker, "net_sent_bytes_per_s")),
        ),
        (
            width >= 140 and _has(all_workers, "disk_read_bytes_per_s"),
            ("disk in/s", 9, lambda worker: _size_of(worker, "disk_read_bytes_per_s")),
        ),
    ]
    kept: list[_Column] = []
    room = width - 6 - 20 - len(_MARK)
    for is_known, column in wanted:
        if is_known and room >= column[1] + 2:
            kept.append(column)
            room -= column[1] + 2
    return kept


def _row(worker: Worker, columns: Sequence[_Column], width: int, look: Look) -> Text:
    line = Text(f"{worker.rank:>4}  ", no_wrap=True)
    for _, column_width, say in columns:
        line.append(f"{look.text(say(worker)):>{column_width}}  ")
    room = min(max(width - line.cell_len - len(_MARK), 4), 60)
    shown = {phase: worker.shares[phase] for phase in sorted(worker.shares, key=order)}
    parts = stretches(shown, room)
    for phase, stretch in parts.items():
        fill, style = look.thin(phase)
        line.append(fill * stretch, style)
    if worker.is_slowest:
        line.append(" " * (room - sum(parts.values())))
        line.append(f" {look('◀')} slowest", "bold")
    return fit(line, width, look)


def _has(all_workers: Sequence[Worker], name: str) -> bool:
    return any(name in worker.system for worker in all_workers)


def _share_of(worker: Worker, name: str) -> str:
    return share(worker.system[name]) if name in worker.system else "-"


def _size_of(worker: Worker, name: str) -> str:
    return size(worker.system[name]) if name in worker.system else "-"


def _number_of(worker: Worker, name: str, form: str) -> str:
    return f"{worker.system[name]:{form}}" if name in worker.system else "-"
