"""What a page tells besides its curves: checkpoints, environment, profiles."""

from pathlib import Path
from typing import Any
from urllib.parse import quote

from shoal.observe.report.folder import Folder, number, numbers, read_object
from shoal.observe.report.thin import rounded

_MOST_CHECKPOINTS = 300
_MOST_OPERATORS = 40
_MOST_PROFILES = 16


def checkpoints_of(folder: Folder) -> dict[str, Any]:
    """Every save, the newest first, with what became of it."""
    saves = {event["step"]: event for event in folder.events if event["event"] == "save" and _is_step(event)}
    uploaded = {event["step"] for event in folder.events if event["event"] == "upload" and _is_step(event)}
    there = _on_disk(folder.path)
    steps = sorted({*saves, *there}, reverse=True)
    metric = folder.recipe("checkpoint.metric")
    values = _values_at(folder, metric) if isinstance(metric, str) else {}
    return {
        "metric": metric if values else None,
        "rows": [
            {
                "step": step,
                "time": rounded(time - folder.began, 6) if (time := _time(saves.get(step, {}))) is not None else None,
                "bytes": number(saves.get(step, {}).get("bytes")),
                "stall_s": number(saves.get(step, {}).get("stall_s")),
                "seconds": number(saves.get(step, {}).get("seconds")),
                "value": values.get(step),
                "on_disk": step in there,
                "uploaded": step in uploaded,
            }
            for step in steps[:_MOST_CHECKPOINTS]
        ],
        "count": len(steps),
        "uploads": bool(uploaded) or folder.recipe("checkpoint.upload_to") is not None,
        "stall_s": round(sum(number(save.get("stall_s")) or 0.0 for save in saves.values()), 3),
    }


def _is_step(event: dict[str, Any]) -> bool:
    return isinstance(event.get("step"), int) and event["step"] >= 0


def _time(event: dict[str, Any]) -> float | None:
    return number(event.get("time"))


def _on_disk(path: Path) -> set[int]:
    names = [manifest.parent.name for manifest in (path / "checkpoints").glob("step-*/manifest.json")]
    return {int(name[5:]) for name in names if name[5:].isascii() and name[5:].isdigit()}


def _values_at(folder: Folder, metric: str) -> dict[int, float]:
    told = [report for report in folder.reports if metric in report["metrics"]]
    found = ((report["step"], number(report["metrics"][metric])) for report in told)
    return {step: value for step, value in found if value is not None}


def environment_of(folder: Folder) -> list[tuple[str, str]]:
    """What is recorded of where the run ran."""
    start, rows = folder.start, []
    newest = max(_on_disk(folder.path), default=None)
    if newest is not None:
        versions = read_object(folder.path / "checkpoints" / f"step-{newest:08d}" / "manifest.json").get("versions")
        if isinstance(versions, dict):
            rows += [(str(name), str(version)) for name, version in versions.items()]
    rows += [("devices", words) for words in [_devices(folder)] if words]
    for name, label in _START_FACTS.items():
        value = start.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            rows.append((label, f"{value:,}" if isinstance(value, int) else value))
    started = numbers(start.get("startup_s"))
    if started:
        rows.append(("start-up, seconds since asked", ", ".join(f"{name} {s:.1f}" for name, s in started.items())))
    rows.append(("folder", str(folder.path.absolute())))
    if isinstance(sha := folder.run.summary.get("weights_sha256"), str):
        rows.append(("weights, SHA-256", sha))
    return rows


_START_FACTS = {
    "strategy": "strategy",
    "numerics": "numerics",
    "parameters": "parameters",
    "train_samples": "training samples",
    "global_batch": "global batch",
    "micro_batch": "micro-batch",
    "accumulation": "micro-batches a step",
}


def _devices(folder: Folder) -> str:
    """`2 NVIDIA H200 on node-1, 1 cpu on node-2`."""
    listed = next((e.get("workers") for e in reversed(folder.events) if e["event"] == "workers"), None)
    counts: dict[str, int] = {}
    for worker in listed if isinstance(listed, list) else []:
        if isinstance(worker, dict):
            what = f"{worker.get('device_name') or worker.get('device')} on {worker.get('host') or 'an unknown host'}"
            counts[what] = counts.get(what, 0) + 1
    shown = [f"{count} {what}" for what, count in counts.items()]
    return ", ".join(shown[:20]) + (f" and {len(shown) - 20} more" if len(shown) > 20 else "")


def profiles_of(folder: Folder, target: Path) -> list[dict[str, Any]]:
    """The hottest operators of what `shoal train --profile` recorded, with a link to the trace that lies beside it."""
    found = []
    for path in sorted((folder.path / "profile").glob("*.json"))[: 4 * _MOST_PROFILES]:
        record = read_object(path)
        operators = record.get("operators")
        if not isinstance(operators, list):
            continue
        known = [operator for operator in operators if isinstance(operator, dict) and operator.get("name")]
        told = record.get("steps")
        steps = [step for step in told if isinstance(step, int)] if isinstance(told, list) else []
        seconds = number(record.get("seconds"))
        trace = _trace(record, path)
        is_beside = target.parent.resolve() == folder.path.resolve()
        found.append(
            {
                "rank": record.get("rank") if isinstance(record.get("rank"), int) else None,
                "device": record.get("device") if isinstance(record.get("device"), str) else None,
                "steps": steps,
                "seconds": seconds,
                "operators": _operators(known, max(steps[-1] - steps[0] + 1, 1) if steps else 1, seconds),
                "count": len(known),
                "trace": trace,
                "link": f"profile/{quote(trace)}" if trace and is_beside else None,
            }
        )
    return found[:_MOST_PROFILES]


def _operators(known: list[dict[str, Any]], steps: int, seconds: float | None) -> list[dict[str, Any]]:
    """The same columns as in the terminal (`train.profile_table`), by what each took itself: of the GPU where one was
    used, else of the CPU."""
    rows = [(numbers(operator), str(operator["name"])[:200]) for operator in known]
    which = "device" if any(values.get("self_device_s") for values, _ in rows) else "cpu"
    other = "cpu" if which == "device" else "device"
    rows.sort(key=lambda row: (-row[0].get(f"self_{which}_s", 0.0), -row[0].get(f"self_{other}_s", 0.0)))
    return [
        {
            "name": name,
            "own_s": rounded(own_s / steps) if (own_s := values.get(f"self_{which}_s")) is not None else None,
            "share": rounded(own_s / seconds) if own_s is not None and seconds else None,
            "all_s": rounded(all_s / steps) if (all_s := values.get(f"{which}_s")) is not None else None,
            "calls": rounded(calls / steps) if (calls := values.get("calls")) is not None else None,
        }
        for values, name in rows[:_MOST_OPERATORS]
    ]


def _trace(record: dict[str, Any], path: Path) -> str | None:
    """The name of the trace's file: as the record tells, or the file beside it whose name begins alike."""
    told = record.get("trace")
    if isinstance(told, str) and told:
        return Path(told).name
    others = [other.name for other in path.parent.glob("*") if other != path and other.name.startswith(path.stem)]
    return min((name for name in others if "trace" in name or name.endswith(".gz")), default=None)
