import hashlib
import itertools
import pickle
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.augment import (
    ImageTransform,
    blend_,
    blend_labels,
    crop_and_flip,
    crop_padded,
    cut_in,
    draw_mixing,
    flip_where,
    normalize,
)

IMAGES = torch.from_numpy(np.random.RandomState(0).randint(1, 256, (40, 3, 8, 8)).astype(np.uint8))
LABELS = torch.from_numpy(np.random.RandomState(1).randint(0, 10, 40))
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
MIXED = [{"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}]
KINDS = ["mixup", "cutmix", "both"]


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="needs scipy")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]

GOLDEN = [
    ((40, 3, 8, 8), {}, "001fe7526279c09c"),
    ((40, 3, 8, 8), {"seed": 1, "padding": 3, "flip": True}, "fae173de6c6fb3d8"),
    ((40, 3, 8, 8), {"seed": -7, "flip": True}, "3f55daae74e92fcb"),
    ((33, 1, 28, 28), {"seed": 2**63 - 1, "padding": 2}, "ba67397e1d271127"),
    ((40, 3, 32, 32), {"seed": 5, "padding": 4, "flip": True}, "72a8fa433c972050"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "fields", "digest"), GOLDEN)
def test_what_a_seed_gives_never_changes_and_is_the_same_on_every_device(shape, fields, digest, device):
    images = torch.from_numpy(np.random.RandomState(0).randint(0, 256, shape).astype(np.uint8)).to(device)
    transform = ImageTransform(MEAN[: shape[1]], STD[: shape[1]], **fields)
    out, labels = transform((images, torch.arange(len(images))), np.arange(len(images)) * 7 + 3, 11)
    assert out.device == images.device and out.dtype == torch.float32 and out.is_contiguous()
    assert hashlib.sha256(out.cpu().numpy().tobytes()).hexdigest()[:16] == digest
    assert torch.equal(labels, torch.arange(len(images)))


def test_memory_may_be_laid_out_in_any_way():
    pixels = np.random.RandomState(0).randint(0, 256, (10, 9, 7, 3)).astype(np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    out, _ = ImageTransform((0.5,) * 3, (0.25,) * 3, 3, 2, True)((images, torch.arange(10)), np.arange(10), 2)
    assert out.is_contiguous() and hashlib.sha256(out.numpy().tobytes()).hexdigest()[:16] == "7687d650ee1b8997"


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


def test_a_large_batch_is_normalized_to_the_same_bits_as_its_images_alone():
    images = torch.randint(0, 256, (7, 3, 150, 150), dtype=torch.uint8)
    together = normalize(images, MEAN, STD)
    assert together.is_contiguous()
    assert torch.equal(together, torch.cat([normalize(image[None], MEAN, STD) for image in images]))
    upright = images.transpose(-1, -2)
    assert torch.equal(normalize(upright, MEAN, STD), together.transpose(-1, -2))


def test_the_transform_can_be_handed_to_a_process():
    transform = pickle.loads(pickle.dumps(ImageTransform((0.5,) * 3, (0.5,) * 3, seed=1, padding=2, flip=True)))
    rows = np.arange(5)
    images, labels = transform((IMAGES[:5], torch.arange(5)), rows, 3)
    expected = crop_and_flip(IMAGES[:5], rows, 3, seed=1, padding=2, flip=True)
    torch.testing.assert_close(images, expected.float() / 127.5 - 1)
    assert labels.tolist() == [0, 1, 2, 3, 4]


@needs_scipy
@given(
    fields=st.sampled_from(MIXED),
    seed=st.integers(-(2**63), 2**63 - 1),
    epoch=st.integers(0, 10_000),
    indices=st.lists(st.integers(0, 10**9), min_size=1, max_size=40),
    cuts=st.lists(st.integers(0, 19).map(lambda half: 2 * half)),
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
)
def test_mixing_gives_the_same_however_a_batch_is_cut_into_even_pieces(fields, seed, epoch, indices, cuts, size):
    rows = np.array(indices)
    images = torch.from_numpy(np.random.RandomState(2).randint(0, 256, (len(rows), 3, *size)).astype(np.uint8))
    labels = LABELS[: len(rows)]
    transform = ImageTransform(MEAN, STD, seed, padding=1, flip=True, num_classes=10, **fields)
    whole_images, whole_labels = transform((images, labels), rows, epoch)
    bounds = sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))})
    pieces = [
        transform((images[start:end], labels[start:end]), rows[start:end], epoch)
        for start, end in itertools.pairwise(bounds)
    ]
    assert torch.equal(torch.cat([piece[0] for piece in pieces]), whole_images)
    assert torch.equal(torch.cat([piece[1] for piece in pieces]), whole_labels)


