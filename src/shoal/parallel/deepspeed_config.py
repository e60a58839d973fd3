"""DeepSpeed's configuration for a recipe, with a user's own ds_config.json merged in. Loads without torch."""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import UserError
from shoal.parallel.section import DeepSpeedSection, OptimSection

Config = dict[str, Any]

_FILE = "parallel.deepspeed.config"

_HANDED_ON = frozenset(
    "communication_data_type steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level "
    "disable_python_gc data_types.keep_in_fp32_modules".split()
)
_HANDED_ON_WHOLE = frozenset(
    "aio activation_checkpointing comms_logger flops_profiler tensorboard wandb comet csv_monitor timers".split()
)
_OF_ZERO = frozenset(
    "contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions "
    "allgather_bucket_size overlap_comm sub_group_size ignore_unused_parameters round_robin_gradients "
    "parameter_alignment zero_hpz_partition_size memory_efficient_linear enable_sanity_checks "
    "log_trace_cache_warnings load_from_fp32_weights elastic_checkpoint "
    "stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold "
    "stage3_max_live_parameters stage3_max_reuse_distance stage3_module_granularity_threshold "
    "stage3_gather_16bit_weights_on_model_save stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
    "offload_optimizer.pin_memory offload_optimizer.buffer_count offload_optimizer.pipeline_read "
    "offload_optimizer.pipeline_write offload_optimizer.fast_init "
    "offload_param.pin_memory offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu".split()
)
"""What of a ds_config has no word in a recipe, and keeps what a step computes and what is saved as they are."""

_OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}
_SCHEDULES = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
_LOSS_SCALE = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000, "hysteresis": 1}
"""As PyTorch's GradScaler has it, and so every other strategy."""


@dataclass(frozen=True)
class Decided:
    """What a recipe, the model and the workers decide."""

    section: DeepSpeedSection
    optim: OptimSection
    precision: str
    clip_norm: float | None
    global_batch: int
    micro_batch: int
    workers: int
    num_elements: int
    """Of all weights."""
    largest: int
    """Elements of the largest weight."""
    nvme_dir: str | None = None
    """This run's own folder in that of the section."""

    @property
    def low_precision(self) -> str | None:
        """What weights are computed with, where that is not full precision."""
        return self.precision if self.precision in ("bf16", "fp16") else None


def build_config(decided: Decided) -> Config:
    """The whole configuration. A `UserError` names what the user's own file says otherwise than the recipe."""
    own = read_file(decided.section.config) if decided.section.config is not None else {}
    config = _derived(decided)
    for key, value in _taken(own, decided):
        _put(config, key, value)
    return config


def read_file(path: str) -> Config:
    """A user's ds_config.json."""
    try:
        config = json.loads(Path(path).expanduser().read_text())
    except OSError as error:
        raise UserError(
            f"{_FILE}: {path} cannot be read: {error.strerror or error}; give another path, or leave it out"
        ) from error
    except ValueError as error:
        raise UserError(f"{_FILE}: {path} is not JSON: {error}; mend it there, or leave it out") from error
    if not isinstance(config, dict):
        raise UserError(f"{_FILE}: {path} holds a {type(config).__name__}; a ds_config.json holds an object")
    return config


def precision_said(path: str) -> str | None:
    """What a user's ds_config.json computes with, as a precision of a recipe; None where it does not say."""
    config = read_file(path)
    said = {name: part.get("enabled") for name in ("bf16", "fp16") if isinstance(part := config.get(name), dict)}
    on = next((name for name, value in said.items() if value is True), None)
    return on or ("fp32" if False in said.values() else None)


