"""Data parallel by hand, for torchrun: what one would write without Shoal.

    torchrun --standalone --nproc-per-node 2 plain_ddp.py --out result.json --steps 20 --warmup 4

Without `--recipe` nothing of Shoal is imported. With it, Shoal builds model, data and optimizer, so that both train the
same; the loop is this one either way.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def small_model() -> nn.Module:
    """The model of Shoal's `digits` recipe."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)),
    )


def build_small() -> dict[str, Any]:
    """Images of digits' size in memory, and a model for them."""
    images, labels = torch.randn(1438, 1, 8, 8), torch.randint(0, 10, (1438,))
    model = small_model()
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3),
        "size": len(images),
        "batch_of": lambda indices: (images[indices], labels[indices]),
        "loss_of": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "autocast": nullcontext(),
        "clip_norm": None,
    }


def build_by_recipe(file: str, device: torch.device) -> dict[str, Any]:
    """The same model, data and optimizer as Shoal's."""
    from shoal.bench.step import build_bench
    from shoal.core.move import move
    from shoal.parallel.numerics import autocast
    from shoal.parallel.optimizer import build_optimizer
    from shoal.recipe.load import load_recipe

    bench = build_bench(load_recipe([file]).recipe)
    recipe = bench.recipe
    model = bench.model.to(device)
    return {
        "model": model,
        "optimizer": build_optimizer(model, recipe.optim),
        "size": len(bench.dataset),
        "batch_of": lambda indices: move(bench.dataset.batch(indices.numpy(), 0), device),
        "loss_of": bench.objective.loss,
        "autocast": autocast(recipe.train.precision, device),
        "clip_norm": recipe.train.clip_norm,
    }


def main() -> None:
    """Train for a number of steps; rank 0 writes when the first was done, and how fast those after the warm-up were."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe")
    parser.add_argument("--batch", type=int, default=32, help="samples of each worker in a step")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pin", action="store_true", help="keep each worker to as many cores as it has threads")
    parser.add_argument("--gpu", action="store_true")
    args = parser.parse_args()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if args.pin:
        first = local_rank * args.threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[first : first + args.threads])
    torch.set_num_threads(args.threads)
    device = torch.device("cuda", local_rank) if args.gpu else torch.device("cpu")
    dist.init_process_group("nccl" if args.gpu else "gloo")
    torch.manual_seed(0)
    built = build_by_recipe(args.recipe, device) if args.recipe else build_small()
    first_step, samples_per_s = train(built, args.batch, args.steps, args.warmup)
    if rank == 0:
        args.out.write_text(json.dumps({"first_step": first_step, "samples_per_s": samples_per_s}))
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch 2.13 aborts in one of fifty ends of a process that used Gloo ("terminate called without an active
    # exception"), after all is done: torchrun would call that a failure.
    os._exit(0)


def train(built: dict[str, Any], batch: int, steps: int, warmup: int) -> tuple[float, float]:
    """Unix seconds when the first step was done, and samples a second of all workers after the warm-up."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_of: Callable[[torch.Tensor], Any] = built["batch_of"]
    model = DistributedDataParallel(built["model"], gradient_as_bucket_view=True)
    optimizer = built["optimizer"]
    loss_of, clip_norm = built["loss_of"], built["clip_norm"]
    per_epoch = max(1, built["size"] // (batch * world_size))
    first_step = began = 0.0
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(built["size"], generator=torch.Generator().manual_seed(step))
        first = (step % per_epoch * world_size + rank) * batch
        indices = order[first : first + batch]
        with built["autocast"]:
            loss = loss_of(model, batch_of(indices))
        loss.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == 0:
            first_step = time.time()
        if step == warmup - 1:
            _wait()
            began = time.perf_counter()
    _wait()
    return first_step, batch * world_size * (steps - warmup) / (time.perf_counter() - began)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
