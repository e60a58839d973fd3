"""Shoal as a contender of `shoal bench data --files`: what a recipe's `data:` section gives, read as a run reads it.

Another row is another entry of `SECTIONS` and its name in `data_peers.CONTENDERS`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from shoal.bench.peers.data_clock import Batch, Job, main
from shoal.bench.peers.data_samples import CONTEXT, SIZE, VOCAB_SIZE, shard_bytes
from shoal.core.process import choose_device
from shoal.data.build import build_datasets
from shoal.data.choose import Streaming, choose_loader, make_order
from shoal.data.loader import Loading, train_batches
from shoal.data.section import ImageFolder, Tokens
from shoal.data.shards.make import Request, make_shards

_SEED = 0


def in_place(job: Job) -> Any:
    """The image folder or the file of ids as it is: any sample at any time."""
    if job.files == "images":
        return ImageFolder(name="image_folder", dir=str(job.source), size=SIZE)
    return Tokens(name="tokens", dir=str(job.source), vocab_size=VOCAB_SIZE, context=CONTEXT)


def in_shards(job: Job) -> Any:
    """Tar files, one after the other."""
    return ImageFolder(name="image_folder", dir=str(job.own), size=SIZE, loader="stream")


SECTIONS: dict[str, Callable[[Job], Any]] = {"shoal_map": in_place, "shoal_stream": in_shards}


def prepare(job: Job) -> None:
    """As `shoal data shard SOURCE OWN`."""
    make_shards(Request(job.source, str(job.own), shard_bytes(job.source)), lambda shard: None)


def build(job: Job) -> Iterator[Batch]:
    """Shuffled as training shuffles by default."""
    section = SECTIONS[job.name](job)
    dataset = build_datasets(section, _SEED).train
    kind = choose_loader(section.loader, dataset)
    order = make_order(dataset, kind, job.batch, _SEED, Streaming(section.window, section.lanes))
    # As a run does by itself: what is cheap to read needs no processes, and a GPU has whole batches transformed on it.
    workers = 0 if kind == "memory" else job.workers
    device = choose_device(None)
    on_gpu = device.type == "cuda"
    loading = Loading(workers=workers, pin_memory=on_gpu, device=device, transform_on_device=True)
    steps = train_batches(dataset, order, 0, order.steps_per_epoch, micro_batch=job.batch, loading=loading)
    return (microbatch.data for step in steps for microbatch in step.microbatches)


if __name__ == "__main__":
    main(build, prepare)
