"""A recipe: the sections of every package composed, plus those that belong to the run as a whole."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.checkpoint.section import CheckpointSection
from shoal.core.section import Section
from shoal.data.section import DataSection
from shoal.models.section import ModelSection
from shoal.observe.section import ObserveSection
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.tasks.section import TaskSection

Positive = Annotated[int, Field(gt=0)]


class TrainSection(Section):
    """How long to train and with which numerics."""

    epochs: Positive | None = None
    """Passes over the training data; give this or `steps`."""
    steps: Positive | None = None
    """Optimizer steps; give this or `epochs`."""
    global_batch: Positive = 64
    """Samples per optimizer step over all workers; everything else follows from it."""
    micro_batch: Positive | None = None
    """Samples that one worker computes at once; null takes the worker's whole share. Fewer needs less memory."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """fp32; tf32 (NVIDIA matmuls); bf16 autocast; fp16 autocast with dynamic loss scaling."""
    compile: bool = False
    """Run the model through torch.compile: slower first steps, faster ones after."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Scale the gradient down to this norm where it is larger."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory, about a third more compute."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes initial weights, order of samples, dropout and augmentation."""
    deterministic: bool = False
    """On GPUs, refuse kernels that are not deterministic. (On CPUs a run is deterministic anyway.)"""


class EvaluateSection(Section):
    """When the validation set is gone through, every sample exactly once."""

    every_steps: Positive | None = None
    """Evaluate every so many steps; null evaluates at the end of each epoch. The last step is always evaluated."""
    batch: Positive | None = None
    """Samples per forward pass; null takes the training micro-batch."""


class EarlyStopSection(Section):
    """Stop when a metric no longer gets better."""

    metric: str = "val_loss"
    """What to watch."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether less or more is better; `auto` goes by the metric's name where that tells."""
    patience: Positive = 3
    """Evaluations without improvement that are borne."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """What counts as an improvement."""


class ClusterSection(Section):
    """What each worker is given."""

    workers: Positive = 1
    """Processes that train together."""
    gpus_per_worker: Annotated[int, Field(ge=0, le=1)] | None = None
    """1: a GPU or an error; 0: the CPU; null: a GPU where there is one."""
    threads_per_worker: Positive | None = None
    """CPU threads for tensor operations; null leaves PyTorch's choice. Sums differ in the last bit between counts."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Cap on the share of the GPU's memory this run may take."""
    gpu_allocator: Annotated[str, Field(pattern=r"^\w+:[^,\s]+(,\w+:[^,\s]+)*$")] | None = None
    """PyTorch's GPU allocator settings, for example expandable_segments:True,max_split_size_mb:256."""


class Recipe(Section):
    """What to train, on what, how."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """First part of the run folder's name; the recipe file's name unless given."""
    task: TaskSection
    model: ModelSection | None = None
    data: DataSection | None = None
    optim: OptimSection = OptimSection()
    train: TrainSection
    evaluate: EvaluateSection = EvaluateSection()
    early_stop: EarlyStopSection | None = None
    parallel: ParallelSection = ParallelSection()
    cluster: ClusterSection = ClusterSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()

    @property
    def micro_batch(self) -> int:
        """Samples one worker computes at once."""
        return self.train.micro_batch or self.train.global_batch // self.cluster.workers


NAMED_SECTIONS = ("task", "model", "data")
"""Sections that a recipe may give by their name alone: `task: image_classification`."""
