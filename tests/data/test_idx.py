import gzip
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.core.errors import UserError
from shoal.data import idx
from shoal.data.idx import load_mnist, read_idx
from shoal.data.section import Mnist

from ..fake_data import idx_bytes, striped_images, write_idx
from .file_server import serve

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def section(folder, **changes):
    return Mnist(**{"name": "mnist", "dir": str(folder), "download": False, **changes})


@pytest.mark.parametrize("gzipped", [True, False])
@pytest.mark.parametrize("place", [".", "mnist", "MNIST/raw"])
def test_images_are_read_and_normalised(tmp_path, gzipped, place):
    write_idx(tmp_path / place, 30, 20, size=12, gzipped=gzipped)
    data = load_mnist(section(tmp_path), seed=0)
    assert (len(data.train), len(data.val)) == (30, 20)
    assert data.spec.image_shape == (1, 12, 12) and data.spec.num_classes == 10
    assert data.train.tensors[0].dtype == torch.uint8
    rows = np.array([3, 17])
    images, labels = data.train.batch(rows, 0)
    assert images.dtype == torch.float32 and labels.dtype == torch.int64 and labels.tolist() == [3, 7]
    pixels = striped_images(np.arange(30) % 10, 1, 12, seed=1)[rows].astype(np.float32)
    torch.testing.assert_close(images, torch.from_numpy((pixels / 255 - 0.1307) / 0.3081))


def test_augmentation_shifts_training_images_only(tmp_path):
    write_idx(tmp_path)
    plain = load_mnist(section(tmp_path), seed=0)
    data = load_mnist(section(tmp_path, augment=True), seed=0)
    rows = np.arange(50)
    assert torch.equal(data.val.batch(rows, 0)[0], plain.val.batch(rows, 1)[0])
    shifted = data.train.batch(rows, 0)[0]
    assert not torch.equal(shifted, plain.train.batch(rows, 0)[0])
    assert not torch.equal(shifted, data.train.batch(rows, 1)[0])
    assert not torch.equal(shifted, load_mnist(section(tmp_path, augment=True), seed=1).train.batch(rows, 0)[0])
    assert torch.equal(shifted, pickle.loads(pickle.dumps(data.train)).batch(rows, 0)[0])
    # Two pixels at most: the middle 24 x 24 of the image is inside every result.
    middle = plain.train.batch(rows, 0)[0][:, 0, 2:-2, 2:-2]
    windows = shifted[:, 0].unfold(1, 24, 1).unfold(2, 24, 1)
    assert (windows == middle[:, None, None]).flatten(3).all(-1).flatten(1).any(1).all()


def test_fashion_mnist_has_its_own_folders_and_numbers(tmp_path):
    write_idx(tmp_path / "FashionMNIST" / "raw", 10, 10, size=4)
    data = load_mnist(section(tmp_path, name="fashion_mnist"), seed=0)
    assert data.train.batch_transform.mean == (0.2860,)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz not found"):
        load_mnist(section(tmp_path), seed=0)


def test_the_message_for_missing_files(tmp_path):
    with pytest.raises(UserError) as caught:
        load_mnist(section(tmp_path), seed=0)
    url = "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz"
    assert str(caught.value) == (
        f"data.dir: train-images-idx3-ubyte.gz not found in {tmp_path} (also looked in {tmp_path}/mnist, "
        f"{tmp_path}/MNIST/raw). Fetch {url} and put it in {tmp_path}/mnist/."
    )


def test_download_from_the_second_mirror(tmp_path, monkeypatch):
    write_idx(tmp_path / "origin", 20, 10)
    with serve() as server:
        contents = {path.name: path.read_bytes() for path in (tmp_path / "origin").iterdir()}
        server.files.update({f"good/{name}": content for name, content in contents.items()})
        checksums = {name[:-3]: "md5:" + hashlib.md5(content).hexdigest() for name, content in contents.items()}
        monkeypatch.setenv("no_proxy", "*")
        monkeypatch.setitem(idx.MIRRORS, "mnist", (server.url("bad/"), server.url("good/")))
        monkeypatch.setitem(idx.CHECKSUMS, "mnist", checksums)
        data = load_mnist(section(tmp_path / "data", download=True), seed=0)
        assert (len(data.train), len(data.val)) == (20, 10)
        assert sorted(path.name for path in (tmp_path / "data" / "mnist").iterdir()) == sorted(contents)
        assert len(server.hits) == 8
        load_mnist(section(tmp_path / "data", download=True), seed=0)
        assert len(server.hits) == 8


def good(images=5, size=4):
    return idx_bytes(striped_images(np.arange(images) % 10, 1, size, 0)[:, 0])


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"<html>not found</html>", r"is not the idx file it should be \(starts with 3c68746d, not 00000803\)"),
        (idx_bytes(np.zeros(5, np.uint8)), "starts with 00000801, not 00000803"),
        (good()[:11], "ends within the idx header"),
        (good()[:-1], r"holds 79 bytes of data where its header says 80 \(shape \(5, 4, 4\)\)"),
        (good() + b"\0", "holds 81 bytes of data where its header says 80"),
        (good(0), "holds no data"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "where its header says 79,228,162,4"),
        (gzip.compress(good(50, 28), mtime=0)[:-20], "gzip data ends too early"),
        (gzip.compress(good(), mtime=0)[:10] + b"\xff" * 60, "gzip data is damaged"),
        (gzip.compress(good(), mtime=0)[:-8] + b"\0" * 8, "gzip data is damaged"),
    ],
)
def test_broken_image_files(tmp_path, content, problem):
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=problem) as caught:
        load_mnist(section(tmp_path, download=True), seed=0)
    assert str(caught.value).startswith(f"data.dir: {path}: ")
    assert str(caught.value).endswith("; delete it to download it again")
    with pytest.raises(UserError, match="replace it with a whole copy"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    ("name", "array", "problem"),
    [
        ("train-labels-idx1-ubyte", np.zeros(9, np.uint8), "holds 9 labels for the 10 images of"),
        ("train-labels-idx1-ubyte", np.arange(10, dtype=np.uint8) + 1, "label 10 of image 9 is not in 0..9"),
        ("t10k-images-idx3-ubyte", np.zeros((10, 5, 4), np.uint8), r"images are \(5, 4\) pixels"),
    ],
)
def test_files_that_do_not_fit_together(tmp_path, name, array, problem):
    write_idx(tmp_path, 10, 10, size=4, gzipped=False)
    (tmp_path / name).write_bytes(idx_bytes(array))
    with pytest.raises(UserError, match=problem) as caught:
        load_mnist(section(tmp_path), seed=0)
    assert str(caught.value).startswith(f"data.dir: {tmp_path / name}: ")


@pytest.mark.skipif(not (SHARED / "mnist").is_dir(), reason="no MNIST in ../shared/data")
def test_the_real_files():
    data = load_mnist(section(SHARED, download=True), seed=0)
    assert (len(data.train), len(data.val)) == (60_000, 10_000)
    images, labels = data.train.batch(np.arange(60_000), 0)
    assert abs(float(images.mean())) < 0.001 and abs(float(images.std()) - 1) < 0.001
    assert labels[:5].tolist() == [5, 0, 4, 1, 9]