def _derived(decided: Decided) -> Config:
    """What Shoal itself tells DeepSpeed."""
    section = decided.section
    config: Config = {
        # Shoal counts micro-batches and divides by what there is in all of them, so DeepSpeed must not divide again.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": decided.clip_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "timers": {"throughput": {"enabled": False}},  # which waits for the device in every step
        "zero_optimization": _derived_zero(decided),
    }
    if decided.low_precision == "bf16":
        config["bf16"] = {"enabled": True}
    elif decided.low_precision == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": 1.0}  # Shoal keeps the scale, in the way of other strategies
    if decided.low_precision and section.stage > 1:  # stage 1 would go another way, which has other state
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _derived_zero(decided: Decided) -> Config:
    section, num_elements = decided.section, decided.num_elements
    # DeepSpeed's own sizes are for models of billions of weights: its buffers would be larger than a small model.
    bucket = min(500_000_000, max(num_elements // 16, 5_000_000), num_elements)
    bucket += bucket % 2
    zero: Config = {"stage": section.stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if section.stage == 3:
        zero["stage3_max_live_parameters"] = zero["stage3_max_reuse_distance"] = min(10**9, num_elements // 8)
        zero["stage3_prefetch_bucket_size"] = min(5 * 10**7, num_elements // 16)
    for key, device in (("offload_optimizer", section.offload_optimizer), ("offload_param", section.offload_params)):
        if device != "none":
            zero[key] = {"device": device} | ({"nvme_path": decided.nvme_dir} if device == "nvme" else {})
    if section.offload_params == "nvme":
        zero["offload_param"]["buffer_size"] = -(-decided.largest // decided.workers)
    return zero


def _taken(own: Mapping[str, Any], decided: Decided) -> Iterator[tuple[str, Any]]:
    """What of the user's file is handed on; "auto" leaves a value to Shoal, as it leaves it to others elsewhere."""
    known = _said_by_recipe(decided)
    idle = _idle(decided)
    for key, value in _leaves(own):
        if value == "auto" or (key.startswith(idle) and not key.endswith((".enabled", ".device"))):
            continue
        if key in known:
            allowed, field = known[key]
            if not _is_same(value, allowed):
                raise UserError(
                    f"{_FILE}: {key} is {json.dumps(value)} there and {json.dumps(allowed)} by {field} of the recipe; "
                    f"remove it from the file, or change {field}"
                )
        elif _may_be_handed_on(key):
            yield key, value
        else:
            raise UserError(f"{_FILE}: {key} is not something that Shoal hands on to DeepSpeed{_hint(key, known)}")


def _said_by_recipe(decided: Decided) -> dict[str, tuple[Any, str]]:
    """What a recipe says of DeepSpeed's settings, and where; a ds_config may say the same and nothing else."""
    section, optim = decided.section, decided.optim
    share = -(-decided.global_batch // decided.workers)
    said: dict[str, tuple[Any, str]] = {
        "train_batch_size": (decided.global_batch, "train.global_batch"),
        "train_micro_batch_size_per_gpu": (decided.micro_batch, "train.micro_batch"),
        "gradient_accumulation_steps": (-(-share // decided.micro_batch), "train.micro_batch"),
        "gradient_clipping": (decided.clip_norm or 0.0, "train.clip_norm"),
        "bf16.enabled": (decided.precision == "bf16", "train.precision"),
        "fp16.enabled": (decided.precision == "fp16", "train.precision"),
        "zero_allow_untested_optimizer": (True, "optim.name"),
        "zero_force_ds_cpu_optimizer": (False, "optim.name"),
        "optimizer.type": (_OPTIMIZERS[optim.name], "optim.name"),
        "optimizer.params.lr": (optim.lr, "optim.lr"),
        "optimizer.params.weight_decay": (optim.weight_decay, "optim.weight_decay"),
        "scheduler.type": (_SCHEDULES.get(optim.schedule), "optim.schedule"),
        "scheduler.params.warmup_num_steps": (optim.warmup_steps, "optim.warmup_steps"),
        "scheduler.params.warmup_min_lr": (0.0, "optim.warmup_steps"),
        "scheduler.params.warmup_max_lr": (optim.lr, "optim.lr"),
        "scheduler.params.warmup_type": ("linear", "optim.warmup_steps"),
        "zero_optimization.stage": (section.stage, "parallel.deepspeed.stage"),
    }
    if optim.name == "sgd":
        said["optimizer.params.momentum"] = (optim.momentum or 0.0, "optim.momentum")
        said["optimizer.params.nesterov"] = (optim.nesterov, "optim.nesterov")
    else:
        said["optimizer.params.betas"] = (optim.betas or [0.9, 0.999], "optim.betas")
        said["optimizer.params.eps"] = (optim.eps or 1e-8, "optim.eps")
        said["optimizer.params.adam_w_mode"] = (optim.name == "adamw", "optim.name")
    offloads = {"offload_optimizer": section.offload_optimizer, "offload_param": section.offload_params}
    for key, device in offloads.items():
        field = "parallel.deepspeed." + ("offload_params" if key == "offload_param" else key)
        said[f"zero_optimization.{key}.device"] = (device, field)
        said[f"zero_optimization.{key}.nvme_path"] = (section.nvme_dir, "parallel.deepspeed.nvme_dir")
    return said | {f"fp16.{key}": (value, "train.precision") for key, value in _LOSS_SCALE.items()}


def _idle(decided: Decided) -> tuple[str, ...]:
    """Beginnings of what does nothing in this run: many files say it for every case."""
    section = decided.section
    parts = {
        "fp16.": decided.precision != "fp16",
        "bf16.": decided.precision != "bf16",
        "zero_optimization.offload_optimizer.": section.offload_optimizer == "none",
        "zero_optimization.offload_param.": section.offload_params == "none",
    }
    return tuple(part for part, is_idle in parts.items() if is_idle)


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted name; the values of nested objects one by one."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _is_same(value: Any, allowed: Any) -> bool:
    if isinstance(value, str) and isinstance(allowed, str):
        return value.lower() == allowed.lower()
    if isinstance(value, bool) or isinstance(allowed, bool):
        return value is allowed
    return bool(value == allowed)


def _may_be_handed_on(key: str) -> bool:
    section, _, rest = key.partition(".")
    return key in _HANDED_ON or section in _HANDED_ON_WHOLE or (section == "zero_optimization" and rest in _OF_ZERO)


def _hint(key: str, known: Mapping[str, Any]) -> str:
    possible = [*known, *_HANDED_ON, *(f"zero_optimization.{name}" for name in _OF_ZERO)]
    near = difflib.get_close_matches(key, possible, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else "; remove it from the file"


def _put(config: Config, key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        config = config.setdefault(part, {})
    config[last] = value
