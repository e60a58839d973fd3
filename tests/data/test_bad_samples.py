"""Samples that cannot be read: fatal or skipped by policy, named, counted; never a hang, never another batch size."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.data.bad_samples import BadSample, BadSampleError, DataGoneError, read_or_drop, read_or_replace, substitutes
from shoal.data.image_folder import load_image_folder
from shoal.data.loader import Loading, evaluation_batches, train_batches
from shoal.data.order import Order
from shoal.data.section import ImageFolder, TextShards, Tokens
from shoal.data.shuffle import Windows
from shoal.data.text_shards import load_text_shards
from shoal.data.tokens import load_tokens
from tests.data.shards.making import write_images, write_index, write_json_lines, write_tokens
from tests.fake_data import write_image_folder


class Fragile(torch.utils.data.Dataset):
    """Some items raise, as a user's code does."""

    def __init__(self, size, bad):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"file {index} is damaged")
        return index


def skipping(workers=0):
    return Loading(workers=workers, on_error="skip")


def samples(steps):
    return [[int(n) for micro in step.microbatches for n in micro.data] for step in steps]


@given(size=st.integers(2, 60), bad=st.sets(st.integers(0, 59), max_size=20), global_batch=st.integers(1, 12))
def test_a_batch_keeps_its_size_and_the_good_samples_their_place(size, bad, global_batch):
    bad = {index for index in bad if index < size and index % 2}
    order = Order(size, global_batch, seed=1)
    loading = skipping()
    steps = train_batches(Fragile(size, bad), order, 0, 2 * order.steps_per_epoch, micro_batch=4, loading=loading)
    taken = samples(steps)
    for number, found in enumerate(taken):
        start, end = order.bounds(number)
        wanted = order.permutation(order.epoch_of(number))[start:end].tolist()
        assert len(found) == len(wanted) and not set(found) & bad
        assert all(a == b for a, b in zip(found, wanted, strict=True) if b not in bad)
    assert loading.statistics.skipped == 2 * len(bad)
    assert {sample.index for sample in loading.statistics.named} <= bad


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_take_their_place_whoever_reads_and_wherever_they_begin(workers):
    dataset, order = Fragile(50, {3, 7, 30, 31, 32}), Order(50, 8, seed=1)
    reference = samples(train_batches(dataset, order, 0, 14, micro_batch=8, loading=skipping()))
    again = samples(train_batches(dataset, order, 5, 14, micro_batch=2, loading=skipping(workers)))
    assert again == reference[5:]
    for world_size in (2, 4):
        parts = [
            samples(
                train_batches(
                    dataset, order, 0, 14, rank=rank, world_size=world_size, micro_batch=2, loading=skipping()
                )
            )
            for rank in range(world_size)
        ]
        joined = [[n for part in step for n in part] for step in zip(*parts, strict=True)]
        assert [step for number, step in enumerate(joined) if number % 7 != 6] == [
            step for number, step in enumerate(reference) if number % 7 != 6
        ], "but for the short last step, which may hold stand-ins"


def test_what_is_skipped_is_named_and_counted():
    loading = skipping(workers=1)
    steps = train_batches(Fragile(40, set(range(0, 40, 3))), Order(40, 8, 1), 0, 5, micro_batch=8, loading=loading)
    assert len(list(steps)) == 5
    assert loading.statistics.skipped == 14 and len(loading.statistics.named) == 10
    first = loading.statistics.named[0]
    assert str(first) == f"sample {first.index}: OSError: file {first.index} is damaged"


@pytest.mark.parametrize("workers", [0, 1])
def test_where_nothing_can_be_read_it_ends_in_words(workers):
    steps = train_batches(Fragile(40, set(range(40))), Order(40, 8, 1), 0, 5, micro_batch=8, loading=skipping(workers))
    with pytest.raises(
        UserError, match=r"^data.on_error: skip finds nothing to take in the place of sample \d+: OSErr"
    ):
        list(steps)


def test_evaluation_leaves_out_what_cannot_be_read():
    loading = skipping()
    found = list(evaluation_batches(Fragile(20, {1, 2, 8, 9, 10, 11}), batch=4, loading=loading))
    assert [micro.num_samples for micro in found] == [2, 4, 0, 4, 4]
    counted = [n for micro in found if micro.num_samples for n in micro.data.tolist()]
    assert counted == [n for n in range(20) if n not in {1, 2, 8, 9, 10, 11}]
    assert len(found[2].data) == 4 and loading.statistics.skipped == 6


def test_the_order_of_substitutes_stays_near_in_files():
    starts = np.array([0, 10, 20, 20, 30])
    found = list(substitutes(13, 0, 30, starts))
    assert all(10 <= index < 20 for index in found[:5]), "of the same file first"
    assert any(index >= 20 for index in found) and any(index < 10 for index in found), "then of those after it"
    assert found == list(substitutes(13, 0, 30, starts)) != list(substitutes(13, 1, 30, starts))
    assert len(set(substitutes(5, 0, 10**9, None))) > 20


