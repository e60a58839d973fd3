"""Whole runs on streamed data: the store fails, samples are damaged, workers are killed; the weights are the same."""

import json
import random
import shutil
import time
from pathlib import Path

import boto3
import pytest

from shoal.core.errors import RunError, UserError
from shoal.data.shards import store as stores
from shoal.data.shards.index import INDEX
from shoal.observe.runs import read_events
from tests.data.shards.making import write_images

RECIPE = {
    "task": "image_classification",
    "model": {"name": "mlp", "hidden": [16]},
    "data": {"name": "image_folder", "size": 8, "window": 20, "lanes": 2},
    "train": {"epochs": 2, "global_batch": 6},
    "observe": {"every_steps": 1},
}


def write_shards(folder: Path) -> Path:
    write_images(folder / "train", [9, 12, 10, 8, 9])
    write_images(folder / "val", [8, 8])
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards")


@pytest.fixture
def in_the_store(shards: Path, s3_port: int) -> str:
    bucket = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{s3_port}").Bucket("bucket")
    for path in shards.glob("*/*"):
        bucket.upload_file(str(path), f"pets/{path.relative_to(shards)}")
    return "s3://bucket/pets"


def events(summary, name):
    return [event for event in read_events(Path(summary["run_dir"])) if event["event"] == name]


