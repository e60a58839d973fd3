import numpy as np
import torch

from shoal.data.digits import load_digits
from shoal.data.section import Digits


def test_shapes_range_and_sizes():
    data = load_digits(Digits(name="digits"))
    images, labels = data.train.batch(np.arange(10), 0)
    assert images.shape == (10, 1, 8, 8) and images.dtype == torch.float32 and labels.dtype == torch.int64
    everything = torch.cat([data.train.tensors[0], data.val.tensors[0]])
    assert float(everything.min()) == 0 and float(everything.max()) == 1
    assert (len(data.train), len(data.val)) == (1438, 359)
    assert data.spec.image_shape == (1, 8, 8) and data.spec.num_classes == 10


def test_the_split_is_fixed_and_covers_everything_once():
    first, second = load_digits(Digits(name="digits")), load_digits(Digits(name="digits"))
    assert torch.equal(first.val.tensors[0], second.val.tensors[0])
    # Frozen: a different split would make old validation numbers incomparable.
    assert first.val.tensors[1][:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]
    parts = [image.numpy().tobytes() for part in (first.train, first.val) for image in part.tensors[0]]
    from sklearn.datasets import load_digits as original

    pixels = original().images.astype(np.float32) / 16
    assert sorted(parts) == sorted(image.tobytes() for image in pixels)


def test_extreme_fractions_leave_both_parts_something():
    assert len(load_digits(Digits(name="digits", val_fraction=1e-9)).val) == 1
    assert len(load_digits(Digits(name="digits", val_fraction=1 - 1e-9)).train) == 1