def test_errors_of_all_that_cannot_be_read_together_are_raised():
    def together(indices):
        if len(indices) > 1:
            raise ValueError("of different shapes")
        return indices

    with pytest.raises(ValueError, match="of different shapes"):
        read_or_replace(together, np.arange(3), 0, 10, None)

    def gone(indices):
        raise DataGoneError("data.dir: the store is gone")

    for read in (lambda: read_or_replace(gone, np.arange(3), 0, 10, None), lambda: read_or_drop(gone, np.arange(3))):
        with pytest.raises(DataGoneError):
            read()


def test_the_words_of_a_bad_sample():
    error = BadSampleError([BadSample(3, "a.tar, row 3", "is not JSON")])
    assert str(error) == (
        "data.dir: a.tar, row 3: is not JSON; replace it or remove it, "
        "or leave such samples out with data.on_error=skip"
    )


def corrupt_image(folder: Path) -> tuple[object, Order, str]:
    write_image_folder(folder, ("a", "b"), per_class=10)
    path = folder / "train" / "a" / "4.png"
    path.write_bytes(path.read_bytes()[:-40])
    dataset = load_image_folder(ImageFolder(name="image_folder", dir=str(folder), size=8), 0).train
    return dataset, Order(len(dataset), 6, 0), f"{path}: cannot be decoded"


def corrupt_image_in_a_shard(folder: Path) -> tuple[object, Order, str]:
    for part in ("train", "val"):
        write_images(folder / part, [7, 7, 6])
    content = bytearray((folder / "train" / "shard-00001.tar").read_bytes())
    at = content.index(b"000003.jpg") + 512
    content[at : at + 60] = b"\0" * 60
    (folder / "train" / "shard-00001.tar").write_bytes(content)
    dataset = load_image_folder(ImageFolder(name="image_folder", dir=str(folder), size=8), 0).train
    windows = Windows(np.diff(dataset.starts), 10, 2)
    words = f"{folder}/train/shard-00001.tar, row 3: the image cannot be decoded"
    return dataset, Order(20, 6, 0, windows), words


def truncated_shard(folder: Path) -> tuple[object, Order, str]:
    dataset, order, _ = corrupt_image_in_a_shard(folder)
    path = folder / "train" / "shard-00001.tar"
    path.write_bytes(path.read_bytes()[:2500])
    return dataset, order, f"{path}, row 1: the file ends too early"


def missing_column(folder: Path) -> tuple[object, Order, str]:
    for part in ("train", "val"):
        write_json_lines(folder / part, [10, 10], classes=["no", "yes"])
    path = folder / "train" / "shard-00000.jsonl"
    lines = path.read_text().splitlines()
    lines[4] = json.dumps({"label": 1})
    path.write_text("\n".join(lines))
    write_index(folder / "train", "jsonl", [10, 10], {"classes": ["no", "yes"]})
    dataset = load_text_shards(TextShards(name="text_shards", dir=str(folder))).train
    return dataset, Order(20, 6, 0, Windows(np.diff(dataset.starts), 10, 2)), f"{path}, row 4: has no column text"


def truncated_tokens(folder: Path) -> tuple[object, Order, str]:
    for part in ("train", "val"):
        write_tokens(folder / part, [33, 33])
    path = folder / "train" / "shard-00001.bin"
    path.write_bytes(path.read_bytes()[:40])
    dataset = load_tokens(Tokens(name="tokens", dir=str(folder), context=8, on_error="skip")).train
    return dataset, Order(8, 3, 0, Windows(np.diff(dataset.starts), 10, 2)), f"{path}, tokens from 16: the file ends"


CASES = (corrupt_image, corrupt_image_in_a_shard, truncated_shard, missing_column, truncated_tokens)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_bad_files(tmp_path, case, workers):
    dataset, order, words = case(tmp_path)
    num_steps = order.steps_per_epoch
    with pytest.raises(UserError) as caught:
        list(train_batches(dataset, order, 0, num_steps, micro_batch=3, loading=Loading(workers=workers)))
    assert str(caught.value).startswith("data.dir: ") and str(caught.value).endswith("data.on_error=skip")
    loading = skipping(workers)
    steps = list(train_batches(dataset, order, 0, num_steps, micro_batch=3, loading=loading))
    sizes = [sum(len(micro.data[1]) for micro in step.microbatches if micro.num_samples) for step in steps]
    assert sizes == [order.bounds(step)[1] - order.bounds(step)[0] for step in range(num_steps)]
    named = Counter(map(str, loading.statistics.named))
    assert any(name.startswith(words) for name in named), named
    assert loading.statistics.skipped == (1 if case not in (truncated_shard, truncated_tokens) else len(named))
