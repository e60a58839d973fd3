"""What a check has found, and in what words."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Level = Literal["pass", "warn", "fail", "skip"]
_WORST_FIRST: tuple[Level, ...] = ("fail", "warn", "pass", "skip")


@dataclass(frozen=True)
class Finding:
    """The end of one check."""

    check: str
    level: Level
    found: str
    """What was seen, also where all is well."""
    advice: str = ""
    """What to do, in a sentence with the command or the field; for `warn` and `fail`."""
    group: str = "machine"
    """`machine`: where the command runs; `nodes`: one machine of the cluster; `cluster`: all of them together."""
    node: str = ""
    """The address of the machine that it is about, in the group `nodes`."""

    def to_record(self) -> dict[str, Any]:
        """For JSON, and for the way from a node."""
        return asdict(self)


def passed(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "pass", found)


def skipped(check: str, why: str) -> Finding:
    """Not looked at."""
    return Finding(check, "skip", why)


def worst(findings: Iterable[Finding]) -> Level:
    """`fail` if anything failed, else `warn` if there is a warning, else `pass`."""
    levels = {finding.level for finding in findings}
    return next((level for level in _WORST_FIRST if level in levels and level != "skip"), "pass")


def in_bytes(size: float) -> str:
    """`12.0 GiB`, `64 MiB`"""
    if size >= 1 << 40:
        return f"{size / (1 << 40):.1f} TiB"
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.0f} MiB"


def in_list(items: Iterable[object], most: int = 4) -> str:
    """`a, b, c and 7 more`"""
    words = [str(item) for item in items]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
