"""A whole frame: what is shown in a terminal of a given size, and what is left out of a small one."""

from rich.text import Text

from shoal.observe.monitor import panels
from shoal.observe.monitor.facts import Facts
from shoal.observe.monitor.lines import beside
from shoal.observe.monitor.look import Look
from shoal.observe.monitor.worker_table import workers

_BESIDE = 150
"""Columns from which on workers and events stand side by side."""
_MORE = (
    *(("verdict", 3), ("phases", 2), ("curves", 7), ("events", 4), ("workers", 6), ("curves", 8), ("pair", 8)),
    *(("gaps", 9), ("curves", 12), ("workers", 10), ("events", 9), ("pair", 12), ("verdict", 4), ("curves", 28)),
    *(("workers", 40), ("events", 20), ("pair", 40), ("curves", 40)),
)
"""Which parts grow with what the least leaves, and up to how many lines, in this order."""


def frame(facts: Facts, width: int, height: int, look: Look, is_live: bool = True) -> list[Text]:
    """At most `height` lines of at most `width` columns."""
    width, height = max(width, 1), max(height, 1)
    rows = _share_out(facts, width, height)
    lines = panels.header(facts, width, look, is_live)
    if rows["verdict"]:
        lines += panels.verdict(facts, width, rows["verdict"], look)
    if rows["rates"]:
        lines += panels.rates(facts, width, look)
    if rows["phases"]:
        lines += panels.phases(facts, width, rows["phases"], look)
    if rows["checkpoint"]:
        lines += panels.checkpoint(facts, width, look)
    if rows["account"]:
        lines += panels.account(facts, width, look)
    for part in _blocks(facts, width, rows, look):
        lines += [Text("")] * (rows["gaps"] > 0) + part
    return lines[:height]


def _blocks(facts: Facts, width: int, rows: dict[str, int], look: Look) -> list[list[Text]]:
    blocks = []
    if rows["curves"]:
        blocks.append(panels.curves(facts, width, rows["curves"], look))
    if rows["pair"]:
        left = width * 11 // 20
        pair = [workers(facts, left, rows["pair"], look), panels.events(facts, width - left - 2, rows["pair"], look)]
        blocks.append(beside(pair, [left, width - left - 2], look))
    if rows["workers"]:
        blocks.append(workers(facts, width, rows["workers"], look))
    if rows["events"]:
        blocks.append(panels.events(facts, width, rows["events"], look))
    return blocks


def _share_out(facts: Facts, width: int, height: int) -> dict[str, int]:
    """Lines for each part: first the least that each needs, the most important first, then more for some."""
    num_curves, all_workers, all_events = len(panels.curve_names(facts)), len(facts.workers) + 2, len(facts.events) + 1
    is_pair = width >= _BESIDE and all_workers > 2 and all_events > 1
    least = {
        "verdict": 1,
        "curves": 5 if num_curves else 2,
        "phases": 1,
        "rates": 1,
        "checkpoint": 1,
        "account": 1 if facts.goodput is not None or facts.cost is not None else 0,
        "pair": min(max(all_workers, all_events), 5) if is_pair else 0,
        "workers": min(all_workers, 5) if all_workers > 2 and not is_pair else 0,
        "events": min(all_events, 2) if all_events > 1 and not is_pair else 0,
    }
    rows, room = dict.fromkeys([*least, "gaps"], 0), height - 2
    for name, needed in least.items():
        if needed > room:
            break
        rows[name] = needed
        room -= needed
    most = {
        "verdict": len(panels.verdict(facts, width, 4, Look())),
        "phases": len(panels.phases(facts, width, 2, Look())),
        "pair": max(all_workers, all_events),
        "workers": all_workers,
        "events": all_events,
        "curves": 2 if not num_curves else 24 if num_curves < 4 else 40,
        "gaps": sum(rows[name] > 0 for name in ("curves", "workers", "events", "pair")),
    }
    for name, up_to in _MORE:
        more = min(room, min(up_to, most[name]) - rows[name])
        if (rows[name] or name == "gaps") and more > 0:
            if name == "gaps" and more < most["gaps"]:
                continue
            rows[name] += more
            room -= more
    return rows
