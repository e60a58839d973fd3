"""The memory of a machine is what a container leaves of it."""

import os
from pathlib import Path

import pytest

from shoal.core.machine import cpu_features, cpu_model, machine_memory

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def tree(root: Path, groups: str, limits: dict[str, str]) -> Path:
    """As /proc and /sys would be: the process's groups, and files with limits."""
    for name, text in {"proc/self/cgroup": groups, **limits}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/pod/box", {f"{V2}/pod/box/memory.max": "5000"}, 5000),
        ("0::/pod/box", {f"{V2}/pod/box/memory.max": "max", f"{V2}/pod/memory.max": "4000"}, 4000),
        ("0::/pod/box", {f"{V2}/pod/box/memory.max": "5000", f"{V2}/pod/memory.max": "4000"}, 4000),
        ("0::/", {f"{V2}/memory.max": "3000"}, 3000),
        ("0::/../../pod", {f"{V2}/memory.max": "3000"}, 3000),
        ("0::/docker/of-the-host", {f"{V2}/memory.max": "3000"}, 3000),
        ("0::/pod:box", {f"{V2}/pod:box/memory.max": "2000"}, 2000),
        ("5:cpu,memory:/box\n3:cpuset:/\n0::/", {f"{V1}/box/memory.limit_in_bytes": "6000"}, 6000),
        ("4:memory:/docker/of-the-host", {f"{V1}/memory.limit_in_bytes": "7000"}, 7000),
    ],
)
def test_a_limit_of_the_container_counts(tmp_path: Path, groups: str, limits: dict[str, str], expected: int) -> None:
    assert machine_memory(tree(tmp_path, groups, limits)) == expected


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/box", {f"{V2}/box/memory.max": "max"}),
        ("0::/box", {f"{V2}/other/memory.max": "5000"}),
        ("4:memory:/", {f"{V1}/memory.limit_in_bytes": "9223372036854771712"}),
        ("3:cpuset:/box", {f"{V1}/box/memory.limit_in_bytes": "5000"}),
        ("", {}),
    ],
)
def test_without_a_limit_it_is_all_that_there_is(tmp_path: Path, groups: str, limits: dict[str, str]) -> None:
    assert machine_memory(tree(tmp_path, groups, limits)) == PHYSICAL


def test_a_machine_without_control_groups(tmp_path: Path) -> None:
    assert machine_memory(tmp_path) == PHYSICAL


def test_this_machine() -> None:
    assert 1 << 20 < machine_memory() <= PHYSICAL


@pytest.mark.parametrize(
    ("text", "features"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2\n\nprocessor\t: 1\nflags\t\t: fpu", "fpu avx2"),
        ("processor\t: 0\nFeatures\t: fp asimd", "fp asimd"),
        ("model name\t: Some CPU", "Some CPU"),
    ],
)
def test_what_a_processor_can_do(tmp_path: Path, text: str, features: str) -> None:
    root = tree(tmp_path, "0::/", {"proc/cpuinfo": text})
    assert cpu_features(root) == features
    assert cpu_model(root) == ("Some CPU" if "Some" in text else cpu_model(tmp_path / "nothing"))
