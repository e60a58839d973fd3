import multiprocessing
import pickle
import resource

import numpy as np
import pytest
import torch

from shoal.core.errors import UserError
from shoal.data.section import Tokens
from shoal.data.tokens import load_tokens
from shoal.data.windows import IGNORE

from ..fake_data import write_tokens


def section(folder, **changes):
    return Tokens(**{"name": "tokens", "dir": str(folder), "context": 32, "vocab_size": 64, **changes})


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
@pytest.mark.parametrize("place", [".", "tokens"])
def test_windows_of_the_files(tmp_path, dtype, place):
    write_tokens(tmp_path / place, 5000, 64, dtype)
    ids = np.fromfile(tmp_path / place / "train.bin", dtype=f"<{np.dtype(dtype).str[1:]}").astype(np.int64)
    data = load_tokens(section(tmp_path, dtype=dtype))
    assert data.spec.vocab_size == 64 and data.spec.context == 32
    assert len(data.train) == (5000 - 33) // 32 + 1
    inputs, targets = data.train.batch(np.array([100, 3]), 0)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs[0].tolist() == ids[3200:3232].tolist() and targets[1].tolist() == ids[97:129].tolist()
    assert len(load_tokens(section(tmp_path, dtype=dtype, stride=1)).train) == 5000 - 32


def test_every_validation_token_but_the_first_counts_once(tmp_path):
    write_tokens(tmp_path)
    data = load_tokens(section(tmp_path))
    _, targets = data.val.batch(np.arange(len(data.val)), 0)
    assert targets[targets != IGNORE].tolist() == np.fromfile(tmp_path / "val.bin", dtype="<u2")[1:].tolist()


def test_a_file_larger_than_memory_is_not_read_whole(tmp_path):
    size = 64 << 30
    write_tokens(tmp_path)
    with (tmp_path / "train.bin").open("r+b") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("this file system has no sparse files of 64 GiB")
        file.seek(size - 64)
        file.write(np.arange(32, dtype="<u2").tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = load_tokens(section(tmp_path, context=31))
    last = data.train.batch(np.array([(size // 2 - 32) // 31]), 0)[0]
    start = (size // 2 - 32) // 31 * 31
    assert len(data.train) - 1 == (size // 2 - 32) // 31
    assert last[0].tolist() == [max(0, position - (size // 2 - 32)) for position in range(start, start + 31)]
    for index in range(0, len(data.train), len(data.train) // 50):
        data.train.batch(np.arange(index, min(index + 4, len(data.train))), 0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB


def read_in_child(dataset, queue):
    queue.put(dataset.batch(np.array([7]), 0)[0].tolist())


def test_it_travels_to_other_processes_without_its_content(tmp_path):
    write_tokens(tmp_path, 100_000)
    dataset = load_tokens(section(tmp_path)).train
    here = dataset.batch(np.array([7]), 0)[0]
    packed = pickle.dumps(dataset)
    assert len(packed) < 1000
    assert torch.equal(pickle.loads(packed).batch(np.array([7]), 0)[0], here)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=read_in_child, args=(dataset, queue))
    child.start()
    assert queue.get(timeout=30) == here.tolist()
    child.join()
    queue.close()
    queue.join_thread()


@pytest.mark.parametrize("position", [70, 96])
def test_an_id_beyond_the_vocabulary_is_named(tmp_path, position):
    write_tokens(tmp_path)
    ids = np.fromfile(tmp_path / "train.bin", dtype="<u2")
    ids[position] = 64
    ids.tofile(tmp_path / "train.bin")
    data = load_tokens(section(tmp_path))
    data.train.batch(np.array([0, 1]), 0)
    with pytest.raises(
        UserError, match=rf"^data.vocab_size: {tmp_path}/train.bin holds token id 64 at position {position},"
    ):
        data.train.batch(np.array([0, 2]), 0)
    assert load_tokens(section(tmp_path, vocab_size=65)).train.batch(np.array([2]), 0)[0].max() <= 64


def test_wrong_sizes(tmp_path):
    write_tokens(tmp_path, 5000)
    (tmp_path / "val.bin").write_bytes(b"\0" * 101)
    with pytest.raises(UserError, match=r"^data.dir: .*val.bin: 101 bytes is not a whole number of uint16 tokens"):
        load_tokens(section(tmp_path))
    (tmp_path / "val.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"^data.dir: .*val.bin: is empty"):
        load_tokens(section(tmp_path))
    (tmp_path / "val.bin").write_bytes(b"\0" * 64)
    with pytest.raises(UserError, match=r"^data.context: .*val.bin holds 32 tokens, more than the context of 32"):
        load_tokens(section(tmp_path))
    (tmp_path / "val.bin").write_bytes(b"\0" * 66)
    assert len(load_tokens(section(tmp_path)).val) == 1


def test_missing_files_say_what_to_make(tmp_path):
    with pytest.raises(UserError) as caught:
        load_tokens(section(tmp_path, dtype="uint32"))
    assert str(caught.value) == (
        f"data.dir: train.bin not found in {tmp_path} (also looked in {tmp_path}/tokens). Put train.bin and val.bin "
        "there: token ids one after the other as little-endian uint32, no header, as "
        "numpy.array(ids, dtype='<u4').tofile('train.bin') writes them."
    )
