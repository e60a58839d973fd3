"""The `parallel:` and `optim:` sections. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.core.section import Section

Positive = Annotated[int, Field(gt=0)]


class ParallelSection(Section):
    """How one step runs on the devices."""

    strategy: Literal["auto", "single", "ddp"] = "auto"
    """`single`: one process on one device. `ddp`: every worker holds the whole model, gradients are summed over all.
    `auto`: single for one worker, ddp for more."""
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
