"""The `parallel:` and `optim:` sections. Loads without torch."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from shoal.core.section import Section

Positive = Annotated[int, Field(gt=0)]


_OTHER_NAMES = {
    "fsdp2": "fsdp",
    "hsdp": "fsdp with parallel.fsdp.shard_size=node",
    "zero": "deepspeed with parallel.deepspeed.stage",
    **{f"zero{stage}": f"deepspeed with parallel.deepspeed.stage={stage}" for stage in (1, 2, 3)},
    **{name: f"pipeline with parallel.pipeline.schedule={name}" for name in ("gpipe", "1f1b", "interleaved")},
    "pp": "pipeline",
    "tp": "tensor",
}
"""What strategies are called elsewhere."""


class FsdpSection(Section):
    """Fully sharded data parallel (PyTorch's FSDP2): workers hold a part of every block, and gather it to compute."""

    shard_size: Positive | Literal["node"] | None = None
    """Workers that hold one copy of the model between them; each further group of so many holds another (HSDP).
    `node`: those of one machine. Null: all of them, so that there is one copy."""
    reshard_after_forward: bool = True
    """Let go of a block's gathered weights after its forward pass, and gather them again for the backward pass: less
    memory, more communication."""
    reduce_every_micro_batch: bool = True
    """Sum gradients over the workers after every micro-batch, so that none holds whole ones. False: after the last of a
    step alone, which communicates less and holds a whole gradient on every worker meanwhile."""
    param_dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """What weights are gathered in; `auto` goes by train.precision. Each worker keeps its part in full precision."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """What gradients are summed in."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in the host's memory, where the optimizer then runs too."""


class DeepSpeedSection(Section):
    """DeepSpeed's ZeRO; needs the extra `deepspeed`: `pip install -e '.[deepspeed]'`."""

    stage: Annotated[int, Field(ge=1, le=3)] = 2
    """What is divided among the workers. 1: optimizer state; 2: gradients too; 3: weights too."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where optimizer state is kept, and where the optimizer runs; nvme is for stage 3."""
    offload_params: Literal["none", "cpu", "nvme"] = "none"
    """Where weights are kept while they are not computed with; for stage 3."""
    nvme_dir: str | None = None
    """A folder on a fast disk of each machine, for what is offloaded to nvme."""
    config: str | None = None
    """A ds_config.json of your own for everything else; what a recipe says itself may not be said there differently."""


class PipelineSection(Section):
    """Pipeline parallel: each worker holds some of the model's blocks, and micro-batches flow through all of them."""

    stages: Positive | None = None
    """Workers in one pipeline; each further group of so many is another, with data of its own. Null: all of them."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """`gpipe`: all forward passes, then all backward ones. `1f1b`: in turns, which holds fewer activations.
    `interleaved`: the same, with several stages on each worker, which leaves shorter gaps."""
    stages_per_worker: Annotated[int, Field(ge=2)] = 2
    """interleaved: stages on each worker."""


class TensorSection(Section):
    """Tensor parallel: each worker computes a part of every layer."""

    size: Positive | None = None
    """Workers that share every layer, which should be on one machine; each further group of so many holds another copy
    of the model and has data of its own. Null: all of them."""
    sequence: bool = True
    """Between layers, each worker keeps a part of the tokens rather than all; only where their number divides."""
    across: Literal["ddp", "fsdp"] = "ddp"
    """What the groups do with each other: `ddp` sums gradients, `fsdp` divides every worker's part of the model
    further among them."""


class ParallelSection(Section):
    """How one step runs on the devices."""

    strategy: Literal["auto", "single", "ddp", "fsdp", "deepspeed", "pipeline", "tensor"] = "auto"
    """`single`: one process on one device. `ddp`: every worker holds the whole model, gradients are summed over all.
    `fsdp`: weights, gradients and optimizer state are divided among the workers. `deepspeed`: the same by DeepSpeed's
    ZeRO. `pipeline`: each worker holds some of the blocks. `tensor`: each worker computes a part of every layer.
    `auto`: single for one worker; for more, ddp if the model fits, else the fastest that does."""
    fsdp: FsdpSection = FsdpSection()
    """For strategy fsdp, and for tensor across fsdp."""
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    """For strategy deepspeed."""
    pipeline: PipelineSection = PipelineSection()
    """For strategy pipeline."""
    tensor: TensorSection = TensorSection()
    """For strategy tensor."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How workers talk: `auto` takes NCCL between GPUs and Gloo between CPUs."""
    bucket_mb: Annotated[float, Field(gt=0)] = 25.0
    """ddp: gradients are sent in buckets of this size while the backward pass goes on."""
    gradient_as_bucket_view: bool = True
    """ddp: gradients live in the buckets, which saves a copy of them."""
    static_graph: bool = False
    """ddp: promise that every step uses the same parameters, so that more can overlap. With three workers or more, a
    resumed run may then differ from one never stopped in the last bit."""
    find_unused_parameters: bool = False
    """ddp: look in every step for parameters that the loss does not use. Slower; needed where there are any."""
    sync_batch_norm: bool = False
    """ddp: batch norms take their statistics over all workers. GPUs only."""
    compress: Literal["none", "bf16", "fp16", "powersgd"] = "none"
    """ddp: how gradients are packed for the network. `powersgd` sends low-rank factors; its error memory starts anew
    when a run is resumed."""
    powersgd_rank: Positive = 4
    """compress powersgd: rank of the factors; more is closer and slower."""
    powersgd_start_step: Annotated[int, Field(ge=2)] = 10
    """compress powersgd: steps that are sent whole before packing begins."""
    hierarchical: bool = False
    """ddp: sum inside each machine first, then between machines, then hand the result out inside each machine."""
    sync_every: Positive = 1
    """ddp: local SGD. Workers step on their own and average weights and optimizer state every so many steps."""

    @field_validator("strategy", mode="before")
    @classmethod
    def _known_elsewhere(cls, value: Any) -> Any:
        other = str(value).lower().replace("-", "").replace("_", "")
        if other in _OTHER_NAMES:
            raise PydanticCustomError("other_name", f"is called {_OTHER_NAMES[other]} here")
        return value


class OptimSection(Section):
    """The optimizer and how its learning rate moves over the run."""

    name: Literal["sgd", "adam", "adamw"] = "adamw"
    """The optimizer; the fused implementation is used where the device has one."""
    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Peak learning rate, before `scale_lr`."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of the weights; norms and biases are left out unless `decay_norms_and_biases`."""
    decay_norms_and_biases: bool = False
    """Apply the decay to one-dimensional parameters too."""
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    """For sgd."""
    nesterov: bool = False
    """For sgd with momentum."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] | None = None
    """For adam and adamw; null takes [0.9, 0.999]."""
    eps: Annotated[float, Field(gt=0)] | None = None
    """For adam and adamw; null takes 1e-8."""
    schedule: Literal["constant", "linear", "cosine", "step"] = "constant"
    """How the learning rate falls after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly from zero."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """linear and cosine end at this share of the peak."""
    step_every: Positive | None = None
    """For the step schedule: steps between two drops."""
    step_factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """For the step schedule: what each drop multiplies the learning rate by."""
    scale_lr: Literal["none", "linear", "sqrt"] = "none"
    """Scale `lr` by global_batch / reference_batch, or by its square root."""
    reference_batch: Positive | None = None
    """The global batch that `lr` was chosen for; needed by `scale_lr`."""
