import time

import numpy as np
import torch

from shoal.data.section import Synthetic
from shoal.data.synthetic import make_synthetic


def small(**changes):
    values = {"samples": 3000, "val_samples": 500, "shape": [3, 4, 5], "classes": 7, **changes}
    return make_synthetic(Synthetic(name="synthetic", **values))


def test_shapes_and_spec():
    data = small()
    images, labels = data.train.batch(np.arange(4), 0)
    assert images.shape == (4, 3, 4, 5) and images.dtype == torch.float32 and labels.dtype == torch.int64
    assert (len(data.train), len(data.val)) == (3000, 500)
    assert data.spec.image_shape == (3, 4, 5) and data.spec.num_classes == 7


def test_the_seed_decides_everything_and_the_global_state_nothing():
    first = small()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    second = small()
    assert torch.equal(state, torch.get_rng_state())
    for part in ("train", "val"):
        for a, b in zip(getattr(first, part).tensors, getattr(second, part).tensors, strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(first.train.tensors[0], small(seed=1).train.tensors[0])


def test_classes_are_balanced_and_learnable_and_val_is_new():
    data = small()
    images, labels = data.train.tensors
    counts = torch.bincount(labels, minlength=7)
    assert counts.min() > 3000 / 7 / 2
    # A linear model that has only seen the training samples does far better than chance on the others.
    flat = torch.cat([images.flatten(1), torch.ones(len(images), 1)], 1)
    weights = torch.linalg.lstsq(flat, torch.nn.functional.one_hot(labels, 7).float()).solution
    val_images, val_labels = data.val.tensors
    flat_val = torch.cat([val_images.flatten(1), torch.ones(len(val_images), 1)], 1)
    assert ((flat_val @ weights).argmax(1) == val_labels).float().mean() > 0.8
    assert not torch.equal(images[:500], val_images)


def test_fifty_thousand_images_take_less_than_a_second():
    def seconds():
        started = time.perf_counter()
        make_synthetic(Synthetic(name="synthetic", val_samples=1))
        return time.perf_counter() - started

    assert min(seconds() for _ in range(3)) < 1
