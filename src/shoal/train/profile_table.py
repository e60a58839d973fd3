"""What was profiled, read back. Loads without torch."""

import json
from pathlib import Path
from typing import Any

from shoal.train.profiling import FOLDER


def read_profiles(run_dir: Path) -> list[dict[str, Any]]:
    """What the workers recorded, by rank; what cannot be read is left out."""
    found = []
    for path in sorted((run_dir / FOLDER).glob("rank-*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and isinstance(record.get("operators"), list) and "steps" in record:
            found.append(record)
    return found


def operator_table(record: dict[str, Any], most: int = 12) -> list[list[str]]:
    """The hottest operators of a worker in rows of text, the first one a heading; times are of one step."""
    first, last = record["steps"]
    steps = last - first + 1
    on_gpu = any(row["self_device_s"] for row in record["operators"])
    which = "device" if on_gpu else "cpu"
    total_s = record["seconds"]
    rows = [[f"worker {record['rank']}, {record['device']}", "ms a step", "share", "with callees", "calls a step"]]
    for row in record["operators"][:most]:
        own_s, all_s = row[f"self_{which}_s"], row[f"{which}_s"]
        rows.append(
            [
                _short(row["name"]),
                f"{1e3 * own_s / steps:.3f}",
                f"{own_s / total_s:.1%}" if total_s else "",
                f"{1e3 * all_s / steps:.3f}",
                f"{row['calls'] / steps:g}" if row["calls"] % steps == 0 else f"{row['calls'] / steps:.1f}",
            ]
        )
    return rows


def _short(name: str, most: int = 60) -> str:
    """Names of generated code may be as long as a page."""
    return name if len(name) <= most else name[: most - 3] + "..."
