"""Shards in an object store: fetched ahead, verified, kept under a cap, waited for when the store fails."""

import os
import pickle
import threading
import time

import boto3
import pytest
import xxhash

from shoal.data.bad_samples import DataGoneError
from shoal.data.shards import store as stores
from shoal.data.shards.index import Shard, ShardIndex
from shoal.data.shards.opened import RowError
from shoal.data.shards.store import CachedStore, LocalStore
from shoal.data.statistics import DataStatistics

SIZE = 1000
CONTENT = [bytes([number]) * SIZE for number in range(12)]
URL = "s3://bucket/data/train"


def silent(words):
    """Nobody listens."""


@pytest.fixture
def index(s3):
    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    shards = []
    for number, content in enumerate(CONTENT):
        client.put_object(Bucket="bucket", Key=f"data/train/shard-{number}.bin", Body=content)
        shards.append(Shard(f"shard-{number}.bin", 10, SIZE, xxhash.xxh3_128_hexdigest(content)))
    return ShardIndex("tokens", tuple(shards))


@pytest.fixture(autouse=True)
def in_a_hurry(monkeypatch):
    monkeypatch.setattr(stores, "_PAUSE_S", 0.05)
    monkeypatch.setattr(stores, "_TOLD_AFTER_S", 0.2)
    monkeypatch.setattr("shoal.core.remote._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("shoal.core.remote._LONGEST_DELAY_S", 0.02)


def open_store(folder, index, cache_bytes=100 * SIZE, patience_s=20.0):
    return CachedStore(URL, index, cache=folder / "cache", cache_bytes=cache_bytes, patience_s=patience_s)


def cached(store):
    return sorted(path.name for path in store.folder.iterdir() if not path.name.startswith("."))


def test_a_shard_is_fetched_once_and_found_again(tmp_path, index, s3):
    store = open_store(tmp_path, index)
    assert store.where(3) == "s3://bucket/data/train/shard-3.bin"
    assert store.path(3).read_bytes() == CONTENT[3]
    asked = s3.done.total()
    again = pickle.loads(pickle.dumps(store))
    assert again.path(3).read_bytes() == CONTENT[3] and s3.done.total() == asked
    assert cached(store) == ["shard-3.bin"]


def test_other_data_at_the_same_address_is_not_taken_for_it(tmp_path, index):
    other = ShardIndex("tokens", index.shards[:5])
    assert open_store(tmp_path, index).folder != open_store(tmp_path, other).folder


def test_many_ask_for_the_same_and_one_fetches(tmp_path, index):
    statistics = [DataStatistics() for _ in range(6)]
    threads = [threading.Thread(target=lambda s=s: open_store(tmp_path, index).fetch(1, s, silent)) for s in statistics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(s.files_fetched for s in statistics) == 1


def test_no_more_is_kept_than_the_cap_and_the_oldest_goes_first(tmp_path, index):
    store = open_store(tmp_path, index, cache_bytes=5 * SIZE)
    for number in range(12):
        store.path(number)
        os.utime(store.path(number), (number, number))  # file systems may count in coarse steps
        size = sum(path.stat().st_size for path in store.folder.iterdir())
        assert size <= 5 * SIZE
    assert "shard-11.bin" in cached(store) and "shard-0.bin" not in cached(store)
    with store.path(11).open("rb") as file:
        for number in range(6):
            store.path(number)
        assert not store._path(11).exists() and file.read() == CONTENT[11], "who reads a file keeps it"


def test_what_is_not_the_caches_own_is_left_alone(tmp_path, index):
    mine = tmp_path / "cache" / "thesis" / "checkpoint.pt"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"x" * 10 * SIZE)
    os.utime(mine, (1, 1))
    store = open_store(tmp_path, index, cache_bytes=2 * SIZE)
    for number in range(6):
        store.path(number)
    assert mine.exists()


def test_a_damaged_file_of_the_cache_is_fetched_again(tmp_path, index):
    store = open_store(tmp_path, index)
    store.path(4).write_bytes(b"")
    assert store.path(4).read_bytes() == CONTENT[4]


def test_a_lock_that_is_never_let_go_of_is_not_waited_for_for_ever(tmp_path, index, monkeypatch):
    import filelock

    monkeypatch.setattr(stores, "_LOCKED_S", 0.2)
    store = open_store(tmp_path, index, patience_s=0.2)
    store.folder.mkdir(parents=True)
    with filelock.FileLock(store.folder / ".shard-0.bin.lock"):
        assert store.path(0).read_bytes() == CONTENT[0]


def test_a_fork_does_not_copy_a_lock_that_is_taken(tmp_path, index):
    store = open_store(tmp_path, index)
    with store._lock():
        if not (child := os.fork()):
            os._exit(0 if store._lock().acquire(timeout=1) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_leftovers_of_the_dead_are_deleted(tmp_path, index):
    store = open_store(tmp_path, index, cache_bytes=2 * SIZE)
    store.path(0)
    old, new = store.folder / ".x.1.2.tmp", store.folder / ".y.1.2.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    store.path(1)
    store.path(2)
    assert not old.exists() and new.exists()


def test_who_reads_before_it_was_fetched_ahead_is_counted_too(tmp_path, index):
    store, statistics = open_store(tmp_path, index), DataStatistics()
    store.path(0)
    with store.following(iter([]), 20, statistics, silent):
        store.path(1)
        assert (statistics.files_fetched, statistics.bytes_fetched) == (1, SIZE)
        if not (child := os.fork()):
            store.path(2)  # which counts for nobody, and must not wait for a lock that the fork has copied
            os._exit(0 if statistics.files_fetched == 1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        pickle.loads(pickle.dumps(store)).path(3)
    store.path(4)
    assert statistics.files_fetched == 1


def test_following_fetches_ahead_but_not_far(tmp_path, index, monkeypatch):
    monkeypatch.setattr(stores, "_FILES_AHEAD", 2)
    store, statistics = open_store(tmp_path, index), DataStatistics()
    files = ((10 * number, [number]) for number in range(12))
    with store.following(files, 20, statistics, silent) as follower:
        follower.at(0)
        wait_for(lambda: statistics.files_fetched >= 3)
        time.sleep(0.3)
        assert 3 <= statistics.files_fetched <= 6, "those that the next 20 steps need, and a few"
        follower.at(100)
        wait_for(lambda: statistics.files_fetched == 12)
    with store.following(((0, [number]) for number in range(12)), 0, statistics, silent) as follower:
        wait_for(lambda: statistics.files_at_hand == 12)
    assert statistics.files_fetched == 12 and statistics.bytes_fetched == 12 * SIZE


def wait_for(holds, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("fault", ["error", "reset", "half", "late error"])
def test_a_store_that_fails_for_a_while_is_asked_again_and_that_is_told(tmp_path, index, s3, fault):
    told, statistics = [], DataStatistics()
    s3.draw = lambda: "ok" if told else fault
    path = open_store(tmp_path, index).fetch(0, statistics, told.append)
    assert path.read_bytes() == CONTENT[0] and statistics.retries >= 1
    assert told[0].startswith("waiting for data for ") and "shard-0.bin: shard-0.bin could not be read from" in told[0]
    assert told[-1].startswith("data is there again after ")


def test_patience_has_an_end(tmp_path, index, s3):
    s3.draw = lambda: "error"
    with pytest.raises(DataGoneError, match=r"^data.dir: s3://.*shard-0.bin could not be had for \d+ s: .*patience_s"):
        open_store(tmp_path, index, patience_s=0.3).path(0)


def test_what_is_not_there_is_not_waited_for(tmp_path, index):
    shards = (*index.shards, Shard("shard-99.bin", 1, 1))
    with pytest.raises(RowError, match=r"^the file is not there$"):
        open_store(tmp_path, ShardIndex("tokens", shards)).path(12)


@pytest.mark.parametrize("change", [{"bytes": SIZE + 1}, {"xxh3_128": "0" * 32}])
def test_bytes_that_are_not_those_of_the_index_are_not_used(tmp_path, index, change):
    about = index.shards[0]
    wrong = Shard(about.file, about.rows, change.get("bytes", about.bytes), change.get("xxh3_128", about.xxh3_128))
    store = open_store(tmp_path, ShardIndex("tokens", (wrong,)))
    with pytest.raises(RowError, match=r"the index says 1,001|not those that the index was made from"):
        store.path(0)
    assert cached(store) == []


def test_a_full_disk_is_waited_for_and_told(small_disk, index):
    big = small_disk / "big"
    with pytest.raises(OSError):
        big.write_bytes(b"x" * (10 << 20))
    store = CachedStore(URL, index, cache=small_disk / "cache", cache_bytes=10 << 20, patience_s=20.0)
    told = []

    def tell(words):
        told.append(words)
        big.unlink(missing_ok=True)

    assert store.fetch(0, DataStatistics(), tell).read_bytes() == CONTENT[0]
    assert "No space left on device" in told[0]


def test_following_ends_while_a_store_is_silent(tmp_path, index, s3):
    s3.draw = lambda: "silence"
    s3.silence_s = 2.0
    store = open_store(tmp_path, index)
    with store.following(iter([(0, [0, 1, 2])]), 1, DataStatistics(), silent):
        time.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 5.0


def test_files_of_this_machine(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    store = LocalStore(tmp_path, ShardIndex("tokens", (Shard("a.bin", 1, 1), Shard("b.bin", 1, 1))))
    assert store.path(0) == tmp_path / "a.bin" and store.where(1) == f"{tmp_path}/b.bin"
    with pytest.raises(RowError, match="not there"):
        store.path(1)
