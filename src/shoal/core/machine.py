"""The machine that a process runs on, or the part of it that a container leaves to it."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_model(root: Path = _ROOT) -> str:
    """What the processor is called."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def cpu_features(root: Path = _ROOT) -> str:
    """What the processor can do, by the names that the kernel has for it: code made for one runs where they are the
    same."""
    lines = _read(root / "proc/cpuinfo").splitlines()
    features = (line.partition(":")[2].strip() for line in lines if line.startswith(("flags", "Features")))
    return next(features, cpu_model(root))


def machine_memory(root: Path = _ROOT) -> int:
    """Bytes of memory that the processes of this machine may take together: those of the machine, or of the container.

    Args:
        root: Where `/proc` and `/sys` are.
    """
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    """What the control groups of this process, and those above them, may take: version 2, and version 1."""
    for hierarchy, controllers, path in _groups(root):
        if hierarchy == "0":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # A container may see its own group as the mount's root, and still read the path that the host knows.
        own = PurePosixPath(*(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        for group in [own, *own.parents]:
            text = _read(mount / group / name)
            if text.isdecimal():  # not "max"
                yield int(text)


def _groups(root: Path) -> list[list[str]]:
    """Hierarchy, controllers and path of each control group of this process."""
    lines = _read(root / "proc/self/cgroup").splitlines()
    return [line.split(":", 2) for line in lines if line.count(":") > 1]


def _read(file: Path) -> str:
    """Its text; empty where it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
