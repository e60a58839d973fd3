import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.augment import ImageTransform, crop_and_flip, crop_padded, flip_where, normalize

IMAGES = torch.from_numpy(np.random.RandomState(0).randint(1, 256, (40, 3, 8, 8)).astype(np.uint8))


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    epoch=st.integers(0, 10_000),
    indices=st.lists(st.integers(0, 39), min_size=1, max_size=40),
)
def test_a_sample_is_augmented_the_same_in_any_batch(seed, epoch, indices):
    rows = np.array(indices)
    together = crop_and_flip(IMAGES[rows], rows, epoch, seed=seed, padding=3, flip=True)
    assert together.dtype == torch.uint8
    for position, row in enumerate(indices):
        alone = crop_and_flip(IMAGES[row : row + 1], np.array([row]), epoch, seed=seed, padding=3, flip=True)
        assert torch.equal(together[position], alone[0])


def test_seed_epoch_and_sample_all_matter():
    same = IMAGES[:1].expand(200, -1, -1, -1)
    rows = np.arange(200)
    first = crop_and_flip(same, rows, 0, seed=0, padding=3, flip=True)
    assert len({image.numpy().tobytes() for image in first}) > 60  # of 98 outcomes
    assert not torch.equal(first, crop_and_flip(same, rows, 1, seed=0, padding=3, flip=True))
    assert not torch.equal(first, crop_and_flip(same, rows, 0, seed=1, padding=3, flip=True))
    assert torch.equal(first, crop_and_flip(same, rows, 0, seed=0, padding=3, flip=True))


def test_every_offset_and_both_directions_come_up():
    pixel = torch.zeros(2000, 1, 5, 5)
    pixel[:, :, 2, 1] = 1
    moved = crop_and_flip(pixel, np.arange(2000), 0, seed=0, padding=1, flip=True)
    places = {tuple(place) for place in moved[:, 0].nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2, 3, 4)}


def test_crop_matches_slicing_one_image_at_a_time():
    tops, lefts = torch.tensor([0, 4, 2]), torch.tensor([1, 0, 4])
    cropped = crop_padded(IMAGES[:3], tops, lefts, padding=2)
    for index in range(3):
        padded = np.pad(IMAGES[index].numpy(), ((0, 0), (2, 2), (2, 2)))
        top, left = int(tops[index]), int(lefts[index])
        assert np.array_equal(cropped[index], padded[:, top : top + 8, left : left + 8])


def test_flip_mirrors_only_where_asked():
    flipped = flip_where(IMAGES[:2], torch.tensor([True, False]))
    assert np.array_equal(flipped[0], IMAGES[0].numpy()[:, :, ::-1])
    assert torch.equal(flipped[1], IMAGES[1])


def test_normalize_is_per_channel():
    images = torch.tensor([0, 255], dtype=torch.uint8).view(1, 2, 1, 1).expand(1, 2, 2, 2)
    out = normalize(images, (0.5, 0.25), (0.5, 0.25))
    assert out.dtype == torch.float32 and out.is_contiguous()
    torch.testing.assert_close(out[0, 0], torch.full((2, 2), -1.0))
    torch.testing.assert_close(out[0, 1], torch.full((2, 2), 3.0))


def test_the_transform_can_be_handed_to_a_process():
    transform = pickle.loads(pickle.dumps(ImageTransform((0.5,) * 3, (0.5,) * 3, seed=1, padding=2, flip=True)))
    rows = np.arange(5)
    images, labels = transform((IMAGES[:5], torch.arange(5)), rows, 3)
    expected = crop_and_flip(IMAGES[:5], rows, 3, seed=1, padding=2, flip=True)
    torch.testing.assert_close(images, expected.float() / 127.5 - 1)
    assert labels.tolist() == [0, 1, 2, 3, 4]
