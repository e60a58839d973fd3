"""The parts of a frame. Each is a function of facts and room to lines; none is wider or longer than it may be."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from shoal.core.metrics import direction
from shoal.observe.console import format_metric
from shoal.observe.event_words import event_time, event_words, one_line
from shoal.observe.monitor.chart import chart
from shoal.observe.monitor.facts import Facts
from shoal.observe.monitor.lines import LABEL, beside, fit, labelled, order, stretches, title
from shoal.observe.monitor.look import Look
from shoal.observe.number_words import amount, counted, duration, share, short_time, size

_STATUS_STYLES = {"running": "bold cyan", "done": "bold", "failed": "bold reverse"}
_KEYS = "q quits"
_LEGIBLE = (38, 13)
"""The least columns of a chart, and lines from which on a second row of them is worth more than taller ones."""
_MOMENTS = 8
"""Events that are still fresh."""
_ALARMING = ("failure", "failed", "hang", "save_failed", "upload_failed", "checkpoint_rejected")


def header(facts: Facts, width: int, look: Look, is_live: bool = False) -> list[Text]:
    """Who and how far: two lines; while it is live, with the key that ends it."""
    first = Text.assemble((look.text(facts.run), "bold"), "  ", no_wrap=True)
    first.append(facts.status, _STATUS_STYLES.get(facts.status, "bold"))
    size_words = "" if facts.world_size is None else counted(facts.world_size, "worker")
    about = [words for words in (facts.strategy, size_words, facts.device) if words]
    if facts.restarts:
        about.append(counted(facts.restarts, "restart"))
    if facts.status == "stopped" or (facts.status == "running" and facts.silent_s > 60):
        about.insert(0, f"silent for {duration(facts.silent_s)}")
    if about:
        first.append("  " + f" {look('·')} ".join(look.text(words) for words in about))
    if facts.read_share < 1:
        first.append(f"  reading {facts.read_share:.0%}", "dim")
    if is_live and first.cell_len + 2 + len(_KEYS) <= width:
        first.pad_right(width - first.cell_len - len(_KEYS))
        first.append(_KEYS, "dim")
    return [fit(first, width, look), _progress(facts, width, look)]


def _progress(facts: Facts, width: int, look: Look) -> Text:
    if not facts.step and facts.waits_s is not None:
        return fit(Text(f"getting ready ... {duration(facts.waits_s)}"), width, look)
    of = f"/{facts.num_steps:,}" if facts.num_steps else ""
    left = Text(f"step {facts.step:,}{of}  ", no_wrap=True)
    words = []
    done = min(facts.step / facts.num_steps, 1.0) if facts.num_steps else None
    if done is not None:
        words.append(f"{int(done * 100)}%")
    if facts.epoch is not None:
        words.append(f"epoch {facts.epoch:.2f}" + (f"/{facts.epochs:g}" if facts.epochs else ""))
    if facts.elapsed_s is not None:
        words.append(f"{duration(facts.elapsed_s)} elapsed")
    if facts.waits_s is not None:
        words.append(f"starting again ... {duration(facts.waits_s)}")
    elif facts.status == "running" and facts.num_steps:
        words.append("time left not known yet" if facts.left_s is None else f"about {duration(facts.left_s)} left")
    right = Text("  " + "  ".join(words) if done is not None else "  ".join(words))
    room = width - left.cell_len - right.cell_len
    if done is not None and room >= 8:
        left.append(_bar_of(done, min(room, 80), look))
    return fit(left + right, width, look)


def _bar_of(done: float, width: int, look: Look) -> Text:
    filled = int(done * width)
    return Text.assemble((look("━") * filled, "cyan"), (look("─") * (width - filled), "dim"))


def verdict(facts: Facts, width: int, height: int, look: Look) -> list[Text]:
    """What holds the run up and what to do about it; of a failed run, the error."""
    if facts.status == "failed":
        return labelled("error", Text(one_line(facts.error) or "no word why"), width, height, look)
    words = one_line(facts.verdict) or "not known yet"
    evidence, _, advice = words.partition("; ")
    text = Text(evidence)
    if advice:
        text.append(f"; {advice}", "italic" if look.has_colours else "")
    return labelled("verdict", text, width, height, look)


def rates(facts: Facts, width: int, look: Look) -> list[Text]:
    """How fast now, and over the run."""
    names = sorted(facts.rates, key=lambda name: (not name.startswith("tokens"), name))
    parts: list[str] = []
    for name in names[:2]:
        rate, unit = facts.rates[name], one_line(name).removesuffix("_per_s")
        against = round(100 * (rate.now / rate.mean - 1)) if rate.mean > 0 else 0
        words = f"{amount(rate.now)} {unit}/s now, {amount(rate.mean)} over the run ({against:+d}%)"
        if facts.status != "running":
            words = f"{amount(rate.mean)} {unit}/s over the run, {amount(rate.now)} in its last minute ({against:+d}%)"
        if not parts or len(parts[0] + words) + 3 <= width - LABEL:
            parts.append(words)
    return labelled("rate", Text("   ".join(parts) or "-"), width, 1, look)


def phases(facts: Facts, width: int, height: int, look: Look) -> list[Text]:
    """Where the time goes: a bar with words in it and, for what is too short for them, a second line."""
    if not facts.phases:
        return labelled("phases", Text("-"), width, 1, look)
    shown = {name: facts.phases[name] for name in sorted(facts.phases, key=order) if facts.phases[name] >= 0.0005}
    over = Text(f"  {_over(facts)}", "dim")
    parts = stretches(shown, width - LABEL - over.cell_len)
    bar, unnamed = Text("", no_wrap=True), list[str]()
    for name, stretch in parts.items():
        words = f" {one_line(name)} {share(shown[name])} "
        fits = len(words) <= stretch
        bar.append(words.center(stretch, look.phase_fill(name)) if fits else look.phase_fill(name) * stretch)
        bar.stylize(look.phase_style(name), len(bar) - stretch)
        unnamed += [] if fits else [name]
    lines = labelled("phases", bar + over, width, 1, look)
    return lines + (_legend({name: shown[name] for name in unnamed}, width, look) if unnamed and height > 1 else [])


def _legend(shares: dict[str, float], width: int, look: Look) -> list[Text]:
    """What else is in a bar, without the smallest where there is no room for all."""
    while True:
        legend = Text("", no_wrap=True)
        for name, value in shares.items():
            legend.append(look.phase_fill(name), look.phase_style(name))
            legend.append(f" {one_line(name)} {share(value)}  ")
        legend.rstrip()
        if legend.cell_len <= width - LABEL or len(shares) < 2:
            return labelled("", legend, width, 1, look)
        shares = {name: value for name, value in shares.items() if value > min(shares.values())}


def _over(facts: Facts) -> str:
    return "whole run" if facts.status in ("done", "failed", "interrupted") else f"last {duration(facts.phases_over_s)}"


def checkpoint(facts: Facts, width: int, look: Look) -> list[Text]:
    """The newest one."""
    found = facts.last_checkpoint
    if found is None:
        words = Text("none yet")
    else:
        words = Text(f"step {found.step:,}, {duration(found.age_s)} ago, {size(found.size_bytes)}")
        words.append(f", stall {short_time(found.stall_s)}, written in {short_time(found.seconds)}")
    if facts.saving_fails:
        words = Text("saving fails: " + one_line(facts.saving_fails) + "; ", "bold") + words
    return labelled("checkpoint", words, width, 1, look)


def account(facts: Facts, width: int, look: Look) -> list[Text]:
    """Goodput and cost, where they are known."""
    parts = []
    if facts.goodput is not None:
        parts.append(f"{facts.goodput:.1%} of worker time in steps")
    if facts.cost is not None:
        at_end = f", about {facts.cost_at_end:,.2f} at the end" if facts.cost_at_end is not None else ""
        parts.append(f"cost {facts.cost:,.2f}{at_end}")
    return labelled("goodput", Text("   ".join(parts) or "-"), width, 1, look)


def curve_names(facts: Facts) -> list[str]:
    """Those worth a chart, the most telling first."""
    names = [name for name in facts.curves if facts.curves[name].last is not None]
    validated = sorted(
        (name for name in names if name.startswith("val_")),
        key=lambda name: (name != facts.watched, name != "val_loss", name),
    )
    first = [name for name in ("train_loss", *validated) if name in names]
    others = sorted(name for name in names if name not in first and name.startswith("train_"))
    return first + others + [name for name in ("lr", "grad_norm", "samples_per_s") if name in names]


def curves(facts: Facts, width: int, height: int, look: Look) -> list[Text]:
    """Charts side by side, as many as are legible, in one row or two."""
    names = curve_names(facts)
    if not names:
        words = "no reports yet" if facts.status == "running" else "no reports"
        return [title("curves", width, look), fit(Text(f"  {words}", "dim"), width, look)]
    rows = 2 if height >= 2 * _LEGIBLE[1] and len(names) > 3 else 1
    across = max(1, min(-(-len(names) // rows), width // _LEGIBLE[0]))
    lines: list[Text] = []
    for row in range(rows):
        in_row = names[row * across : (row + 1) * across]
        tall = height // rows
        each = (width - 2 * (len(in_row) - 1)) // max(len(in_row), 1)
        lines += beside([_curve(facts, name, each, tall, look) for name in in_row], [each] * len(in_row), look)
    return lines


def _curve(facts: Facts, name: str, width: int, height: int, look: Look) -> list[Text]:
    curve = facts.curves[name]
    assert curve.last is not None and curve.lowest is not None and curve.highest is not None
    words = f"{one_line(name)} {format_metric(name, curve.last[1])}"
    wanted = direction(name)
    if wanted is not None and name != "train_loss":
        step, best = curve.lowest if wanted == "min" else curve.highest
        more = f", best {format_metric(name, best)} at {step:,}"
        words += more if len(words + more) < width else ""
    drawn = chart(name, curve.points(), width, height - 1, look)
    return [title(words, width, look), *(Text(line, no_wrap=True) for line in drawn)]


def events(facts: Facts, width: int, height: int, look: Look) -> list[Text]:
    """The newest ones, the last below."""
    words = "events"
    if facts.num_failures or facts.restarts:
        words += f": {counted(facts.num_failures, 'failure')}"
        words += f", {counted(facts.restarts, 'restart')}"
    lines = [title(words, width, look)]
    for event in newest(facts.events, height - 1):
        line = Text.assemble((f"{event_time(event, facts.clock)}  ", "dim"), no_wrap=True)
        line.append(look.text(event_words(event)), "bold" if event.get("event") in _ALARMING else "")
        lines.append(fit(line, width, look))
    return lines


def newest(all_events: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """The last ones; where there is no room for a failure of a moment ago, it takes the place of what is less."""
    if most < 1:
        return []
    shown = list(all_events[-most:])
    alarms = [event for event in all_events[-_MOMENTS:] if event.get("event") in _ALARMING]
    if alarms and not any(event.get("event") in _ALARMING for event in shown):
        shown[0] = alarms[-1]
    return shown
