import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from shoal.core.errors import UserError
from shoal.data.crops import MEAN, NUM_DRAWS, STD, random_crop_box
from shoal.data.image_folder import load_image_folder
from shoal.data.section import ImageFolder

from ..fake_data import write_image_folder


def section(folder, **changes):
    return ImageFolder(**{"name": "image_folder", "dir": str(folder), "size": 16, **changes})


def undo(images):
    scale = torch.tensor(STD)[:, None, None] * 255
    return images * scale + torch.tensor(MEAN)[:, None, None] * 255


def test_shapes_classes_and_labels(tmp_path):
    write_image_folder(tmp_path, ("zebra", "ant", "bee"), per_class=4)
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "ant" / "._0.png").write_text("left by a Mac")
    data = load_image_folder(section(tmp_path), seed=0)
    assert (len(data.train), len(data.val)) == (12, 6)
    assert data.spec.image_shape == (3, 16, 16) and data.spec.num_classes == 3
    assert data.train.classes == ["ant", "bee", "zebra"]
    images, labels = data.train.batch(np.array([0, 4, 11]), 0)
    assert images.shape == (3, 3, 16, 16) and images.dtype == torch.float32 and images.is_contiguous()
    assert labels.dtype == torch.int64 and labels.tolist() == [0, 1, 2]
    assert data.train.path(11) == tmp_path / "train" / "zebra" / "3.png"


def test_the_folder_may_have_the_name_of_the_source(tmp_path):
    write_image_folder(tmp_path / "image_folder")
    assert len(load_image_folder(section(tmp_path), seed=0).train) == 8


def test_the_middle_of_a_validation_image_is_cut(tmp_path):
    write_image_folder(tmp_path, ("a",), per_class=2)
    # 80 x 40, black but for a white middle: at size 35 the image becomes 80 x 40, and the cut is columns 22 to 57.
    pixels = np.zeros((40, 80, 3), np.uint8)
    pixels[:, 22:57] = 255
    Image.fromarray(pixels).save(tmp_path / "val" / "a" / "0.png")
    data = load_image_folder(section(tmp_path, size=35), seed=0)
    torch.testing.assert_close(undo(data.val.batch(np.array([0]), 0)[0]), torch.full((1, 3, 35, 35), 255.0))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_other_kinds_of_images_become_rgb(tmp_path, mode):
    write_image_folder(tmp_path, ("a",), per_class=2)
    name = "0.tiff" if mode == "CMYK" else "0.png"
    shutil.rmtree(tmp_path / "val" / "a")
    (tmp_path / "val" / "a").mkdir()
    Image.new("RGB", (20, 30), "white").convert(mode).save(tmp_path / "val" / "a" / name)
    data = load_image_folder(section(tmp_path), seed=0)
    torch.testing.assert_close(undo(data.val.batch(np.array([0]), 0)[0]), torch.full((1, 3, 16, 16), 255.0))


def test_augmentation_depends_on_seed_epoch_and_sample_only(tmp_path):
    write_image_folder(tmp_path)
    data = load_image_folder(section(tmp_path), seed=3)
    rows = np.arange(8)
    together = data.train.batch(rows, 5)[0]
    for row in rows:
        assert torch.equal(data.train.batch(np.array([row]), 5)[0][0], together[row])
    assert torch.equal(pickle.loads(pickle.dumps(data.train)).batch(rows, 5)[0], together)
    assert not torch.equal(data.train.batch(rows, 6)[0], together)
    assert not torch.equal(load_image_folder(section(tmp_path), seed=4).train.batch(rows, 5)[0], together)
    plain = load_image_folder(section(tmp_path, augment=False), seed=3)
    assert torch.equal(plain.train.batch(rows, 5)[0], plain.train.batch(rows, 6)[0])
    assert torch.equal(data.val.batch(rows[:4], 5)[0], data.val.batch(rows[:4], 6)[0])


