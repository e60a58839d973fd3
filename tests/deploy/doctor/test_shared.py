"""Storage that machines share, or do not."""

from pathlib import Path

import pytest

from shoal.deploy.doctor import shared
from shoal.deploy.doctor.shared import Lock, Storage, judge_storage

GIB = 1 << 30


def test_what_one_writes_the_other_reads_and_nothing_is_left(tmp_path: Path) -> None:
    folder = str(tmp_path)
    one, other = shared.write(folder, "key", 0), shared.write(folder, "key", 1)
    assert one["sha256"] != other["sha256"] and one["free_bytes"] > 0
    found = shared.read(folder, "key", {0: one["sha256"], 1: other["sha256"]})
    assert found["wrong"] == {}
    assert len(list(tmp_path.iterdir())) == 2
    shared.remove(folder, "key", 0)
    shared.remove(folder, "key", 1)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_seen_or_is_other_is_told(tmp_path: Path) -> None:
    folder = str(tmp_path)
    shared.write(folder, "key", 0)
    found = shared.read(folder, "key", {0: "another hash", 7: "x"}, within_s=0.2)
    assert found["wrong"] == {"0": "other content", "7": "not seen"}


def test_a_folder_that_is_not_there_or_full(tmp_path: Path, small_disk: Path) -> None:
    assert shared.write(str(tmp_path / "none"), "key", 0) == {"error": "No such file or directory"}
    (small_disk / "big").write_bytes(bytes(1800 << 10))
    assert shared.write(str(small_disk), "key", 0) == {"error": "No space left on device"}
    assert [file.name for file in small_disk.iterdir()] == ["big"]


def test_locks(tmp_path: Path) -> None:
    one, other = Lock(), Lock()
    assert one.take(str(tmp_path), "key") == "taken"
    assert other.take(str(tmp_path), "key") == "held"
    one.drop()
    assert other.take(str(tmp_path), "key") == "taken"
    other.drop()
    assert "No such file" in one.take(str(tmp_path / "none"), "key")


GOOD = Storage("/shared", seen_s=0.01, free_bytes=100 * GIB, locks=["held", "held"], machines=3)


def test_good_storage_passes() -> None:
    assert [finding.level for finding in judge_storage(GOOD)] == ["pass", "pass"]


@pytest.mark.parametrize(
    ("storage", "check", "level", "words"),
    [
        (Storage("/s", errors={"a": "Permission denied"}, machines=3), "storage", "fail", "a: Permission denied"),
        (Storage("/s", free_bytes=GIB // 2, machines=2), "storage", "fail", "512 MiB free"),
        (Storage("/s", free_bytes=5 * GIB, machines=2), "storage", "warn", "5.0 GiB free"),
        (Storage("/s", seen_s=4.0, free_bytes=99 * GIB, machines=2), "storage", "warn", "seen in 4 s"),
        (Storage("/s", free_bytes=99 * GIB, locks=["taken"], machines=2), "storage locks", "warn", "does not hold"),
        (Storage("/s", free_bytes=99 * GIB, locks=["No locks available"]), "storage locks", "warn", "No locks"),
        (Storage("/s", free_bytes=99 * GIB, machines=1), "storage locks", "skip", "one machine"),
    ],
)
def test_bad_storage(storage: Storage, check: str, level: str, words: str) -> None:
    found = next(finding for finding in judge_storage(storage) if finding.check == check)
    assert found.level == level and words in found.found


def test_the_machine_that_has_storage_of_its_own_is_named() -> None:
    unseen = {"a": {"c": "not seen"}, "b": {"c": "not seen"}, "c": {"a": "not seen", "b": "not seen"}}
    (finding,) = judge_storage(Storage("/s", unseen=unseen, machines=3))
    assert finding.level == "fail" and finding.found == "c and the other 2 do not see each other's files"
    (finding,) = judge_storage(Storage("/s", unseen={"a": {"b": "other content"}}, machines=4))
    assert finding.found == "a does not see what b wrote (other content)"
    (finding,) = judge_storage(Storage("/s", unseen={"a": {"b": "not seen"}, "b": {"a": "not seen"}}, machines=2))
    assert finding.found.startswith("a does not see what b wrote (not seen), b does not")