@needs_scipy
@pytest.mark.parametrize("fields", MIXED, ids=KINDS)
@pytest.mark.parametrize("num_images", [1, 2, 39, 40])
def test_mixing_is_what_it_is_one_sample_at_a_time(fields, num_images):
    """The definition, sample by sample, from the same draws."""
    rows = np.arange(num_images)
    draws = {"mixup": 0.0, "cutmix": 0.0} | fields
    mixing = draw_mixing(4, 1, rows, height=8, width=8, **draws)
    transform = ImageTransform(MEAN, STD, 4, num_classes=10, **fields)
    before = IMAGES[:num_images].clone()
    images, labels = transform((before, LABELS[:num_images]), rows, 1)
    assert torch.equal(before, IMAGES[:num_images]), "the batch that is given stays as it is"
    assert images.dtype == labels.dtype == torch.float32 and labels.shape == (num_images, 10)
    plain = normalize(before, MEAN, STD)
    for index in range(num_images):
        other = min(index ^ 1, num_images - 1)
        weight = float(mixing.weights[index])
        top, bottom, left, right = mixing.boxes[index]
        if mixing.is_cut[index]:
            expected = plain[index].clone()
            expected[:, top:bottom, left:right] = plain[other, :, top:bottom, left:right]
            assert torch.equal(images[index], expected)
            assert weight == pytest.approx((bottom - top) * (right - left) / 64)
        else:
            assert (bottom - top) * (right - left) == 0
            torch.testing.assert_close(images[index], plain[index] * (1 - weight) + plain[other] * weight)
        probabilities = torch.zeros(10)
        probabilities[LABELS[index]] += 1 - weight
        probabilities[LABELS[other]] += weight
        torch.testing.assert_close(labels[index], probabilities)
    if num_images % 2:
        assert torch.equal(images[-1], plain[-1]) and labels[-1].max() == 1, "who has no neighbour stays as it is"


@needs_gpu
@needs_scipy
@pytest.mark.parametrize("fields", MIXED, ids=KINDS)
def test_mixing_gives_the_same_bits_on_a_gpu(fields):
    transform = ImageTransform(MEAN, STD, 4, padding=2, flip=True, num_classes=10, **fields)
    rows = np.arange(39)
    here = transform((IMAGES[:39], LABELS[:39]), rows, 1)
    there = transform((IMAGES[:39].cuda(), LABELS[:39].cuda()), rows, 1)
    assert all(torch.equal(mine, other.cpu()) for mine, other in zip(here, there, strict=True))


@needs_gpu
@needs_scipy
@pytest.mark.parametrize("fields", [{}, *MIXED], ids=["plain", *KINDS])
def test_nothing_waits_for_the_gpu(fields):
    transform = ImageTransform(MEAN, STD, 4, padding=2, flip=True, num_classes=10, **fields)
    batch = IMAGES.cuda(), LABELS.cuda()
    transform(batch, np.arange(40), 0)  # means and deviations are copied once
    torch.cuda.set_sync_debug_mode("error")
    try:
        transform(batch, np.arange(40), 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_scipy
@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_shares_are_spread_as_the_beta_distribution_says(alpha):
    rows = np.arange(20_000)
    mixing = draw_mixing(0, 0, rows, mixup=alpha, cutmix=0, height=8, width=8)
    assert mixing.weights.mean() == pytest.approx(0.5, abs=0.01)
    assert mixing.weights.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)
    assert abs(np.corrcoef(mixing.weights[0::2], mixing.weights[1::2])[0, 1]) < 0.03, "each has its own"