def test_a_store_that_fails_and_is_gone_for_a_while(train_here, s3, shards, in_the_store, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_PAUSE_S", 0.1)
    monkeypatch.setattr(stores, "_TOLD_AFTER_S", 0.3)
    plain = train_here(RECIPE, overrides={"data.dir": str(shards), "data.workers": 0})
    chance = random.Random(0)
    gone_until = 0.0

    def draw() -> str:
        if time.monotonic() < gone_until:
            return "error"
        return chance.choice(["ok", "ok", "error", "reset", "half", "slow"])

    from_store = {"data.dir": in_the_store, "data.cache_dir": str(tmp_path / "cache"), "data.cache_gb": 1.2e-4}
    fetch = stores.CachedStore.fetch

    def fetch_and_fail(self, *arguments):
        nonlocal gone_until
        if not gone_until:  # the index has been read; now it begins
            gone_until = time.monotonic() + 1.5
            s3.draw = draw
        return fetch(self, *arguments)

    monkeypatch.setattr(stores.CachedStore, "fetch", fetch_and_fail)
    summary = train_here(RECIPE, overrides=from_store | {"data.workers": 0})
    assert summary["weights_sha256"] == plain["weights_sha256"]
    told = [event["message"] for event in events(summary, "data")]
    assert any(words.startswith("waiting for data for ") for words in told)
    assert any(words.startswith("data is there again after ") for words in told)
    found = summary["data"]
    assert found["files_fetched"] >= 7 and found["retries"] >= 1 and found["bytes_fetched"] > 0
    assert found["files_fetched"] + found["files_at_hand"] >= 12, "two epochs of five files, and the validation's two"


def test_a_folder_of_images_in_a_store(train_here, s3, s3_port, tmp_path):
    from tests.fake_data import write_image_folder

    write_image_folder(tmp_path / "pets", ("ant", "bee"), per_class=6)
    bucket = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{s3_port}").Bucket("bucket")
    for path in (tmp_path / "pets").glob("*/*/*"):
        bucket.upload_file(str(path), f"folder/{path.relative_to(tmp_path / 'pets')}")
    overrides = {"data.dir": "s3://bucket/folder", "data.cache_dir": str(tmp_path / "cache"), "train.epochs": 3}
    summary = train_here(RECIPE, overrides=overrides)
    assert summary["status"] == "done" and summary["data"]["files_fetched"] >= 12
    with pytest.raises(UserError, match=r"^data.dir: neither shards nor folders of images in s3://bucket/none/train"):
        train_here(RECIPE, overrides={"data.dir": "s3://bucket/none"})


def test_a_store_that_is_gone_for_good_ends_the_run_in_words(train_here, s3, in_the_store, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "_PAUSE_S", 0.1)
    fetch = stores.CachedStore.fetch

    def failing(self, *arguments):
        s3.draw = lambda: "error"
        return fetch(self, *arguments)

    monkeypatch.setattr(stores.CachedStore, "fetch", failing)
    overrides = {"data.dir": in_the_store, "data.cache_dir": str(tmp_path / "cache"), "data.patience_s": 0.5}
    with pytest.raises(RunError, match=r"^data.dir: s3://bucket/pets/train/.* could not be had for \d+ s: .*--resume"):
        train_here(RECIPE, overrides=overrides)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_are_in_the_events_the_metrics_and_the_summary(train_here, shards, workers):
    path = shards / "train" / "shard-00001.tar"
    path.write_bytes(path.read_bytes()[:6000])
    overrides = {"data.dir": str(shards), "data.workers": workers}
    with pytest.raises(UserError, match=r"^data.dir: .*shard-00001.tar has 6,000 bytes, and the index says .*=skip$"):
        train_here(RECIPE, overrides=overrides)
    summary = train_here(RECIPE, overrides=overrides | {"data.on_error": "skip"})
    found = summary["data"]
    lost = found["skipped"] // 2
    assert 0 < lost < 12 and found["skipped"] == 2 * lost, "as many in either epoch"
    assert len(found["first_skipped"]) == min(lost, 10), "each once"
    assert all("shard-00001.tar, row" in words for words in found["first_skipped"])
    assert events(summary, "data_skipped")[-1]["skipped"] <= found["skipped"]
    assert summary["step"] == 2 * 8, "48 samples by 6, whatever could not be read"


def damage(path: Path, member: bytes) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(member) + 512
    content[at : at + 60] = b"\0" * 60
    path.write_bytes(content)


def test_a_run_that_fails_by_a_sample_goes_on_when_such_are_skipped(train_here, shards, tmp_path):
    damage(shards / "train" / "shard-00002.tar", b"000003.jpg")
    overrides = {"data.dir": str(shards), "data.on_error": "skip", "checkpoint.every_steps": 1}
    whole = train_here(RECIPE, overrides=overrides)
    run_dir = tmp_path / "run"
    with pytest.raises(RunError, match=r"shard-00002.tar, row 3: the image cannot be decoded .*data.on_error=skip$"):
        train_here(RECIPE, overrides=overrides | {"data.on_error": "fail"}, run_dir=run_dir)
    resumed = train_here(resume=run_dir, overrides={"data.on_error": "skip"})
    assert resumed["resumed_from_step"] and resumed["weights_sha256"] == whole["weights_sha256"]


def test_other_shards_of_the_same_samples_are_refused_when_a_run_is_resumed(train_here, shards, tmp_path):
    overrides = {"data.dir": str(shards), "train.epochs": 1}
    train_here(RECIPE, overrides=overrides, run_dir=tmp_path / "run")
    write_images(tmp_path / "other" / "train", [24, 24])
    write_images(tmp_path / "other" / "val", [8, 8])
    with pytest.raises(UserError, match=r"^data.dir: the samples are in other files"):
        train_here(resume=tmp_path / "run", overrides={"data.dir": str(tmp_path / "other"), "train.epochs": 2})
    # Nor as many rows in as many files, if they are others; a copy is no other.
    shutil.copytree(shards, tmp_path / "copy")
    train_here(resume=tmp_path / "run", overrides={"data.dir": str(tmp_path / "copy"), "train.epochs": 2})
    index = json.loads((tmp_path / "copy" / "train" / INDEX).read_text())
    first, second = (next(s for s in index["shards"] if s["file"] == f"shard-0000{n}.tar") for n in (0, 1))
    first["xxh3_128"], second["xxh3_128"] = second["xxh3_128"], first["xxh3_128"]
    (tmp_path / "copy" / "train" / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"^data.dir: the samples are in other files"):
        train_here(resume=tmp_path / "run", overrides={"data.dir": str(tmp_path / "copy"), "train.epochs": 3})


def test_a_renamed_image_is_noticed_when_a_run_is_resumed(train_here, tmp_path):
    from tests.fake_data import write_image_folder

    write_image_folder(tmp_path / "pets", ("ant", "bee"), per_class=6)
    train_here(RECIPE, overrides={"data.dir": str(tmp_path / "pets"), "train.epochs": 1}, run_dir=tmp_path / "run")
    shutil.copytree(tmp_path / "pets", tmp_path / "copy")
    train_here(resume=tmp_path / "run", overrides={"data.dir": str(tmp_path / "copy"), "train.epochs": 2})
    image = next((tmp_path / "copy" / "train" / "ant").iterdir())
    image.rename(image.with_stem("zebra"))
    with pytest.raises(UserError, match=r"^data.dir: the samples are in other files"):
        train_here(resume=tmp_path / "run", overrides={"data.dir": str(tmp_path / "copy"), "train.epochs": 3})
