import hashlib
import io
import logging
import os
import signal
import socket
import subprocess
import sys
import tarfile
import time

import pytest

from shoal.core.errors import UserError
from shoal.data import download
from shoal.data.download import DownloadError, PublicFile, fetch_archive, fetch_file, find_or_fetch, search_folders

from .file_server import serve

CONTENT = bytes(range(256)) * 2000
GOOD = "sha256:" + hashlib.sha256(CONTENT).hexdigest()

FETCH = """
import sys
from pathlib import Path
from shoal.data.download import PublicFile, fetch_file
print(fetch_file(PublicFile("data.bin", sys.argv[2], (sys.argv[3],)), Path(sys.argv[1])))
"""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with serve() as server:
        server.files["data.bin"] = CONTENT
        yield server


def public(*urls, checksum=GOOD, name="data.bin"):
    return PublicFile(name, checksum, urls)


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def refused_url():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}/data.bin"


def test_a_download_is_whole_and_leaves_only_the_file(server, tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="shoal.data")
    path = fetch_file(public(server.url("data.bin")), tmp_path / "new" / "set")
    assert path.read_bytes() == CONTENT
    assert names(tmp_path) == ["new", "new/set", "new/set/data.bin"]
    assert "downloading" in caplog.text and "downloaded" in caplog.text and "0.5 MB" in caplog.text


