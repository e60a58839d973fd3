"""One small model and its data, trained under any strategy on real processes: what every strategy must agree on."""

from dataclasses import dataclass, field
from typing import Any

import torch

from shoal.core.process import Process
from shoal.data.dataset import MemoryDataset
from shoal.data.loader import evaluation_batches, train_batches
from shoal.data.order import Order
from shoal.models.gpt import Gpt
from shoal.parallel.build import build_unit
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.tasks.build import task_objective
from shoal.tasks.language_modelling import LanguageModellingTask
from shoal.tasks.section import LanguageModelling
from shoal.train.evaluate import evaluate

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp_reduce_last": {"strategy": "fsdp", "fsdp": {"reduce_every_micro_batch": False}},
    "hsdp": {"strategy": "fsdp", "fsdp": {"shard_size": 2}},
    "fsdp_offload": {"strategy": "fsdp", "fsdp": {"cpu_offload": True}},
    "zero1": {"strategy": "deepspeed", "deepspeed": {"stage": 1}},
    "zero2": {"strategy": "deepspeed", "deepspeed": {"stage": 2}},
    "zero3": {"strategy": "deepspeed", "deepspeed": {"stage": 3}},
    "zero3_offload": {
        "strategy": "deepspeed",
        "deepspeed": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    },
    "gpipe": {"strategy": "pipeline", "pipeline": {"schedule": "gpipe"}},
    "1f1b": {"strategy": "pipeline", "pipeline": {"schedule": "1f1b"}},
    "interleaved": {"strategy": "pipeline", "pipeline": {"schedule": "interleaved", "stages": 2}},
    "pipeline_ddp": {"strategy": "pipeline", "pipeline": {"stages": 2}},
    "tensor": {"strategy": "tensor"},
    "tensor_ddp": {"strategy": "tensor", "tensor": {"size": 2}},
    "tensor_fsdp": {"strategy": "tensor", "tensor": {"size": 2, "across": "fsdp"}},
}
"""Every strategy and combination that runs on four processes."""

BATCH, CONTEXT, VOCABULARY = 16, 12, 61
SAMPLES = 72
"""Five steps an epoch, the last of them of 8 samples."""


@dataclass
class Case:
    """What is trained; the same whatever the strategy."""

    parallel: dict[str, Any] = field(default_factory=dict)
    micro_batch: int = 0
    """0: two samples; more under tensor, which talks in every layer of each."""
    clip_norm: float | None = 0.5
    tie_weights: bool = True
    precision: str = "fp32"
    # Not Adam's usual epsilon: it makes much of the last bits of gradients that are almost zero.
    optim: dict[str, Any] = field(default_factory=lambda: {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-5})
    recompute: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        of_tensor = 4 if "tensor" in self.parallel else 8
        self.micro_batch = self.micro_batch or (of_tensor if self.parallel.get("strategy") == "tensor" else 2)

    def unit(self, process: Process) -> TrainUnit:
        """Built anew on this worker."""
        torch.manual_seed(self.seed)
        model = Gpt(VOCABULARY, CONTEXT, layers=4, heads=4, dim=32, tie_weights=self.tie_weights)
        settings = StepSettings(
            optim=OptimSection(**self.optim),
            precision=self.precision,
            clip_norm=self.clip_norm,
            activation_checkpointing=self.recompute,
            global_batch=BATCH,
            micro_batch=self.micro_batch,
        )
        objective = task_objective(LanguageModellingTask(LanguageModelling(name="language_modelling")))
        return build_unit(ParallelSection(**self.parallel), model, objective, settings, process)


@dataclass
class Went:
    """How some steps went."""

    losses: list[float]
    """Of each step, over all workers."""
    norms: list[float]
    metrics: dict[str, float]


def data() -> MemoryDataset:
    """Running text with targets that do not count here and there, so that workers have other numbers of them."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, CONTEXT), generator=generator)
    targets = (tokens * 7 + 3) % VOCABULARY
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = -100
    return MemoryDataset(tokens, targets)


def train_steps(process: Process, unit: TrainUnit, case: Case, first: int, last: int) -> Went:
    """Steps [first, last), then an evaluation."""
    dataset, order = data(), Order(SAMPLES, BATCH, seed=3)
    went = Went([], [], {})
    batches = train_batches(
        dataset, order, first, last, rank=unit.data_rank, world_size=unit.data_size, micro_batch=case.micro_batch
    )
    for batch in batches:
        loss = unit.forward_backward(batch)
        unit.optimizer_step(3e-3)
        total = sum(float(value) * weight for value, weight in loss.terms)
        summed, count = process.group.sum(total, float(loss.count))
        went.losses.append(summed / count)
        went.norms.append(unit.report().get("grad_norm", 0.0))
    held_out = evaluation_batches(dataset, rank=unit.data_rank, world_size=unit.data_size, batch=7)
    went.metrics = evaluate(unit, held_out, lambda: None, 0, process.group) or {}
    return went


def train_anew(process: Process, case: Case, steps: int = 20) -> Went:
    """From the beginning."""
    return train_steps(process, case.unit(process), case, 0, steps)
