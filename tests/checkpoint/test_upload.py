"""Checkpoints on their way to a store: each worker its own files, the newest first, whole or not at all."""

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from shoal.checkpoint.folder import list_checkpoints, read_info
from shoal.checkpoint.saver import TROUBLE, Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.store import check_unused, fetch, list_remote
from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.core.remote import Access, Remote
from tests.checkpoint.states import ALONE, check, read, snapshot
from tests.checkpoint.test_saver import Told, wait_until
from tests.store import Proxy


def make(folder: Path, told: Told, url: str, process: Process = ALONE, **settings: Any) -> Saver:
    known = {"keep_last": 100, "upload_to": url, "upload_timeout_s": 1.0} | settings
    return Saver(folder, CheckpointSection(**known), process, tell=told, recipe="name: x\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def there(store: str) -> Remote:
    return Remote(f"{store}/run/checkpoints", Access("checkpoint.upload_to"))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Uploads wait until this is set."""
    opened, put = threading.Event(), Remote.put

    def slowly(self: Remote, source: Path, name: str) -> None:
        opened.wait(30)
        put(self, source, name)

    monkeypatch.setattr(Remote, "put", slowly)
    yield opened
    opened.set()


def check_there(remote: Remote, step: int, scratch: Path, world_size: int = 1) -> None:
    info = next(info for info in list_remote(remote) if info.step == step)
    fetch(remote, info, scratch)
    check(read(read_info(scratch / info.path.name)), step, world_size)
    shutil.rmtree(scratch)


def test_what_is_committed_is_copied_to_s3_and_back(s3: Proxy, folder: Path, tmp_path: Path) -> None:
    told = Told()
    saver = make(folder, told, "s3://bucket/deep/down", keep_last=2)
    for step in (1, 2, 3):
        saver.save(snapshot(step))
        saver.finish()
    assert told.steps("upload") == [1, 2, 3]
    assert dict(told.events)["upload"]["to"] == "s3://bucket/deep/down/run/checkpoints/step-00000003"
    remote = Remote("s3://bucket/deep/down/run/checkpoints", Access("checkpoint.upload_to"))
    assert remote.names("") == ["step-00000002", "step-00000003"], "kept there as here"
    check_there(remote, 3, tmp_path / "scratch")


def save_on(process: Process, folder: Path, url: str) -> list[int]:
    told = Told()
    saver = make(folder, told, url, process)
    for step in (1, 2, 3):
        saver.save(snapshot(step, rank=process.rank))
    saver.finish()
    return told.steps("upload")


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_worker_uploads_its_part(ranks, folder, store, there, tmp_path, world_size):
    uploaded, *silent = ranks(world_size)(save_on, folder, store)
    assert uploaded[-1] == 3 and silent == [[]] * (world_size - 1)
    check_there(there, 3, tmp_path / "scratch", world_size)


def test_only_the_newest_that_waits_goes_next_and_none_in_use_is_deleted(folder, store, there, held, tmp_path):
    told = Told()
    saver = make(folder, told, store, keep_last=1)
    saver.save(snapshot(1))
    wait_until(lambda: saver.uploader.in_use() == {1})
    for step in range(2, 7):
        saver.save(snapshot(step))
    wait_until(lambda: 6 in saver.uploader.in_use())
    assert {info.step for info in list_checkpoints(folder)} >= {1, 6}, "the one on its way stays"
    assert len(list_checkpoints(folder)) <= 4, "and few others"
    held.set()
    saver.finish()
    assert told.steps("upload") == [1, 6]
    assert [info.step for info in list_checkpoints(folder)] == [6]
    check_there(there, 6, tmp_path / "scratch")


def test_a_store_that_fails_is_told_and_asked_again(s3: Proxy, folder: Path, tmp_path: Path) -> None:
    told = Told()
    saver = make(folder, told, "s3://bucket")
    saver.uploader.remote.sleep = lambda seconds: None
    s3.draw = lambda: "error"
    saver.save(snapshot(1))
    wait_until(lambda: told.steps("upload_failed"))
    assert saver.report() == {"upload_failures": 1.0} and saver.trouble() is None
    assert [info.step for info in list_checkpoints(folder)] == [1], "it is here meanwhile"
    s3.draw = lambda: "ok"
    saver.finish()
    assert told.steps("upload") == [1] == told.steps("upload_recovered") and saver.report() == {}
    check_there(Remote("s3://bucket/run/checkpoints", Access("checkpoint.upload_to")), 1, tmp_path / "scratch")


def test_a_store_that_fails_for_good_is_trouble_and_in_the_end_a_warning(s3: Proxy, folder: Path) -> None:
    told = Told()
    saver = make(folder, told, "s3://bucket", max_failures=2, give_up_after_s=0.5)
    saver.uploader.remote.sleep = lambda seconds: None
    s3.draw = lambda: "reset"
    saver.save(snapshot(1))
    wait_until(lambda: saver.trouble() == TROUBLE)
    assert saver.too_many_failures().startswith("2 uploads of checkpoints failed in a row, the last one because: ")
    saver.finish()
    assert "is in" in told.events[-1][1]["message"] and "alone, and not in s3://bucket" in told.events[-1][1]["message"]
    assert [info.step for info in list_checkpoints(folder)] == [1]


def test_what_an_upload_left_without_an_end_is_cleared_away(folder, store, there, tmp_path):
    (tmp_path / "rubbish").write_text("x")
    there.put(tmp_path / "rubbish", "step-00000001/shard-00000.safetensors")
    saver = make(folder, Told(), store)
    saver.save(snapshot(2))
    saver.finish()
    assert there.names("") == ["step-00000002"]


def test_a_run_does_not_begin_where_another_has_left_its_checkpoints(folder, store, there, s3):
    settings = CheckpointSection(upload_to=store)
    check_unused("run", settings)
    saver = make(folder, Told(), store)
    saver.save(snapshot(7))
    saver.finish()
    with pytest.raises(
        UserError, match=r"^checkpoint\.upload_to: .*/run/checkpoints holds checkpoints of another run, up"
    ):
        check_unused("run", settings)
    check_unused("other", settings)
    with pytest.raises(UserError, match=r"^checkpoint\.upload_to: .*; check address and credentials"):
        check_unused("run", CheckpointSection(upload_to="s3://no-such-bucket-here", upload_timeout_s=0.5))
    assert not Remote("s3://no-such-bucket-here", Access("checkpoint.upload_to")).names(""), "and no bucket was made"


def test_where_others_go_on_at_once_nobody_waits_for_uploads(folder, store, held):
    told = Told()
    saver = make(folder, told, store)
    saver.save(snapshot(1))
    saver.finish(with_uploads=False)
    assert told.steps("save") == [1] and told.steps("upload") == []
    held.set()
    saver.finish()
    assert told.steps("upload") == [1]


def test_a_newer_one_of_a_past_that_was_given_up_does_not_cost_the_present_one(folder, store, there):
    saver = make(folder, Told(), store, keep_last=1)
    saver.save(snapshot(9000))
    saver.finish()
    shutil.rmtree(folder)
    saver = make(folder, Told(), store, keep_last=1)
    for step in (1, 2):
        saver.save(snapshot(step))
        saver.finish()
    assert [info.step for info in list_remote(there)] == [2, 9000]


def test_what_was_not_uploaded_when_a_run_ended_is_when_it_goes_on(folder, store, there, tmp_path):
    Saver(folder, CheckpointSection(), ALONE).save(snapshot(4))
    told = Told()
    saver = make(folder, told, store)
    wait_until(lambda: list_checkpoints(folder))
    for _ in range(2):
        saver.uploader.add_if_missing(4)
        saver.finish()
    assert told.steps("upload") == [4]
    check_there(there, 4, tmp_path / "scratch")


def test_parts_of_large_files_that_a_kill_left_in_s3_are_given_back(s3, s3_port, folder):
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_port}")
    for key in ("run/checkpoints/step-00000001/shard-00000.safetensors", "other/x"):
        client.create_multipart_upload(Bucket="bucket", Key=key)
    saver = make(folder, Told(), "s3://bucket")
    saver.save(snapshot(2))
    saver.finish()
    left = client.list_multipart_uploads(Bucket="bucket").get("Uploads", [])
    assert [upload["Key"] for upload in left] == ["other/x"], "those of others are theirs"


def test_a_manifest_that_is_cut_or_of_another_step_is_no_checkpoint(folder, store, there):
    saver = make(folder, Told(), store)
    for step in (1, 2):
        saver.save(snapshot(step))
        saver.finish()
    (folder / "cut").write_bytes((folder / "step-00000002" / "manifest.json").read_bytes()[:-1])
    there.put(folder / "cut", "step-00000002/manifest.json")
    there.put(folder / "step-00000001" / "manifest.json", "step-00000009/manifest.json")
    assert [info.step for info in list_remote(there)] == [1]


def test_what_nobody_has_foreseen_is_raised_where_the_run_trains(folder, store, monkeypatch):
    saver = make(folder, Told(), store)

    def fails(*arguments: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr(saver.uploader, "_upload_part", fails)
    saver.save(snapshot(1))
    wait_until(lambda: saver.trouble() == TROUBLE)
    with pytest.raises(ZeroDivisionError, match="odd"):
        saver.save(snapshot(2))
    with pytest.raises(ZeroDivisionError, match="odd"):
        saver.finish()