@needs_scipy
def test_boxes_are_of_the_drawn_area_where_they_are_whole_and_may_lie_anywhere():
    rows = np.arange(20_000)
    mixing = draw_mixing(0, 0, rows, mixup=0, cutmix=1.0, height=100, width=200)
    drawn = draw_mixing(0, 0, rows, mixup=1.0, cutmix=0, height=100, width=200).weights
    top, bottom, left, right = mixing.boxes.T
    assert top.min() == left.min() == 0 and bottom.max() == 100 and right.max() == 200
    assert np.all(top <= bottom) and np.all(left <= right)
    inside = (top > 0) & (left > 0) & (bottom < 100) & (right < 200)
    assert inside.sum() > 1000
    np.testing.assert_allclose(mixing.weights[inside], drawn[inside], atol=0.03)
    assert np.all(mixing.weights <= drawn + 1e-6), "what lies outside of the image is not counted"
    middles = (left + right)[inside] / 2
    assert middles.mean() == pytest.approx(100, abs=2)


@needs_scipy
def test_mixup_and_cutmix_each_take_half_and_draws_do_not_hang_together():
    rows = np.arange(20_000)
    mixing = draw_mixing(0, 0, rows, mixup=1.0, cutmix=1.0, height=64, width=64)
    assert mixing.is_cut.mean() == pytest.approx(0.5, abs=0.02)
    flipped = crop_and_flip(torch.arange(2.0).expand(20_000, 1, 1, 2), rows, 0, seed=0, padding=0, flip=True)
    shares = draw_mixing(0, 0, rows, mixup=1.0, cutmix=0, height=64, width=64).weights
    values = np.array([mixing.is_cut, flipped[:, 0, 0, 0].numpy(), shares], dtype=np.float64)
    correlations = np.corrcoef(values) - np.eye(3)
    assert np.abs(correlations).max() < 0.03


def test_a_box_is_cut_in_from_the_neighbour():
    boxes = torch.tensor([[1, 3, 2, 5], [0, 0, 0, 0], [0, 8, 0, 8]])
    out = cut_in(IMAGES[:3], boxes)
    expected = IMAGES[:3].clone()
    expected[0, :, 1:3, 2:5] = IMAGES[1, :, 1:3, 2:5]
    assert torch.equal(out, expected)
    assert torch.equal(cut_in(IMAGES[:3].float(), boxes), expected.float())


def test_blending_is_linear_and_labels_follow():
    images = torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1, 1)
    weights = torch.tensor([0.25, 0.5, 0.0])
    assert blend_(images, images[1:2] - images[:1], weights).flatten().tolist() == [1.5, 2.0, 5.0]
    probabilities = blend_labels(torch.tensor([0, 2, 1]), weights, 3)
    assert probabilities.tolist() == [[0.75, 0, 0.25], [0.5, 0, 0.5], [0, 1, 0]]
    assert blend_labels(torch.tensor([1, 1]), weights[:2], 2).tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mixup": 0.2}, "num_classes"),
        ({"cutmix": 1.0}, "num_classes"),
        ({"mixup": -1.0}, "mixup"),
        ({"cutmix": float("nan")}, "cutmix"),
        ({"mixup": float("inf"), "num_classes": 3}, "mixup"),
    ],
)
def test_what_cannot_be_mixed_is_told(fields, name):
    with pytest.raises(ValueError, match=name):
        ImageTransform(MEAN, STD, **fields)


@needs_scipy
def test_a_label_that_is_no_class_is_not_mixed_silently():
    transform = ImageTransform(MEAN, STD, mixup=0.2, num_classes=5)
    with pytest.raises(RuntimeError, match="num_classes"):
        transform((IMAGES[:2], torch.tensor([1, 5])), np.arange(2), 0)
