"""What everybody's loop by hand begins with: Shoal's models, losses and data, in PyTorch's own terms."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

from shoal.bench.overhead_sides import NEVER
from shoal.bench.step import Bench
from shoal.core.errors import UserError
from shoal.core.move import leaves, move
from shoal.data.dataset import MemoryDataset
from shoal.data.order import Order
from shoal.parallel.numerics import recompute_activations
from shoal.parallel.optimizer import build_optimizer
from shoal.tasks.section import LanguageModelling
from shoal.train.schedule import learning_rate, peak_lr

_CHECKED = 64
"""Samples that are looked at to see whether they are augmented."""


@dataclass(frozen=True)
class Setup:
    """What a peer trains."""

    bench: Bench
    model: nn.Module
    """On the device."""
    loader: DataLoader[Any]
    """Micro-batches on the host, without end, in the order in which Shoal has them."""
    accumulate: int
    """Micro-batches of a step."""
    precision: str
    compiles: bool
    has_images: bool
    """Whether the model and what it is given lie channels last."""

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return self.bench.process.device

    def optimizer(self) -> torch.optim.Optimizer:
        """The recipe's, fused."""
        return build_optimizer(self.model, self.bench.recipe.optim)

    def lr(self, step: int) -> float:
        """The learning rate of a step, of a run without end, as Shoal's is here."""
        recipe = self.bench.recipe
        return learning_rate(recipe.optim, peak_lr(recipe.optim, recipe.train.global_batch), step, NEVER)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR | None:
        """The same as PyTorch has it; None where the learning rate stays what it is."""
        optim = self.bench.recipe.optim
        if optim.schedule == "constant" and not optim.warmup_steps and self.lr(0) == optim.lr:
            return None
        return LambdaLR(optimizer, lambda step: self.lr(step) / optim.lr)

    def on_device(self, batch: Any) -> Any:
        """A batch where the model is."""
        if self.device.type == "cpu":
            return batch
        return self.laid_out(move(batch, self.device))

    def laid_out(self, batch: Any) -> Any:
        """A batch that is on the device, with its images as the model has them."""
        if not self.has_images:
            return batch
        images, *others = batch
        return [images.contiguous(memory_format=torch.channels_last), *others]

    @property
    def seed(self) -> int:
        """Of dropout."""
        return self.bench.recipe.train.seed

    def samples(self, batch: Any) -> int:
        """Of the step that this is a batch of, or the only one: the last of an epoch may be short."""
        if self.accumulate > 1:
            return self.bench.recipe.train.global_batch
        return len(next(leaves(batch)))


def set_up(bench: Bench, job: dict[str, Any], precision: str, compiles: bool) -> Setup:
    """Model and data, ready to train."""
    recipe, device = bench.recipe, bench.process.device
    model = bench.model.to(device)
    has_images = device.type == "cuda" and any(isinstance(module, nn.Conv2d) for module in model.modules())
    if has_images:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = not recipe.train.deterministic
    if recipe.train.activation_checkpointing:
        recompute_activations(model)
    micro = min(recipe.micro_batch(1), recipe.train.global_batch)
    assert recipe.train.global_batch % micro == 0  # which a recipe's own checks see to
    loader = make_loader(bench, micro, job["loader"], job["loader_workers"])
    accumulate = recipe.train.global_batch // micro
    return Setup(bench, model, loader, accumulate, precision, compiles, has_images)


def loss_function(setup: Setup, model: Callable[..., Any] | None = None) -> Callable[[Any], torch.Tensor]:
    """The mean loss of a batch, written as one would; `model`: as somebody else has wrapped it."""
    task, objective = setup.bench.recipe.task, setup.bench.objective
    called: Any = model or setup.model
    if isinstance(task, LanguageModelling):
        smoothing = task.label_smoothing

        def mean_over_tokens(batch: Any) -> torch.Tensor:
            logits = called(batch[0])
            return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), label_smoothing=smoothing)

        return mean_over_tokens

    def mean(batch: Any) -> torch.Tensor:
        loss = objective.loss(called, batch)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    return mean


class _Whole(Dataset[Any]):
    """Batches that are read in one go."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, np.ndarray]) -> Any:
        epoch, indices = key
        return self.dataset.batch(indices, epoch)


class _InOrder(BatchSampler):
    """The samples of every micro-batch, epoch after epoch, in the order in which Shoal trains on them."""

    def __init__(self, order: Order, micro: int, by_sample: bool) -> None:
        self.order, self.micro, self.by_sample = order, micro, by_sample
        self.sampler: Any = None
        self.batch_size, self.drop_last = micro, False

    def __len__(self) -> int:
        raise TypeError("there is no end to it")

    def __iter__(self) -> Iterator[Any]:
        step = 0
        while True:
            epoch = self.order.epoch_of(step)
            first, last = self.order.bounds(step)
            step += 1
            if last - first < self.order.global_batch and self.order.global_batch != self.micro:
                continue  # who accumulates over so many micro-batches always does
            indices = self.order.in_epoch(epoch).take(first, last)
            for start in range(0, len(indices), self.micro):
                part = indices[start : start + self.micro]
                yield part.tolist() if self.by_sample else [(epoch, part)]


def make_loader(bench: Bench, micro: int, kind: str, workers: int) -> DataLoader[Any]:
    """A DataLoader by whole batches, or by samples that are put together."""
    order = Order(len(bench.dataset), bench.recipe.train.global_batch, bench.recipe.train.seed)
    options: dict[str, Any] = {"num_workers": workers, "pin_memory": bench.process.device.type == "cuda"}
    options["generator"] = torch.Generator()  # else it would draw from the one that dropout draws from
    if kind == "samples":
        return DataLoader(
            TensorDataset(*_tensors(bench.dataset)), batch_sampler=_InOrder(order, micro, True), **options
        )
    # Not by `batch_size=None`, which Accelerate cannot take over.
    whole = _Whole(bench.dataset)
    return DataLoader(whole, batch_sampler=_InOrder(order, micro, False), collate_fn=_the_one, **options)


def _the_one(batches: list[Any]) -> Any:
    return batches[0]


def _tensors(dataset: Any) -> list[torch.Tensor]:
    """All samples, transformed once and for all."""
    if not isinstance(dataset, MemoryDataset):
        raise UserError("--loader: samples is for data that is held in memory, and this is not; take batches")
    if dataset.transform is None:
        return list(dataset.tensors)
    some = np.arange(min(_CHECKED, len(dataset)))
    once, again = (dataset.batch(some, epoch) for epoch in (0, 1))
    whole = dataset.batch(np.arange(len(dataset)), 0)
    is_same = all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    if not is_same or any(part.shape[1:] != all_of.shape[1:] for part, all_of in zip(once, whole, strict=True)):
        raise UserError("--loader: samples takes data that is the same in every batch, and this is not; take batches")
    return list(whole)