def test_progress_is_logged_on_the_way(server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(download, "PROGRESS_EVERY_S", -1.0)
    caplog.set_level(logging.INFO, logger="shoal.data")
    fetch_file(public(server.url("data.bin")), tmp_path)
    assert "0.3 MB of 0.5 MB" in caplog.text


def test_md5_checksums_work_too(server, tmp_path):
    checksum = "md5:" + hashlib.md5(CONTENT).hexdigest()
    assert fetch_file(public(server.url("data.bin"), checksum=checksum), tmp_path).read_bytes() == CONTENT


def test_a_present_file_is_used_and_nothing_is_written(server, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "data.bin").write_bytes(b"the user's own")
    before = (tmp_path / "set").stat().st_mtime_ns
    folders = search_folders(str(tmp_path), "set")
    found = find_or_fetch(folders, ["data.bin"], public(server.url("data.bin")), download=True)
    assert found.read_bytes() == b"the user's own"
    assert server.hits == []
    assert (tmp_path / "set").stat().st_mtime_ns == before
    (tmp_path / "data.bin").write_bytes(b"nearer")
    assert find_or_fetch(folders, ["data.bin"]).read_bytes() == b"nearer"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_a_folder_that_may_not_be_looked_into(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(UserError, match=r"data.dir: cannot look into .*/closed: Permission denied"):
        find_or_fetch(search_folders(str(tmp_path / "closed")), ["data.bin"])


def test_home_is_expanded(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert search_folders("~/data", "mnist") == [tmp_path / "data", tmp_path / "data" / "mnist"]


def test_a_wrong_checksum_is_named_and_nothing_stays(server, tmp_path):
    wrong = "sha256:" + "0" * 64
    with pytest.raises(UserError) as caught:
        fetch_file(public(server.url("data.bin"), checksum=wrong), tmp_path / "set")
    assert str(caught.value).startswith("data.dir: data.bin from ")
    assert wrong in str(caught.value) and GOOD in str(caught.value)
    assert names(tmp_path) == []


def test_a_mismatch_is_not_hidden_by_the_next_mirror_failing(server, tmp_path):
    server.files["page.html"] = b"<html>please log in</html>"
    with pytest.raises(UserError, match=r"page.html is not the file that was published: expected sha256"):
        fetch_file(public(server.url("page.html"), server.url("missing")), tmp_path)
    assert names(tmp_path) == []


def test_mirrors_are_tried_in_order(server, tmp_path):
    server.files["page.html"] = b"<html>please log in</html>"
    urls = (refused_url(), server.url("missing"), server.url("page.html"), server.url("data.bin"), server.url("never"))
    assert fetch_file(public(*urls), tmp_path).read_bytes() == CONTENT
    assert server.hits == ["missing", "page.html", "data.bin"]
    assert names(tmp_path) == ["data.bin"]


def test_the_message_when_the_server_has_no_such_file(server, tmp_path):
    url = server.url("missing")
    with pytest.raises(UserError) as caught:
        find_or_fetch(search_folders(str(tmp_path), "set", "other"), ["data.bin"], public(url), download=True)
    assert str(caught.value) == (
        f"data.dir: data.bin not found in {tmp_path} (also looked in {tmp_path}/set, {tmp_path}/other), "
        f"and downloading failed ({url}: HTTP 404 Not Found). Fetch {url} and put it in {tmp_path}/set/."
    )
    assert names(tmp_path) == []


def test_the_message_without_downloading(tmp_path):
    with pytest.raises(UserError) as caught:
        find_or_fetch(search_folders(str(tmp_path), "set"), ["data.bin"], public("http://host/data.bin"))
    assert str(caught.value) == (
        f"data.dir: data.bin not found in {tmp_path} (also looked in {tmp_path}/set). "
        f"Fetch http://host/data.bin and put it in {tmp_path}/set/."
    )


def test_the_message_for_a_file_that_only_the_user_has(tmp_path):
    with pytest.raises(UserError) as caught:
        find_or_fetch(search_folders(str(tmp_path), "set"), ["mine.csv", "mine.csv.gz"], None, download=True)
    assert str(caught.value) == (
        f"data.dir: mine.csv not found in {tmp_path} (also looked in {tmp_path}/set). Put it in {tmp_path}."
    )


def test_connection_refused(tmp_path):
    with pytest.raises(DownloadError, match="Connection refused"):
        fetch_file(public(refused_url()), tmp_path / "set")
    assert names(tmp_path) == []


def test_a_body_that_ends_early_is_not_kept(server, tmp_path):
    server.half.add("data.bin")
    server.resume.set()
    with pytest.raises(DownloadError, match="closed after 256,000 of 512,000 bytes"):
        fetch_file(public(server.url("data.bin")), tmp_path / "set")
    assert names(tmp_path) == []


def test_a_silent_server_is_given_up(server, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    server.half.add("data.bin")
    started = time.monotonic()
    with pytest.raises(DownloadError, match="timed out"):
        fetch_file(public(server.url("data.bin")), tmp_path / "set")
    assert time.monotonic() - started < 10
    assert names(tmp_path) == []


def test_nowhere_to_write(server, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"downloading failed \(cannot write to .*/file/set: Not a directory\)"):
        find_or_fetch(
            search_folders(str(tmp_path / "file"), "set"), ["data.bin"], public(server.url("data.bin")), download=True
        )
    assert server.hits == []


def start_fetch(folder, server):
    # In a group of its own, as a command in a terminal: the signal meant for it does not reach the tests.
    command = [sys.executable, "-c", FETCH, str(folder), GOOD, server.url("data.bin")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def wait_for_half(folder):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if any(path.stat().st_size > 0 for path in folder.glob(".data.bin.part")):
            return
        time.sleep(0.01)
    pytest.fail("the download did not start")


def test_an_interrupted_download_leaves_nothing(server, tmp_path):
    server.files["data.bin"] = CONTENT * 10
    server.half.add("data.bin")
    process = start_fetch(tmp_path / "set", server)
    wait_for_half(tmp_path / "set")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert b"KeyboardInterrupt" in errors
    assert names(tmp_path) == []


def test_a_killed_download_leaves_no_file_and_the_next_one_cleans_up(server, tmp_path):
    server.files["data.bin"] = big = CONTENT * 10
    checksum = "sha256:" + hashlib.sha256(big).hexdigest()
    server.half.add("data.bin")
    process = start_fetch(tmp_path, server)
    wait_for_half(tmp_path)
    process.kill()
    process.communicate(timeout=30)
    assert not (tmp_path / "data.bin").exists()
    assert ".data.bin.part" in names(tmp_path)
    server.half.clear()
    assert fetch_file(public(server.url("data.bin"), checksum=checksum), tmp_path).read_bytes() == big
    assert names(tmp_path) == ["data.bin"]


def test_many_processes_download_once(server, tmp_path):
    server.delay_s = 1.0
    processes = [start_fetch(tmp_path / "set", server) for _ in range(4)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, results
    assert {out.decode().strip() for out, _ in results} == {str(tmp_path / "set" / "data.bin")}
    assert server.hits == ["data.bin"]
    assert names(tmp_path / "set") == ["data.bin"]
    assert (tmp_path / "set" / "data.bin").read_bytes() == CONTENT


def test_those_who_wait_take_over_when_the_first_is_killed(server, tmp_path):
    server.delay_s = 30.0
    first = start_fetch(tmp_path / "set", server)
    while not server.hits and first.poll() is None:
        time.sleep(0.01)
    second = start_fetch(tmp_path / "set", server)
    time.sleep(0.5)
    assert second.poll() is None
    first.kill()
    server.resume.set()
    first.communicate(timeout=30)
    _, errors = second.communicate(timeout=30)
    assert second.returncode == 0, errors
    assert names(tmp_path / "set") == ["data.bin"]


def tar_of(members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_an_archive_leaves_only_the_expected_members(server, tmp_path):
    content = tar_of({"in/a": b"A", "in/b": b"B", "in/extra": b"X", "../escape": b"E", "in/link": None})
    server.files["all.tar.gz"] = content
    archive = public(
        server.url("all.tar.gz"), checksum="sha256:" + hashlib.sha256(content).hexdigest(), name="all.tar.gz"
    )
    (tmp_path / "set" / "in").mkdir(parents=True)
    (tmp_path / "set" / "in" / "a").write_bytes(b"old")
    fetch_archive(archive, tmp_path / "set", ["in/a", "in/b"])
    assert names(tmp_path) == ["set", "set/in", "set/in/a", "set/in/b"]
    assert (tmp_path / "set/in/a").read_bytes() == b"A"
    fetch_archive(archive, tmp_path / "set", ["in/a", "in/b"])
    assert server.hits == ["all.tar.gz"]


def test_an_archive_with_a_wrong_checksum_is_not_opened(server, tmp_path):
    server.files["all.tar.gz"] = tar_of({"in/a": b"A"})
    with pytest.raises(UserError, match="expected sha256"):
        fetch_archive(public(server.url("all.tar.gz"), name="all.tar.gz"), tmp_path / "set", ["in/a"])
    assert names(tmp_path) == []


def test_downloading_needs_no_torch(tmp_path):
    code = "import sys, shoal.data.download; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