def test_half_of_the_training_images_are_mirrored(tmp_path):
    write_image_folder(tmp_path, ("a",), per_class=1)
    ramp = np.repeat(np.arange(0, 250, 5, dtype=np.uint8)[None, :, None], 50, axis=0).repeat(3, axis=2)
    Image.fromarray(ramp).save(tmp_path / "train" / "a" / "0.png")
    data = load_image_folder(section(tmp_path), seed=0)
    rising = 0
    for epoch in range(200):
        image = data.train.batch(np.array([0]), epoch)[0][0, 0]
        rising += bool(image[:, -1].mean() > image[:, 0].mean())
    assert 70 < rising < 130


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    draws=st.lists(st.floats(0, 1, exclude_max=True), min_size=NUM_DRAWS, max_size=NUM_DRAWS),
)
def test_crop_boxes_are_inside_and_of_the_right_shape(width, height, draws):
    left, top, right, bottom = random_crop_box(width, height, np.array(draws))
    assert 0 <= left < right <= width and 0 <= top < bottom <= height
    if min(width, height) > 100:
        ratio = (right - left) / (bottom - top)
        assert 0.72 < ratio < 1.40
    if 3 / 4 < width / height < 4 / 3 and min(width, height) > 100:
        assert (right - left) * (bottom - top) >= 0.075 * width * height


def test_crop_boxes_vary_over_the_whole_range():
    boxes = [random_crop_box(400, 400, draws) for draws in np.random.RandomState(0).rand(500, NUM_DRAWS)]
    areas = [(right - left) * (bottom - top) / 160_000 for left, top, right, bottom in boxes]
    assert min(areas) < 0.1 and max(areas) > 0.9
    assert len({(left, top) for left, top, _, _ in boxes}) > 400


@pytest.mark.parametrize("kind", ["text", "truncated", "missing"])
def test_a_corrupt_image_is_named(tmp_path, kind):
    write_image_folder(tmp_path)
    data = load_image_folder(section(tmp_path), seed=0)
    path = tmp_path / "train" / "cat" / "2.png"
    whole = path.read_bytes()
    path.unlink()
    if kind != "missing":
        path.write_bytes(b"hello" if kind == "text" else whole[: len(whole) // 2])
    with pytest.raises(
        UserError, match=r"cannot be (decoded|read).*; replace the image or delete it, or .*=skip"
    ) as caught:
        data.train.batch(np.arange(8), 0)
    assert str(caught.value).startswith(f"data.dir: {path}: ")


def test_missing_folders(tmp_path):
    with pytest.raises(UserError) as caught:
        load_image_folder(section(tmp_path), seed=0)
    assert str(caught.value) == (
        f"data.dir: no folder 'train' in {tmp_path} (also looked in {tmp_path}/image_folder). "
        f"Lay the images out as {tmp_path}/train/CLASS/image.jpg and {tmp_path}/val/CLASS/image.jpg."
    )
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=f"no folder 'val' in {tmp_path}. Lay"):
        load_image_folder(section(tmp_path), seed=0)
    (tmp_path / "val").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}/train has no folders, one per class. Lay"):
        load_image_folder(section(tmp_path), seed=0)
    (tmp_path / "train" / "a").mkdir()
    (tmp_path / "val" / "a").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}/train holds no images"):
        load_image_folder(section(tmp_path), seed=0)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"^data.name: needs Pillow: pip install 'shoal\[images\]'"):
        load_image_folder(section(tmp_path), seed=0)


def test_validation_classes_must_be_known(tmp_path):
    write_image_folder(tmp_path, ("a", "b", "c"))
    shutil.rmtree(tmp_path / "val" / "a")
    data = load_image_folder(section(tmp_path), seed=0)
    assert set(data.val.batch(np.arange(len(data.val)), 0)[1].tolist()) == {1, 2}
    shutil.rmtree(tmp_path / "train" / "b")
    with pytest.raises(UserError, match=f"{tmp_path}/val has classes that {tmp_path}/train has not: b;"):
        load_image_folder(section(tmp_path), seed=0)
