"""How far each sink is, kept in the run's folder: RUN_DIR/track/SINK.json."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.storage import to_json_line, write_atomically

FOLDER = "track"


@dataclass
class Progress:
    """What a sink has taken. By where it goes to, because a run may be sent to more than one server."""

    path: Path
    target: str
    """Where to, without secrets."""
    last: dict[str, int] = field(default_factory=dict)
    """metric -> the last step whose value was taken."""
    ids: dict[str, Any] = field(default_factory=dict)
    """What the sink itself remembers."""
    complete: bool = False
    """Whether all was taken, up to the run's end."""
    problem: str | None = None
    """Why the last attempt failed, in words."""

    @classmethod
    def read(cls, run_dir: Path, sink: str, target: str) -> "Progress":
        """As it was kept; nothing where there is none, or none that can be read."""
        path = run_dir / FOLDER / f"{sink}.json"
        kept = _read(path).get(target)
        kept = kept if isinstance(kept, dict) else {}
        last, ids = (value if isinstance(value := kept.get(name), dict) else {} for name in ("last", "ids"))
        steps = {name: step for name, step in last.items() if isinstance(step, int)}
        problem = kept.get("problem")
        return cls(
            path, target, steps, ids, kept.get("complete") is True, problem if isinstance(problem, str) else None
        )

    def save(self) -> None:
        """Keep it; `OSError` where the disk does not take it, and then the file is as it was."""
        own = {"last": self.last, "ids": self.ids, "complete": self.complete, "problem": self.problem}
        self.path.parent.mkdir(exist_ok=True)
        write_atomically(self.path, to_json_line(_read(self.path) | {self.target: own}) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
