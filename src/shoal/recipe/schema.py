"""A recipe: the sections of every package composed, plus those that belong to the run as a whole."""

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from shoal.checkpoint.section import CheckpointSection
from shoal.core.section import Section
from shoal.data.section import DataSection
from shoal.models.section import ModelSection
from shoal.observe.section import ObserveSection
from shoal.observe.track.section import TrackSection
from shoal.parallel.section import OptimSection, ParallelSection
from shoal.tasks.section import TaskSection

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[
    int | float, Field(ge=0, le=1), WithJsonSchema({"type": "number", "minimum": 0, "maximum": 1})
]  # said outright, because pydantic knows no bounds of a union in JSON Schema


class TrainSection(Section):
    """How long to train and with which numerics."""

    epochs: Positive | None = None
    """Passes over the training data; give this or `steps`."""
    steps: Positive | None = None
    """Optimizer steps; give this or `epochs`."""
    global_batch: Positive = 64
    """Samples per optimizer step over all workers; everything else follows from it."""
    micro_batch: Positive | Literal["auto"] | None = None
    """Samples that one worker computes at once; null takes the worker's whole share (in a pipeline, what makes two
    micro-batches a stage). Fewer needs less memory. `auto` finds the largest that fits, and keeps to it; the global
    batch stays what it is."""
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    """fp32; tf32 (NVIDIA matmuls); bf16 autocast; fp16 autocast with dynamic loss scaling. `auto`: bf16 on GPUs that
    have it, fp32 elsewhere."""
    compile: bool | Literal["auto"] = "auto"
    """Run model and loss through torch.compile: slower first steps, faster ones after. `auto`: on GPUs, for shipped
    tasks and models that gain by it, with one worker or ddp."""
    cuda_graphs: bool | Literal["auto"] = "auto"
    """Have the GPU repeat a recorded step instead of being told each operation, which small models spend most of their
    time on. Numbers stay the same. For one worker, and one micro-batch a step. `auto`: for shipped tasks and models
    but lstm, whose steps take at most a third of the GPU's memory. True with a task of your own: nothing in its `loss`
    may depend on values, or change from step to step."""
    channels_last: bool | Literal["auto"] = "auto"
    """Lay out images and convolutions' weights pixel by pixel, with all channels of each: so GPUs and CPUs convolve
    faster. `auto`: for shipped models with convolutions and shipped tasks, with one worker or ddp."""
    fp8: bool = False
    """Compute the large matrix products of a transformer's blocks in 8-bit floats, and keep what runs from block to
    block in bf16: faster on NVIDIA GPUs since Ada and Hopper, and less exact. Needs precision bf16, torch.compile, and
    one worker or ddp."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """Scale the gradient down to this norm where it is larger."""
    activation_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory, about a third more compute."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Fixes initial weights, order of samples, dropout and augmentation."""
    init_from: Annotated[str, Field(pattern=r"\S")] | None = None
    """Begin with these weights instead of random ones: a .safetensors file, a folder with an index of such files, a
    checkpoint's folder, or a run, whose newest whole checkpoint is taken. By name; all else of the run is new."""
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
    min_workers: Positive | None = None
    """Go on with fewer workers, down to this many, when machines vanish, and with more when they come back. The global
    batch stays the same. Null: always `workers`."""
    cpus_per_worker: Positive | None = None
    """Cores that each worker is given; null: an equal share of the machine's, or one each on a cluster."""
    gpus_per_worker: Share | None = None
    """1: a GPU or an error; 0: the CPU; null: a GPU where there is one. A fraction, on Ray, is a share of a GPU and of
    its memory: several small runs, or trials of a search, have it together."""
    threads_per_worker: Positive | None = None
    """CPU threads for tensor operations; null: `cpus_per_worker`, or PyTorch's choice for a single worker. Sums differ
    in the last bit between counts."""
    pin_cores: bool = False
    """Keep each worker to cores of its own, one a thread, which no other worker of the run is kept to. For a machine
    that runs nothing else: two runs would be kept to the same cores."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Cap on the share of the GPU's memory this run may take."""
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """What one worker costs an hour, in any currency: the ledger of a run then says what its seconds cost."""
    gpu_allocator: Annotated[str, Field(pattern=r"^\w+:[^,\s]+(,\w+:[^,\s]+)*$")] | None = None
    """PyTorch's GPU allocator settings, for example expandable_segments:True,max_split_size_mb:256."""

    @property
    def gpu_memory_share(self) -> float | None:
        """The share of a GPU's memory that a worker may take: as said, or as much as it has of the GPU."""
        share = self.gpus_per_worker
        return self.gpu_memory_fraction or (float(share) if share is not None and 0 < share < 1 else None)


class FailuresSection(Section):
    """What is borne before a run is given up."""

    max_restarts: Annotated[int, Field(ge=0)] = 3
    """Restarts in a row, without a new checkpoint in between, after a worker or machine died or hung. Errors in your
    code are never retried; announced preemptions and changes of size are not counted."""
    hang_timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A worker that makes no progress for so long counts as hung: stacks are written down and the workers restarted.
    Must be longer than the longest step, save or compilation."""
    machine_timeout_s: Annotated[float, Field(ge=0)] = 600.0
    """How long a run that lost machines waits for others in their place before it is given up."""


class NcclSection(Section):
    """NCCL's settings for GPUs that talk to each other; each becomes the environment variable that NCCL reads."""

    interface: Annotated[str, Field(pattern=r"^[=^]?[A-Za-z0-9_.,-]+$")] | None = None
    """Network interfaces, for example eth0 or ^docker0,lo (NCCL_SOCKET_IFNAME; Gloo uses the first too)."""
    infiniband: bool | None = None
    """false keeps NCCL off InfiniBand and RoCE (NCCL_IB_DISABLE)."""
    ib_devices: Annotated[str, Field(pattern=r"^[=^]?[A-Za-z0-9_.:,-]+$")] | None = None
    """InfiniBand devices, for example mlx5_0,mlx5_1 (NCCL_IB_HCA)."""
    p2p_level: Literal["LOC", "NVL", "PIX", "PXB", "PHB", "SYS"] | None = None
    """How far apart two GPUs may be to copy directly (NCCL_P2P_LEVEL); LOC turns it off."""
    debug: Literal["VERSION", "WARN", "INFO", "TRACE"] | None = None
    """What NCCL says on stdout (NCCL_DEBUG)."""
    timeout_s: Annotated[float, Field(gt=0)] | None = None
    """How long a collective may take; null: longer than failures.hang_timeout_s, which notices a hang first."""
    environment: Annotated[
        dict[Annotated[str, Field(pattern=r"^NCCL_[A-Z0-9_]+$")], str],
        Field(json_schema_extra={"additionalProperties": False}),
    ] = {}
    """Any other NCCL_ variable, as it is."""


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
    failures: FailuresSection = FailuresSection()
    nccl: NcclSection = NcclSection()
    checkpoint: CheckpointSection = CheckpointSection()
    observe: ObserveSection = ObserveSection()
    track: TrackSection = TrackSection()

    def micro_batch(self, num_shares: int) -> int:
        """Samples that a worker computes at once, where a step's samples are divided into `num_shares`."""
        if isinstance(self.train.micro_batch, int):
            return self.train.micro_batch
        share = -(-self.train.global_batch // num_shares)
        if self.parallel.strategy == "pipeline":  # which is idle less, the more there are to flow
            stages = max(self.cluster.workers // num_shares, 1)
            return max(share // (2 * stages), 1)
        return share


NAMED_SECTIONS = ("task", "model", "data")
"""Sections that a recipe may give by their name alone: `task: image_classification`."""
