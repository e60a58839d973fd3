import hashlib
import io
import os
import pickle
import tarfile

import numpy as np
import pytest
import torch

from shoal.core.errors import UserError
from shoal.data import cifar
from shoal.data.cifar import MEAN, STD, load_cifar10, parse_pickle_batch
from shoal.data.download import PublicFile
from shoal.data.section import Cifar10

from ..fake_data import cifar_bin_bytes, python2_batch, striped_images, write_cifar_bin, write_cifar_py
from .file_server import serve


def section(folder, **changes):
    return Cifar10(**{"name": "cifar10", "dir": str(folder), "download": False, "augment": False, **changes})


def archive_bytes(leave_out=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for seed, name in enumerate(cifar.BINARY_FILES):
            if name not in leave_out:
                content = cifar_bin_bytes(seed, 20)
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        for name in ("cifar-10-batches-bin/readme.html", "../escaped"):
            tar.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


@pytest.mark.parametrize("write", [write_cifar_bin, write_cifar_py])
@pytest.mark.parametrize("place", [".", "cifar10"])
def test_both_versions_hold_the_same(tmp_path, write, place):
    write(tmp_path / place, per_batch=20)
    data = load_cifar10(section(tmp_path), seed=0)
    assert (len(data.train), len(data.val)) == (100, 20)
    assert data.spec.image_shape == (3, 32, 32) and data.spec.num_classes == 10
    images, labels = data.train.batch(np.array([27, 99]), 0)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64 and labels.tolist() == [7, 9]
    pixels = torch.from_numpy(striped_images(np.arange(20) % 10, 3, 32, seed=1)[7]).float() / 255
    torch.testing.assert_close(
        images[0], (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    )


def test_dir_may_be_the_folder_of_the_batches(tmp_path):
    write_cifar_py(tmp_path)
    assert len(load_cifar10(section(tmp_path / "cifar-10-batches-py"), seed=0).train) == 100


def test_an_archive_put_there_by_hand_is_read_in_place(tmp_path):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive_bytes())
    data = load_cifar10(section(tmp_path), seed=0)
    assert (len(data.train), len(data.val)) == (100, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-binary.tar.gz"]


@pytest.mark.parametrize(
    "content",
    [archive_bytes()[:-2000], b"not a tar", archive_bytes(leave_out=[cifar.BINARY_FILES[2]])],
    ids=["truncated", "garbage", "member missing"],
)
def test_a_broken_archive(tmp_path, content):
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is not the whole archive") as caught:
        load_cifar10(section(tmp_path), seed=0)
    assert str(caught.value).startswith(f"data.dir: {path}: ")


def test_download_extracts_what_is_needed(tmp_path, monkeypatch):
    content = archive_bytes()
    with serve() as server:
        server.files["cifar.tar.gz"] = content
        checksum = "md5:" + hashlib.md5(content).hexdigest()
        public = PublicFile("cifar-10-binary.tar.gz", checksum, (server.url("cifar.tar.gz"),))
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(cifar, "ARCHIVE", public)
        folder = tmp_path / "data"
        for _ in range(2):
            assert len(load_cifar10(section(folder, download=True), seed=0).train) == 100
        assert server.hits == ["cifar.tar.gz"]
        assert sorted(
            str(path.relative_to(folder / "cifar10")) for path in folder.rglob("*") if path.is_file()
        ) == sorted(cifar.BINARY_FILES)
        # "delete it to download it again" holds
        (folder / "cifar10" / cifar.BINARY_FILES[3]).unlink()
        assert len(load_cifar10(section(folder, download=True), seed=0).train) == 100
        assert len(server.hits) == 2


def test_a_failed_download_says_what_to_fetch(tmp_path, monkeypatch):
    with serve() as server:
        url = server.url("cifar.tar.gz")
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setattr(cifar, "ARCHIVE", PublicFile("cifar-10-binary.tar.gz", "md5:0", (url,)))
        with pytest.raises(UserError) as caught:
            load_cifar10(section(tmp_path, download=True), seed=0)
    assert str(caught.value) == (
        f"data.dir: cifar-10-batches-bin/data_batch_1.bin not found in {tmp_path} (also looked in {tmp_path}/cifar10), "
        f"and downloading failed ({url}: HTTP 404 Not Found). Fetch {url} and put it in {tmp_path}/cifar10/."
    )
    assert list(tmp_path.iterdir()) == []


def test_augmentation_is_for_training(tmp_path):
    write_cifar_bin(tmp_path)
    plain, data = load_cifar10(section(tmp_path), seed=0), load_cifar10(section(tmp_path, augment=True), seed=0)
    rows = np.arange(20)
    assert not torch.equal(plain.train.batch(rows, 0)[0], data.train.batch(rows, 0)[0])
    assert not torch.equal(data.train.batch(rows, 1)[0], data.train.batch(rows, 0)[0])
    assert torch.equal(plain.val.batch(rows, 0)[0], data.val.batch(rows, 1)[0])
    assert torch.equal(pickle.loads(pickle.dumps(data.train)).batch(rows, 0)[0], data.train.batch(rows, 0)[0])


def test_the_message_for_missing_files(tmp_path):
    with pytest.raises(UserError) as caught:
        load_cifar10(section(tmp_path), seed=0)
    assert str(caught.value) == (
        f"data.dir: cifar-10-batches-bin/data_batch_1.bin not found in {tmp_path} (also looked in {tmp_path}/cifar10). "
        f"Fetch https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz and put it in {tmp_path}/cifar10/."
    )
    write_cifar_py(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_4").unlink()
    with pytest.raises(UserError, match="cifar-10-batches-py/data_batch_4 not found"):
        load_cifar10(section(tmp_path), seed=0)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (cifar_bin_bytes(0, 3)[:-1], "9,218 bytes is not a whole number of records of 3,073 bytes"),
        (b"\x0a" + bytes(3072), "label 10 of image 0 is not in 0..9"),
    ],
)
def test_broken_binary_batches(tmp_path, content, problem):
    write_cifar_bin(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_2.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem) as caught:
        load_cifar10(section(tmp_path, download=True), seed=0)
    assert str(caught.value).startswith(f"data.dir: {path}: ")
    assert str(caught.value).endswith("delete it to download it again")


class Malicious:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_malicious_pickle_is_refused_and_does_not_run(tmp_path, protocol):
    write_cifar_py(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    marker = tmp_path / "was_here"
    path.write_bytes(pickle.dumps({"data": Malicious(marker)}, protocol=protocol))
    with pytest.raises(UserError, match=r"it names (posix|os)\.mkdir, which no such file does: not opened") as caught:
        load_cifar10(section(tmp_path), seed=0)
    assert str(path) in str(caught.value)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()  # the pickle does what it is meant to where it is trusted


@pytest.mark.parametrize("name", [("builtins", "eval"), ("numpy", "load"), ("numpy.core.multiarray", "fromfile")])
def test_only_the_names_of_an_array_are_known(name, tmp_path):
    content = f"c{name[0]}\n{name[1]}\n(S'1'\ntR.".encode()
    with pytest.raises(UserError, match=f"it names {name[0]}.{name[1]}"):
        parse_pickle_batch(content, tmp_path / "batch")


def test_a_pickle_of_todays_python_is_read_as_well(tmp_path):
    pixels = np.random.RandomState(0).randint(0, 256, (4, 3072)).astype(np.uint8)
    for protocol in (3, 4):
        content = pickle.dumps({b"data": pixels, b"labels": [0, 1, 2, 3]}, protocol=protocol)
        images, labels = parse_pickle_batch(content, tmp_path / "batch")
        assert np.array_equal(images, pixels.reshape(4, 3, 32, 32)) and labels.tolist() == [0, 1, 2, 3]


PIXELS = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        b"garbage",
        b"\x80\x02",
        python2_batch(PIXELS, [0, 1])[:-50],
        python2_batch(PIXELS, [0]),
        python2_batch(PIXELS, [0, 11]),
        python2_batch(PIXELS[:, :100], [0, 1]),
        pickle.dumps([1, 2], protocol=3),
        pickle.dumps({b"labels": [1]}, protocol=3),
        pickle.dumps({b"data": PIXELS.astype(np.float32), b"labels": [0, 1]}, protocol=3),
        pickle.dumps(
            {
                b"data": np.asfortranarray(np.arange(6144).reshape(2, 3072) % 7).astype(np.uint8, order="F"),
                b"labels": [0, 1],
            },
            protocol=3,
        ),
        pickle.dumps({b"data": PIXELS, b"labels": ["0", "1"]}, protocol=3),
        python2_batch(PIXELS, [0, 1]).replace(
            b"J" + (2).to_bytes(4, "little") + b"J\x00\x0c", b"J" + (3).to_bytes(4, "little") + b"J\x00\x0c"
        ),
    ],
    ids=[
        "garbage",
        "header only",
        "truncated",
        "few labels",
        "label 11",
        "narrow",
        "list",
        "no data",
        "float",
        "columns",
        "text",
        "lie",
    ],
)
def test_broken_pickles(tmp_path, content):
    with pytest.raises(UserError, match=f"data.dir: {tmp_path / 'batch'}: "):
        parse_pickle_batch(content, tmp_path / "batch")
