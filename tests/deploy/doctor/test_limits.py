"""Limits of this process and its container."""

import resource
from pathlib import Path

import pytest

from shoal.deploy.doctor.limits import (
    Memory,
    check_limits,
    core_quota,
    infiniband,
    judge_cores,
    judge_locked_memory,
    judge_memory,
    judge_open_files,
    judge_processes,
    look_at_memory,
    process_limit,
)

GIB = 1 << 30
ENDLESS = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "level"),
    [(1024, 1 << 20, "pass"), (1024, ENDLESS, "pass"), (4096, 4096, "warn"), (256, 512, "fail")],
)
def test_open_files(soft: int, hard: int, level: str) -> None:
    finding = judge_open_files(soft, hard)
    assert finding.level == level and ("ulimit -n" in finding.advice) == (level != "pass")


@pytest.mark.parametrize(
    ("limit", "of_group", "level"),
    [(ENDLESS, None, "pass"), (ENDLESS, 1024, "warn"), (100_000, 100, "fail"), (100_000, None, "pass")],
)
def test_processes(limit: int, of_group: int | None, level: str) -> None:
    assert judge_processes(limit, of_group).level == level


@pytest.mark.parametrize(
    ("limit", "devices", "level"),
    [
        (8 << 20, [], "skip"),
        (8 << 20, ["mlx5_0"], "fail"),
        (4 * GIB, ["mlx5_0"], "warn"),
        (ENDLESS, ["mlx5_0"], "pass"),
    ],
)
def test_locked_memory_matters_with_infiniband(limit: int, devices: list[str], level: str) -> None:
    assert judge_locked_memory(limit, devices).level == level


@pytest.mark.parametrize(
    ("memory", "level"),
    [
        (Memory(64 * GIB, 32 * GIB), "pass"),
        (Memory(64 * GIB, 3 * GIB), "warn"),
        (Memory(64 * GIB, GIB // 2), "fail"),
        (Memory(64 * GIB, 32 * GIB, 8 * GIB, 0), "pass"),
        (Memory(64 * GIB, 32 * GIB, 8 * GIB, 3 * GIB), "warn"),
    ],
)
def test_memory(memory: Memory, level: str) -> None:
    assert judge_memory(memory).level == level


@pytest.mark.parametrize(
    ("cores", "quota", "level"), [(8, None, "pass"), (8, 8.0, "pass"), (8, 2.5, "warn"), (2, 0.5, "warn")]
)
def test_cores(cores: int, quota: float | None, level: str) -> None:
    finding = judge_cores(cores, quota)
    assert finding.level == level
    if quota is not None and level == "warn":
        assert f"threads_per_worker={max(1, int(quota))}" in finding.advice


def _machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    meminfo = "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nSwapTotal: 1048576 kB\nSwapFree: 524288 kB\n"
    for name, text in ({"proc/self/cgroup": groups, "proc/meminfo": meminfo} | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_container_of_version_2(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        "0::/pod/worker\n",
        {
            "sys/fs/cgroup/pod/worker/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/worker/pids.max": "max\n",
            "sys/fs/cgroup/pod/pids.max": "2048\n",
            "sys/fs/cgroup/pod/worker/memory.max": str(GIB),
            "sys/fs/cgroup/pod/worker/memory.current": str(GIB - (100 << 20)),
            "sys/fs/cgroup/pod/worker/memory.stat": f"anon 5\ninactive_file {50 << 20}\n",
        },
    )
    assert core_quota(root) == 1.5
    assert process_limit(root) == 2048
    assert look_at_memory(root) == Memory(GIB, 150 << 20, GIB, GIB // 2)
    assert judge_memory(look_at_memory(root)).level == "fail"


def test_a_container_of_version_1(tmp_path: Path) -> None:
    root = _machine(
        tmp_path,
        "4:memory:/c\n3:cpu,cpuacct:/c\n2:pids:/c\n",
        {
            "sys/fs/cgroup/cpu/c/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/c/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/pids/c/pids.max": "100",
            "sys/fs/cgroup/memory/c/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/c/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/memory/c/memory.stat": f"total_inactive_file {GIB // 2}\n",
        },
    )
    assert (core_quota(root), process_limit(root)) == (2.0, 100)
    assert look_at_memory(root).available == 3 * GIB // 2


def test_no_container(tmp_path: Path) -> None:
    root = _machine(tmp_path, "", {})
    assert (core_quota(root), process_limit(root), infiniband(root)) == (None, None, [])
    assert look_at_memory(root).available == 32 * GIB
    (root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert infiniband(root) == ["mlx5_0"]


def test_this_machine() -> None:
    findings = {finding.check: finding for finding in check_limits()}
    assert set(findings) == {"cores", "memory", "open files", "processes", "locked memory"}
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert findings["open files"].found.startswith(f"{soft:,} at a time")
