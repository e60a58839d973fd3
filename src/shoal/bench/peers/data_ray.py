"""Ray Data over Parquet files on the local disk: what one would write without Shoal."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import torch

from shoal.bench.peers.data_clock import Batch, Job, main
from shoal.bench.peers.data_samples import (
    CONTEXT,
    NUM_SHARDS,
    mixed_images,
    normalized,
    ready_pixels,
    shard_bytes,
    windows,
)


def prepare(job: Job) -> None:
    """Files of rows: the bytes of a JPEG and its label, or a window as a list of fixed size."""
    job.own.mkdir(parents=True)
    if job.files == "images":
        images = mixed_images(job.source)
        total = sum(path.stat().st_size for path, _ in images)
        for number, part in enumerate(_parts(len(images), total // shard_bytes(job.source))):
            chosen = [images[row] for row in part]
            columns: dict[str, Any] = {
                "image": pa.array([path.read_bytes() for path, _ in chosen], pa.binary()),
                "label": pa.array([label for _, label in chosen], pa.int64()),
            }
            pq.write_table(pa.table(columns), job.own / f"{number:05}.parquet", compression="none")
    else:
        rows = windows(job.source)
        order = np.random.default_rng(0).permutation(len(rows))
        for number, part in enumerate(_parts(len(rows), rows.size * 2 // shard_bytes(job.source))):
            ids = pa.array(rows[order[part.start : part.stop]].reshape(-1))
            columns = {"ids": pa.FixedSizeListArray.from_arrays(ids, CONTEXT + 1)}
            pq.write_table(pa.table(columns), job.own / f"{number:05}.parquet", compression="none")


def _parts(count: int, num_parts: int) -> list[range]:
    size = -(-count // max(NUM_SHARDS, num_parts))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def decode(row: dict[str, Any]) -> dict[str, Any]:
    """Bytes between processes, not floats: a quarter of what has to be copied."""
    return {"pixels": ready_pixels(row["image"]), "label": row["label"]}


def widen(table: Any) -> dict[str, np.ndarray]:
    """Ids as they lie in the file, int64."""
    ids = table["ids"].combine_chunks().flatten().to_numpy().reshape(-1, CONTEXT + 1)
    return {"ids": ids.astype(np.int64)}


def build(job: Job) -> Iterable[Batch]:
    """Shuffled by files, as is recommended for training; their rows are mixed already."""
    ray.init(address="local", num_cpus=job.workers, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.read_parquet(str(job.own), shuffle="files")
    if job.files == "images":
        dataset = dataset.map(decode)
    else:
        dataset = dataset.map_batches(widen, batch_format="pyarrow", batch_size=None)
    return _batches(dataset, job)


def _batches(dataset: Any, job: Job) -> Iterator[Batch]:
    for rows in dataset.iter_torch_batches(batch_size=job.batch):
        if job.files == "images":
            yield normalized(rows["pixels"].permute(0, 3, 1, 2)), rows["label"].to(torch.int64)
        else:
            yield rows["ids"][:, :-1].contiguous(), rows["ids"][:, 1:].contiguous()


if __name__ == "__main__":
    main(build, prepare)
