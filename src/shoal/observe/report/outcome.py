"""How a run went, in numbers: the same on its page, side by side with others, in the terminal and for scripts."""

from typing import Any

from shoal.observe.ledger import LABELS
from shoal.observe.phases import STEPPING
from shoal.observe.report.folder import Folder, number
from shoal.observe.report.series import first_step, phase_totals
from shoal.observe.report.story import stretches_of, wall_s


def outcome_of(folder: Folder) -> dict[str, Any]:
    """What `shoal runs show --json` and `compare --json` tell besides what is in the run's files; None: not known."""
    verdict = verdict_of(folder) or {}
    return {
        "wall_s": round(wall_s(stretches_of(folder)), 1),
        "time_to_first_step_s": number(folder.run.summary.get("time_to_first_step_s")),
        "samples_per_s": rate_of(folder, "samples_per_s"),
        "tokens_per_s": rate_of(folder, "tokens_per_s"),
        "goodput": goodput_of(folder),
        "cost": cost_of(folder),
        "bottleneck": verdict.get("bottleneck"),
        "verdict": "; ".join(part for part in (verdict.get("words"), verdict.get("advice")) if part) or None,
    }


def verdict_of(folder: Folder) -> dict[str, Any] | None:
    """What held the run up, and what to try: the last word on it, or of a run that goes on the newest."""
    ended = folder.run.status not in ("running", "stopped")
    lines = [line for line in folder.workers if isinstance(line.get("verdict"), str)]
    found = folder.run.summary if ended else {}
    if not isinstance(found.get("verdict"), str):
        found = lines[-1] if lines else folder.run.summary
    words = found.get("verdict")
    if not isinstance(words, str):
        return None
    advice = found.get("advice")
    if not isinstance(advice, str):
        words, _, advice = words.partition("; ")
    bottleneck = found.get("bottleneck")
    return {
        "words": words,
        "advice": advice or None,
        "bottleneck": bottleneck if isinstance(bottleneck, str) else None,
        "is_final": found is folder.run.summary and ended,
    }


def rate_of(folder: Folder, metric: str) -> float | None:
    """The mean: as the summary has it; where that tells of a part of the run only, over its reports by the seconds that
    steps took."""
    has_ended = folder.run.status not in ("running", "stopped")
    is_whole = has_ended and sum(event["event"] == "start" for event in folder.events) == 1
    if is_whole and (told := number(folder.run.summary.get(metric))) is not None:
        return told
    done = stepped_s = waiting_s = 0.0
    for report, spent in zip(folder.reports, folder.seconds, strict=True):
        waiting_s += sum(max(spent.get(phase, 0.0), 0.0) for phase in STEPPING)
        if (rate := number(report["metrics"].get(metric))) is not None:
            done, stepped_s, waiting_s = done + rate * waiting_s, stepped_s + waiting_s, 0.0
    return round(done / stepped_s, 2) if stepped_s > 0 else None


def goodput_of(folder: Folder) -> float | None:
    """By the ledger; by the summary of a run whose reports have no times."""
    if folder.has_times and folder.ledger.worker_s > 0:
        return round(folder.ledger.goodput, 4)
    return number(folder.run.summary.get("goodput"))


def cost_of(folder: Folder) -> float | None:
    """What all worker time cost."""
    price = folder.price_per_hour
    return None if price is None else round(folder.ledger.cost(price)["total"], 4)


def ledger_of(folder: Folder) -> dict[str, Any] | None:
    """Worker-seconds by what they went to; None for a run of which no start is recorded."""
    ledger, price = folder.ledger, folder.price_per_hour
    if ledger.worker_s <= 0:
        return None
    money = {} if price is None else ledger.cost(price)
    rows = [
        {"name": name, "label": LABELS[name], "seconds": round(seconds, 3), "cost": money.get(name)}
        for name, seconds in ledger.seconds.items()
        if seconds > 0
    ]
    missing = ledger.unaccounted_s
    return {
        "rows": rows,
        "worker_s": round(ledger.worker_s, 3),
        "unaccounted_s": round(missing, 3),
        "unaccounted_cost": None if price is None else missing / 3600 * price,
        "cost": money.get("total"),
        "price_per_hour": price,
        "has_times": folder.has_times or not folder.reports,
    }


def phases_of(folder: Folder) -> list[dict[str, Any]]:
    """What a worker did, the mean over them: seconds by phase, their share of all, and of a step where it is one."""
    totals = phase_totals(folder)
    whole_s, steps = sum(totals.values()), max(folder.run.step - first_step(folder), 0)
    return [
        {
            "phase": phase,
            "seconds": seconds,
            "share": round(seconds / whole_s, 5),
            "step_s": float(f"{seconds / steps:.4g}") if phase in STEPPING and steps else None,
        }
        for phase, seconds in totals.items()
    ]
