"""What fields of `train:` that make steps faster do not go together with. Pure."""

from collections.abc import Iterator

from shoal.recipe.schema import Recipe

_WHOLE_MODEL = ("auto", "single", "ddp")


def numerics_problems(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, message) for every combination that cannot work."""
    train, strategy = recipe.train, recipe.parallel.strategy
    on_cpu = recipe.cluster.gpus_per_worker == 0
    if train.fp8:
        for is_wrong, why in (
            (on_cpu, "needs a GPU, but cluster.gpus_per_worker is 0"),
            (train.precision not in ("auto", "bf16"), f"needs train.precision bf16, but that is {train.precision}"),
            (train.compile is False, "gains nothing without train.compile, which is false; set it to true"),
            (strategy not in _WHOLE_MODEL, f"is for single and ddp, but parallel.strategy is {strategy}"),
            (train.activation_checkpointing, "does not go with train.activation_checkpointing; drop one"),
        ):
            if is_wrong:
                yield ("train", "fp8"), why if ";" in why else f"{why}; leave one of them out"
    is_ddp = strategy == "ddp" or (strategy == "auto" and recipe.cluster.workers > 1)
    if train.compile is True and is_ddp and recipe.parallel.bucket_mb < 1:
        yield (
            ("parallel", "bucket_mb"),
            f"{recipe.parallel.bucket_mb} is less than the 1 that train.compile can cut a model by; set 1 or more",
        )
    if train.cuda_graphs is True:
        for is_wrong, why in (
            (on_cpu, "is for GPUs, but cluster.gpus_per_worker is 0"),
            (recipe.cluster.workers > 1, f"is for one worker, but cluster.workers is {recipe.cluster.workers}"),
            (strategy not in ("auto", "single"), f"is for single, but parallel.strategy is {strategy}"),
            (train.precision == "fp16", "needs another train.precision than fp16, whose scale the host looks at"),
            (
                isinstance(train.micro_batch, int) and train.micro_batch < train.global_batch,
                "needs a step of one micro-batch, but train.micro_batch is less than train.global_batch",
            ),
        ):
            if is_wrong:
                yield ("train", "cuda_graphs"), f"{why}; leave one of them out"
