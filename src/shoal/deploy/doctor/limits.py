"""What this process may take of its machine: files, processes, locked memory, memory, cores."""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from shoal.core.machine import machine_memory, usable_cores
from shoal.deploy.doctor.finding import Finding, Level, in_bytes, passed, skipped

FILES_LOW, FILES_TOO_LOW = 8192, 1024
"""Ray asks for the first; with fewer than the second, a run with several workers fails."""
PROCESSES_LOW, PROCESSES_TOO_LOW = 4096, 256
"""Threads count: a Ray and a few workers have some thousand."""
MEMORY_LOW_BYTES, MEMORY_TOO_LOW_BYTES = 4 << 30, 1 << 30
"""torch and Ray take more than the second before there is a model."""
SWAPPED_BYTES = 1 << 30
_ENDLESS = resource.RLIM_INFINITY
_ROOT = Path("/")


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    limit: int
    """What this container or machine may take."""
    available: int
    swap: int = 0
    swap_used: int = 0


def judge_open_files(soft: int, hard: int) -> Finding:
    """`ulimit -n`. Ray raises the first limit to the second by itself."""
    most = _in_words(hard)
    found = f"{_in_words(soft)} at a time" if soft == hard else f"{_in_words(soft)} at a time, up to {most}"
    if hard == _ENDLESS or hard >= FILES_LOW:
        return passed("open files", found)
    advice = "raise the limit: ulimit -n 65536, LimitNOFILE= of the service, or docker run --ulimit nofile=65536"
    return Finding("open files", "fail" if hard < FILES_TOO_LOW else "warn", found, advice)


def judge_processes(limit: int, of_group: int | None) -> Finding:
    """`ulimit -u` and the container's limit, whichever is lower; -1 is none."""
    limits = [one for one in (limit, of_group) if one is not None and one != _ENDLESS]
    if not limits:
        return passed("processes", "no limit")
    least = min(limits)
    found = f"{least:,} processes and threads"
    if least >= PROCESSES_LOW:
        return passed("processes", found)
    advice = "raise it: ulimit -u, docker run --pids-limit, or podPidsLimit of the kubelet"
    return Finding("processes", "fail" if least < PROCESSES_TOO_LOW else "warn", found, advice)


def judge_locked_memory(limit: int, devices: list[str]) -> Finding:
    """`ulimit -l`, which InfiniBand needs to be without end."""
    if not devices:
        return skipped("locked memory", "no InfiniBand here")
    found = f"{', '.join(devices)}; may lock {'all' if limit == _ENDLESS else in_bytes(limit)} of the memory"
    if limit == _ENDLESS:
        return passed("locked memory", found)
    advice = "ulimit -l unlimited, docker run --ulimit memlock=-1, or nccl.infiniband=false to do without"
    return Finding("locked memory", "fail" if limit < 1 << 30 else "warn", found, advice)


def judge_memory(memory: Memory) -> Finding:
    """What is left, and whether the machine swaps."""
    swap = f", {in_bytes(memory.swap_used)} of {in_bytes(memory.swap)} swap used" if memory.swap else ", no swap"
    found = f"{in_bytes(memory.available)} of {in_bytes(memory.limit)} free{swap}"
    if memory.available < MEMORY_LOW_BYTES:
        level: Level = "fail" if memory.available < MEMORY_TOO_LOW_BYTES else "warn"
        advice = "end what takes it (ps aux --sort -rss), or give the container a higher limit"
        return Finding("memory", level, found, advice)
    if memory.swap_used > SWAPPED_BYTES:
        return Finding("memory", "warn", found, "what was swapped out is slow: end what takes the memory, or swapoff")
    return passed("memory", found)


def judge_cores(cores: int, quota: float | None) -> Finding:
    """Whether as many threads may run as there seem to be cores."""
    if quota is None or quota >= cores:
        return passed("cores", str(cores))
    found = f"{cores} are seen, and the container may use {quota:g} of them"
    threads = max(1, int(quota))
    advice = f"as many threads as are seen get in each other's way: cluster.threads_per_worker={threads} for one worker"
    return Finding("cores", "warn", found, advice)


def check_limits() -> list[Finding]:
    """All of these, of this process."""
    return [
        judge_cores(usable_cores(), core_quota()),
        judge_memory(look_at_memory()),
        judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
        judge_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0], process_limit()),
        judge_locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], infiniband()),
    ]


def look_at_memory(root: Path = _ROOT) -> Memory:
    """Of this container, or the machine."""
    rows = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        rows[name] = int(value.split()[0]) << 10
    limit = machine_memory(root)
    available = min([rows["MemAvailable"], *(limit - used for used in _used_in_groups(root, limit))])
    swap = rows.get("SwapTotal", 0)
    return Memory(limit, max(available, 0), swap, swap - rows.get("SwapFree", 0))


def _used_in_groups(root: Path, limit: int) -> Iterator[int]:
    """What the group with that limit has taken, without what it could give back at once."""
    for folder, of_limit, of_use in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for group in _groups(root, folder):
            if _number(group / of_limit) == limit and (used := _number(group / of_use)) is not None:
                rows = dict(
                    line.split() for line in _text(group / "memory.stat").splitlines() if len(line.split()) == 2
                )
                yield used - int(rows.get("total_inactive_file", rows.get("inactive_file", 0)))
                return


def core_quota(root: Path = _ROOT) -> float | None:
    """For how many cores at a time the container is given time; None: there is no limit."""
    found = []
    for group in _groups(root, ""):
        quota, _, period = _text(group / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            found.append(int(quota) / int(period))
    for group in _groups(root, "cpu"):
        of, period_us = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if of and period_us and of > 0:
            found.append(of / period_us)
    return min(found, default=None)


def process_limit(root: Path = _ROOT) -> int | None:
    """How many processes and threads the container may have; None: there is no limit."""
    groups = [*_groups(root, ""), *_groups(root, "pids")]
    limits = [limit for group in groups if (limit := _number(group / "pids.max")) is not None]
    return min(limits, default=None)


def infiniband(root: Path = _ROOT) -> list[str]:
    """The devices."""
    folder = root / "sys/class/infiniband"
    return sorted(one.name for one in folder.iterdir()) if folder.is_dir() else []


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and those above it: of version 2 (no controller) or 1."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(",") if controller else hierarchy == "0":
            # A container may see its own group as the mount's root, and still read the path that the host knows.
            own = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
            return [root / "sys/fs/cgroup" / controller / group for group in [own, *own.parents]]
    return []


def _number(file: Path) -> int | None:
    text = _text(file)
    return int(text) if text.isdecimal() else None  # "max", or -1, is none


def _text(file: Path) -> str:
    """Empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _in_words(limit: int) -> str:
    return "no limit" if limit == _ENDLESS else f"{limit:,}"
