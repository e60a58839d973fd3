"""Large data: resumed anywhere at once, and never in memory."""

import json
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from shoal.data.choose import Streaming, make_order
from shoal.data.loader import train_batches
from shoal.data.section import Tokens
from shoal.data.shards.index import INDEX, Shard, ShardIndex
from shoal.data.tokens import load_tokens


def write_sparse(folder, num_shards, shard_bytes):
    """Shards of zeros that take no room on the disk."""
    for part, count in (("train", num_shards), ("val", 1)):
        (folder / part).mkdir(parents=True)
        shards = []
        for number in range(count):
            name = f"shard-{number:05d}.bin"
            with (folder / part / name).open("wb") as file:
                try:
                    file.truncate(shard_bytes)
                except OSError:
                    pytest.skip("this file system has no sparse files")
            shards.append(Shard(name, shard_bytes // 2, shard_bytes))
        index = ShardIndex("tokens", tuple(shards), {"dtype": "uint16", "vocab_size": 256})
        (folder / part / INDEX).write_text(index.to_json())


@pytest.mark.alone
def test_resuming_at_step_a_million_of_100_gb_takes_no_time(tmp_path):
    write_sparse(tmp_path, num_shards=1000, shard_bytes=100_000_000)
    began = time.perf_counter()
    train = load_tokens(Tokens(name="tokens", dir=str(tmp_path))).train
    order = make_order(train, "stream", 32, 0, Streaming(16_384, 16))
    with_step = train_batches(train, order, 1_000_000, 1_000_001, micro_batch=32)
    (step,) = with_step
    took_s = time.perf_counter() - began
    assert train.index.num_bytes == 100 * 10**9 and order.epoch_of(1_000_000) == 0
    assert step.microbatches[0].data[0].shape == (32, 1024)
    assert took_s < 2.0


@pytest.mark.alone
def test_the_position_does_not_matter(tmp_path):
    """The order of a billion samples in ten thousand files, wherever it is asked for."""
    rows = np.full(10_000, 100_000)

    class Many:
        starts = np.concatenate([[0], np.cumsum(rows)])

        def __len__(self):
            return int(self.starts[-1])

    order = make_order(Many(), "stream", 1024, 0, Streaming(16_384, 16))
    took = []
    for step in (0, 500_000, 976_000, 9_760_000):
        began = time.perf_counter()
        samples = order.in_epoch(order.epoch_of(step)).take(*order.bounds(step))
        took.append(time.perf_counter() - began)
        assert len(set(samples.tolist())) == 1024
    assert max(took) < 0.5


STREAMING = """
    import json, re, resource, sys, time
    from pathlib import Path
    from shoal.data.choose import Streaming, make_order
    from shoal.data.loader import Loading, train_batches
    from shoal.data.section import Tokens
    from shoal.data.tokens import load_tokens

    train = load_tokens(Tokens(name="tokens", dir=sys.argv[1], context=8191)).train
    order = make_order(train, "stream", 64, 0, Streaming(16_384, 16))
    loading = Loading(workers=int(sys.argv[2]))
    began, total = time.perf_counter(), 0
    for step in train_batches(train, order, 0, order.steps_per_epoch, micro_batch=64, loading=loading):
        total += sum(micro.data[0].numel() for micro in step.microbatches)
    # Not ru_maxrss of ourselves: that begins with what the process had that started this one.
    own = int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
    peak = max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    print(json.dumps({"tokens": total, "peak_mb": peak / 1000, "seconds": time.perf_counter() - began}))
"""


def stream(folder, workers, environment):
    code = textwrap.dedent(STREAMING)
    ran = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(workers)],
        capture_output=True, text=True, check=True, env=environment, timeout=500,
    )  # fmt: skip
    return json.loads(ran.stdout)


@pytest.mark.parametrize("workers", [0, 1])
def test_memory_does_not_grow_with_the_data(tmp_path, without_coverage, workers):
    write_sparse(tmp_path, num_shards=16, shard_bytes=25_000_000)
    found = stream(tmp_path, workers, without_coverage)
    assert found["tokens"] > 0.19e9 and found["peak_mb"] < 1500


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_10_gb_go_through_one_and_a_half(tmp_path, without_coverage, workers):
    write_sparse(tmp_path, num_shards=200, shard_bytes=50_000_000)
    found = stream(tmp_path, workers, without_coverage)
    assert found["tokens"] > 4.9e9 and found["peak_mb"] < 1500
