"""One epoch of one contender of `shoal bench data --files`, in a process of its own: how it is called, and the clock.

    python -m shoal.bench.peers.data_dataloader --name dataloader --files images --source DIR --own DIR \
        --batch 64 --workers 2 --out result.json

With `--prepare` it writes the samples in the contender's own format instead. A contender's script hands `main` two
functions: one that prepares, one that builds what gives batches. Besides the interpreter, torch and numpy nothing of
Shoal's environment is needed: some contenders have another.
"""

import argparse
import atexit
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.bench.peers.data_samples import CONTEXT, SIZE
from shoal.core.sessions import end_with_parent, kill_session

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images and labels, or inputs and targets."""


@dataclass(frozen=True)
class Job:
    """What a contender is to read."""

    name: str
    files: str
    """`images` or `tokens`."""
    source: Path
    """The samples as files that anybody reads: an image folder, or ids one after the other."""
    own: Path
    """The same in this contender's format; nothing there if it reads `source`."""
    batch: int
    workers: int
    """Processes that load."""


def main(build: Callable[[Job], Iterable[Batch]], prepare: Callable[[Job], None] | None = None) -> None:
    """Prepare, or read one epoch and write down how long it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--files", choices=["images", "tokens"], required=True)
    for folder in ("--source", "--own", "--out"):
        parser.add_argument(folder, type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--prepare", action="store_true")
    parser.add_argument(
        "--parent", type=int, help="end with this process, and if it is gone remove the folder of --out"
    )
    args = parser.parse_args()
    job = Job(args.name, args.files, args.source, args.own, args.batch, args.workers)
    _leave_nothing_behind(args.parent, args.out.parent)
    if args.prepare:
        if prepare is not None:
            prepare(job)
        return
    args.out.write_text(json.dumps(read_epoch(job.files, build(job))))


def read_epoch(
    files: str, batches: Iterable[Batch], use: Callable[[Batch], None] = lambda batch: None
) -> dict[str, Any]:
    """Seconds from asking for the first batch until it was there, and until the last was; and what was read.

    Where there is a GPU, they are there when they are in its memory. `use` is what training does with a batch; here
    nothing. `fingerprint` is the same for all that read every sample
    once, in whatever order.
    """
    num_samples = 0
    fingerprint: torch.Tensor | int = 0
    first_batch_s = 0.0
    batch: Batch | None = None
    if has_gpu():
        torch.zeros(1, device="cuda")  # seconds the first time, and no loader's fault
    began = time.perf_counter()
    for batch in map(_on_device, batches):
        use(batch)
        first_batch_s = first_batch_s or time.perf_counter() - began
        num_samples += len(batch[0])
        fingerprint = fingerprint + (batch[1] if files == "images" else batch[0][:, 0]).sum()
    if has_gpu():
        torch.cuda.synchronize()
    epoch_s = time.perf_counter() - began
    if batch is None:
        raise SystemExit("no batch came")
    _check(files, batch)
    return {
        "num_samples": num_samples,
        "fingerprint": int(fingerprint),
        "first_batch_s": first_batch_s,
        "epoch_s": epoch_s,
    }


def has_gpu() -> bool:
    """Whether batches are for a GPU: then they are ready when they are in its memory."""
    return torch.cuda.is_available()


def _on_device(batch: Batch) -> Batch:
    if not has_gpu():
        return batch
    first, second = (tensor.to("cuda", non_blocking=True) for tensor in batch)
    return first, second


def _check(files: str, batch: Batch) -> None:
    """A batch must be ready for training, or the contenders did not do the same work."""
    first, second = batch
    found = [(tuple(tensor.shape[1:]), tensor.dtype, tensor.is_contiguous()) for tensor in batch]
    if files == "images":
        right = [((3, SIZE, SIZE), torch.float32, True), ((), torch.int64, True)]
        ready = found == right and bool(first.abs().max() < 3) and bool(first.std() > 0.3)
    else:
        right = [((CONTEXT,), torch.int64, True)] * 2
        ready = found == right and torch.equal(first[:, 1:], second[:, :-1])
    if not ready:
        raise SystemExit(f"batches are not as they should be: {found}, should be {right}")


def _leave_nothing_behind(parent: int | None, folder: Path) -> None:
    """End with the benchmark, in order, and take along every process that this one has started."""
    leader = os.getpid()

    def end_session() -> None:
        # Workers that were forked inherit this, and lead no session.
        if os.getpid() == leader == os.getsid(0):
            kill_session(leader, spare=leader)
            if parent is not None and os.getppid() != parent:  # nobody is left to remove what this process has written
                shutil.rmtree(folder, ignore_errors=True)

    def terminate(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # so that the libraries clean up

    atexit.register(end_session)  # the first that is registered is the last that is called
    signal.signal(signal.SIGTERM, terminate)
    if parent is not None:
        end_with_parent(signal.SIGTERM)
        if os.getppid() != parent:  # it has gone before it could be seen
            raise SystemExit(1)
