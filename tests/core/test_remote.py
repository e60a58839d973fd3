"""Stores, as they are and as they fail."""

from pathlib import Path

import boto3
import pytest

from shoal.core.errors import UserError
from shoal.core.remote import Access, Remote, RemoteError
from tests.store import Proxy


def open_s3(timeout_s: float = 0.5, **settings: object) -> Remote:
    access = Access("checkpoint.upload_to", timeout_s, **settings)
    return Remote("s3://bucket/runs/", access, sleep=lambda seconds: None)


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_files_go_there_and_come_back(kind: str, s3: Proxy, tmp_path: Path) -> None:
    remote = open_s3() if kind == "s3" else Remote(f"file://{tmp_path}/store", Access("checkpoint.upload_to"))
    assert remote.names("") == [] and remote.names("none") == [] and remote.read("none") is None
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 30_000)
    remote.put(source, "one/a")
    remote.put(source, "one/b")
    remote.put(source, "two/a")
    assert remote.names("") == ["one", "two"] and remote.names("one") == ["a", "b"]
    remote.get("one/a", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == source.read_bytes() == remote.read("two/a")
    source.write_bytes(b"other")
    remote.put(source, "one/a")
    assert remote.read("one/a") == b"other", "and is replaced"
    remote.delete("one")
    remote.delete("none")
    assert remote.names("") == ["two"]


@pytest.mark.parametrize("fault", ["error", "late error", "reset", "half", "silence"])
def test_what_fails_once_is_done_all_the_same(s3: Proxy, tmp_path: Path, fault: str) -> None:
    remote = open_s3()
    source = tmp_path / "source"
    source.write_bytes(b"content" * 1000)
    for number in range(3):  # each of the first few requests fails in its turn
        asked = iter([*["ok"] * number, fault])
        s3.draw = lambda asked=asked: next(asked, "ok")
        remote.put(source, f"f/{number}")
        asked = iter([*["ok"] * number, fault])
        assert remote.read(f"f/{number}") == source.read_bytes()
        asked = iter([fault])
        assert str(number) in remote.names("f")
    assert s3.done[fault] >= 3


def test_what_keeps_failing_is_an_error_in_words(s3: Proxy, tmp_path: Path) -> None:
    s3.draw = lambda: "error"
    (tmp_path / "f").write_bytes(b"x")
    remote = open_s3()
    with pytest.raises(RemoteError, match=r"^a/f could not be uploaded to s3://bucket/runs: \w+: .*"):
        remote.put(tmp_path / "f", "a/f")
    with pytest.raises(RemoteError, match=r"^s3://bucket/runs could not be listed: "):
        remote.names("")


def test_waits_get_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    remote = Remote(f"file://{tmp_path}", Access("checkpoint.upload_to"), sleep=waits.append)

    def fails(*arguments: object, **named: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(remote._fs, "cat_file", fails)
    with pytest.raises(RemoteError, match=r"could not be read from .*: ConnectionResetError"):
        remote.read("x")
    assert len(waits) == 3 and 0.25 <= waits[0] <= 0.5 and 0.5 <= waits[1] <= 1.0 and 1.0 <= waits[2] <= 2.0


def test_an_upload_that_arrives_cut_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = Remote(f"file://{tmp_path}/store", Access("checkpoint.upload_to"), sleep=lambda seconds: None)
    (tmp_path / "f").write_bytes(b"whole")

    def cut(source: str, target: str) -> None:
        Path(target).write_bytes(b"who")

    monkeypatch.setattr(remote._fs, "put_file", cut)
    with pytest.raises(RemoteError, match="f has 3 bytes there instead of 5"):
        remote.put(tmp_path / "f", "f")


@pytest.mark.parametrize(("encryption", "key"), [("AES256", None), ("aws:kms", "arn:aws:kms:us-east-1:1:key/k")])
def test_encryption_at_rest_is_asked_for(
    s3: Proxy, s3_port: int, tmp_path: Path, encryption: str, key: str | None
) -> None:
    (tmp_path / "f").write_bytes(b"secret")
    open_s3(encryption=encryption, kms_key=key).put(tmp_path / "f", "f")
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{s3_port}")
    found = client.head_object(Bucket="bucket", Key="runs/f")
    assert found["ServerSideEncryption"] == encryption and found.get("SSEKMSKeyId") == key


def test_what_cannot_be_opened_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.upload_to: nonsense:// is not a kind of storage; use s3://"):
        Remote("nonsense://x", Access("checkpoint.upload_to"))
    for scheme in ("ftp", "http", "zip", "reference"):
        with pytest.raises(UserError, match=rf"{scheme}:// is not a kind of storage"):
            Remote(f"{scheme}://bucket/x", Access("checkpoint.upload_to"))
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    with pytest.raises(UserError, match=r"gs:// needs a package that is not there; .* pip install 'shoal\[gcs\]'"):
        Remote("gs://x", Access("checkpoint.upload_to"))
