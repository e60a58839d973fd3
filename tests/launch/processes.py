"""Looking at processes that are not our children."""

import time
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether it runs; one that has ended and is not yet reaped does not."""
    return _stat(pid)[:1] not in ([], ["Z"])


def parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def wait_until_dead(*pids: int, within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes {left} are still there"


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
