"""Folders and shared memory."""

from pathlib import Path

import pytest

from shoal.deploy.doctor.folders import (
    Folder,
    cache_folder,
    judge_cache_folder,
    judge_ray_folder,
    judge_run_folder,
    judge_shm,
    judge_storage_folder,
    look_at_folder,
    ray_folder,
)

GIB = 1 << 30
HERE = Path("/somewhere")


@pytest.mark.parametrize(("free", "level"), [(100 * GIB, "pass"), (9 * GIB, "warn"), (GIB // 2, "fail")])
def test_room(free: int, level: str) -> None:
    folder = Folder(HERE, 200 * GIB, free, 1000, 900)
    assert judge_run_folder(folder).level == level
    assert judge_ray_folder(folder).level == level
    assert judge_storage_folder(folder).level == level
    assert judge_cache_folder(folder).level == ("warn" if level == "fail" else level)


@pytest.mark.parametrize(("inodes", "free", "level"), [(1000, 10, "warn"), (1000, 0, "fail"), (0, 0, "pass")])
def test_inodes(inodes: int, free: int, level: str) -> None:
    finding = judge_run_folder(Folder(HERE, 200 * GIB, 100 * GIB, inodes, free))
    assert finding.level == level and ("inodes" in finding.found) == (level != "pass")


def test_a_disk_too_full_for_ray_to_spill() -> None:
    folder = Folder(HERE, 1000 * GIB, 40 * GIB, 0, 0)
    assert judge_ray_folder(folder).level == "warn" and "spills" in judge_ray_folder(folder).found
    assert judge_run_folder(folder).level == "pass"


@pytest.mark.parametrize(
    ("total", "free", "level", "advice"),
    [
        (64 << 20, 64 << 20, "fail", "--shm-size"),
        (8 * GIB, 10 << 20, "fail", "ls -l /dev/shm"),
        (GIB, GIB, "warn", "emptyDir"),
        (8 * GIB, 8 * GIB, "pass", ""),
    ],
)
def test_shared_memory(total: int, free: int, level: str, advice: str) -> None:
    finding = judge_shm(Folder(Path("/dev/shm"), total, free))
    assert finding.level == level and advice in finding.advice
    assert judge_shm(Folder(Path("/dev/shm"), problem="/dev: Permission denied")).level == "fail"


def test_a_folder_that_will_be_made_is_what_is_above_it(tmp_path: Path) -> None:
    found = look_at_folder(tmp_path / "runs" / "first")
    assert found.problem == "" and found.total_bytes >= found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    named = look_at_folder(tmp_path / "mnt", is_made=False)
    assert named.problem == f"{tmp_path / 'mnt'}: not there"
    assert judge_storage_folder(named).level == "fail"
    (tmp_path / "file").write_text("")
    assert "not a folder" in look_at_folder(tmp_path / "file", is_made=False).problem


def test_a_folder_that_cannot_be_written() -> None:
    found = look_at_folder(Path("/proc/sys"))
    assert found.problem.startswith("/proc/sys: ")
    levels = [judge(found).level for judge in (judge_run_folder, judge_cache_folder, judge_ray_folder)]
    assert levels == ["warn", "warn", "fail"]


def test_a_full_disk(small_disk: Path) -> None:
    finding = judge_storage_folder(look_at_folder(small_disk, is_made=False))
    assert finding.level == "fail" and "2 MiB free" in finding.found
    assert judge_shm(look_at_folder(small_disk)).level == "fail"


def test_where_things_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.delenv("RAY_TEMP_DIR", raising=False)
    assert ray_folder() == Path("/tmp")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert ray_folder() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache")
