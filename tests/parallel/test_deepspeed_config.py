"""DeepSpeed's configuration: what a recipe decides, what a user's own file adds, and what the two say otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.parallel.deepspeed_config import Decided, build_config
from shoal.parallel.section import DeepSpeedSection, OptimSection


def decided(section: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **more: Any) -> Decided:
    values = {
        "precision": "fp32",
        "clip_norm": 0.5,
        "global_batch": 64,
        "micro_batch": 4,
        "workers": 4,
        "num_elements": 1_000_000,
        "largest": 10_001,
    }
    return Decided(DeepSpeedSection(**section or {}), OptimSection(**optim or {}), **(values | more))


@pytest.fixture
def merged(tmp_path: Path) -> Any:
    """`merged(file, ...)`: the configuration with a user's file of that content."""

    def build(
        own: Any, section: dict[str, Any] | None = None, optim: dict[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        path = tmp_path / "ds_config.json"
        path.write_text(own if isinstance(own, str) else json.dumps(own))
        return build_config(decided((section or {}) | {"config": str(path)}, optim, **more))

    return build


def test_what_the_recipe_says_is_what_deepspeed_is_told() -> None:
    config = build_config(decided({"stage": 3, "offload_optimizer": "cpu"}))
    assert config["gradient_clipping"] == 0.5
    assert config["gradient_accumulation_steps"] == config["train_micro_batch_size_per_gpu"] == 1
    assert config["zero_optimization"]["stage"] == 3
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}
    assert "offload_param" not in config["zero_optimization"]
    assert "bf16" not in config and "fp16" not in config
    assert build_config(decided(clip_norm=None))["gradient_clipping"] == 0.0


@pytest.mark.parametrize(("stage", "kept"), [(1, False), (2, True), (3, True)])
def test_low_precision_keeps_weights_in_full_precision_and_adds_up_in_it(stage: int, kept: bool) -> None:
    for precision in ("bf16", "fp16"):
        config = build_config(decided({"stage": stage}, precision=precision))
        assert config[precision]["enabled"] is True
        assert not any("master" in key for key in config[precision])
        assert ("data_types" in config) == kept
    assert build_config(decided(precision="fp16"))["fp16"]["loss_scale"] == 1.0, "the scale is Shoal's own"


@pytest.mark.parametrize(
    ("num_elements", "bucket"), [(3, 4), (1_000_001, 1_000_002), (160_000_000, 10_000_000), (10**11, 500_000_000)]
)
def test_buffers_are_no_larger_than_the_model_needs(num_elements: int, bucket: int) -> None:
    zero = build_config(decided({"stage": 3}, num_elements=num_elements))["zero_optimization"]
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == bucket
    assert zero["stage3_max_live_parameters"] == min(num_elements // 8, 10**9)


def test_nvme_is_a_folder_of_this_run_with_room_for_the_largest_part() -> None:
    section = {"stage": 3, "offload_optimizer": "nvme", "offload_params": "nvme", "nvme_dir": "/fast"}
    zero = build_config(decided(section, nvme_dir="/fast/shoal-1"))["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"] == zero["offload_param"]["nvme_path"] == "/fast/shoal-1"
    assert zero["offload_param"]["buffer_size"] == 2501, "a fourth of the largest weight, rounded up"


def test_a_users_file_adds_what_a_recipe_has_no_word_for(merged: Any) -> None:
    own = {
        "communication_data_type": "fp32",
        "aio": {"block_size": 4096},
        "zero_optimization": {
            "overlap_comm": False,
            "reduce_bucket_size": 7,
            "offload_optimizer": {"pin_memory": False},
        },
    }
    config = merged(own, {"offload_optimizer": "cpu"})
    assert config["communication_data_type"] == "fp32"
    assert config["aio"] == {"block_size": 4096}
    assert config["zero_optimization"]["overlap_comm"] is False
    assert config["zero_optimization"]["reduce_bucket_size"] == 7, "Shoal's own size is only a default"
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}


def test_a_file_that_others_fill_in_is_filled_in_by_the_recipe(merged: Any) -> None:
    """As Hugging Face's examples have it."""
    own = {
        "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto"}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "offload_param": {"device": "none", "pin_memory": True},
            "reduce_bucket_size": "auto",
            "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    }
    config, plain = merged(own, {"stage": 3}), build_config(decided({"stage": 3}))
    added = {"sub_group_size": 1e9, "stage3_gather_16bit_weights_on_model_save": True}
    assert config["zero_optimization"] == plain["zero_optimization"] | added
    rest = {key: value for key, value in config.items() if key not in ("zero_optimization", "wall_clock_breakdown")}
    assert rest == {key: value for key, value in plain.items() if key != "zero_optimization"}


def test_a_file_may_repeat_what_the_recipe_says(merged: Any) -> None:
    own = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "optimizer": {"type": "adamw", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 9}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }
    optim = {"name": "adamw", "lr": 0.01, "betas": [0.9, 0.95], "schedule": "cosine", "warmup_steps": 9}
    section = {"stage": 2, "offload_optimizer": "cpu"}
    config = merged(own, section, optim, precision="bf16")
    assert config == build_config(decided(section, optim, precision="bf16"))


@pytest.mark.parametrize(
    ("own", "key", "value", "field"),
    [
        ({"train_batch_size": 32}, "train_batch_size", "32", "train.global_batch"),
        ({"train_micro_batch_size_per_gpu": 8}, "train_micro_batch_size_per_gpu", "8", "train.micro_batch"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "2", "train.micro_batch"),
        ({"gradient_clipping": 1.0}, "gradient_clipping", "1.0", "train.clip_norm"),
        ({"bf16": {"enabled": True}}, "bf16.enabled", "true", "train.precision"),
        ({"fp16": {"enabled": 1}}, "fp16.enabled", "1", "train.precision"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type", '"Lamb"', "optim.name"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1}}}, "optimizer.params.lr", "1", "optim.lr"),
        ({"optimizer": {"params": {"betas": [0.8, 0.9]}}}, "optimizer.params.betas", "[0.8, 0.9]", "optim.betas"),
        ({"scheduler": {"type": "WarmupDecayLR"}}, "scheduler.type", '"WarmupDecayLR"', "optim.schedule"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "3", "parallel.deepspeed.stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}},
            "zero_optimization.offload_optimizer.device",
            '"cpu"',
            "parallel.deepspeed.offload_optimizer",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device",
            '"nvme"',
            "parallel.deepspeed.offload_params",
        ),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer", "true", "optim.name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_says_otherwise_than_the_recipe_is_refused(
    merged: Any, own: dict[str, Any], key: str, value: str, field: str
) -> None:
    with pytest.raises(UserError, match=r"^parallel\.deepspeed\.config: ") as caught:
        merged(own)
    assert f"{key} is {value} there" in str(caught.value)
    assert f"by {field} of the recipe" in str(caught.value)


def test_a_loss_scale_of_another_rule_is_refused_where_there_is_one(merged: Any) -> None:
    own = {"fp16": {"enabled": True, "loss_scale_window": 1000}}
    with pytest.raises(UserError, match=r"fp16\.loss_scale_window is 1000 there and 2000 by train\.precision"):
        merged(own, precision="fp16")


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"zero_optimization": {"overlap_com": True}}, "did you mean zero_optimization.overlap_comm?"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is not something that Shoal hands on"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled is not something that Shoal hands on"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "data_types.grad_accum_dtype is not something"),
        ({"optimizer": {"params": {"momentum": 0.9}}}, "optimizer.params.momentum is not something"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "bf16_master_weights_and_grads is not"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_change_a_step_or_its_state_is_not_handed_on(merged: Any, own: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        merged(own, precision="bf16")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"), [("{", "is not JSON"), ("[1]", "holds a list"), (None, "cannot be read: No such file")]
)
def test_a_file_that_is_none_is_named(merged: Any, tmp_path: Path, content: str | None, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        if content is None:
            build_config(decided({"config": str(tmp_path / "missing.json")}))
        else:
            merged(content)
    assert str(tmp_path) in str(caught.value)
