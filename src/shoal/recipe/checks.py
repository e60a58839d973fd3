"""What no single field can tell: combinations of fields that cannot work. Pure; returns all that is wrong."""

from shoal.core.metrics import direction
from shoal.data.section import OF_TASK, CsvText
from shoal.recipe.numerics_checks import numerics_problems
from shoal.recipe.parallel_checks import Found, num_shares, parallel_problems
from shoal.recipe.schema import Recipe
from shoal.tasks.section import METRICS, CustomTask

_DATA_FOR = {
    "image_classification": ("digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic"),
    "text_classification": ("agnews", "csv_text", "text_shards"),
    "language_modelling": ("shakespeare", "text", "tokens"),
}
_MODELS_FOR = {
    "image_classification": ("mlp", "simple_cnn", "resnet18", "resnet34", "resnet50", "resnet101", "vit"),
    "text_classification": ("lstm", "bilstm"),
    "language_modelling": ("gpt",),
}


def problems(recipe: Recipe) -> list[tuple[tuple[str, ...], str]]:
    """(path, message) for every combination that cannot work."""
    return [
        *_task_problems(recipe),
        *_length_problems(recipe),
        *_optim_problems(recipe),
        *_data_problems(recipe),
        *_metric_problems(recipe),
        *numerics_problems(recipe),
        *parallel_problems(recipe),
        *_cluster_problems(recipe),
        *_upload_problems(recipe),
    ]


def _task_problems(recipe: Recipe) -> Found:
    if isinstance(recipe.task, CustomTask):
        return
    task = recipe.task.name
    for key, allowed in (("data", _DATA_FOR[task]), ("model", _MODELS_FOR[task])):
        section = getattr(recipe, key)
        if section is None:
            yield (key,), f"is required by task {task}, for example {key}: {{name: {allowed[0]}}}"
        elif section.name == OF_TASK:
            yield (key,), f"needs a name, because task {task} has no data of its own; allowed: {', '.join(allowed)}"
        elif ":" not in section.name and section.name not in allowed:
            yield (key, "name"), f"{section.name!r} does not go with task {task}; allowed: {', '.join(allowed)}"


def _length_problems(recipe: Recipe) -> Found:
    train, workers = recipe.train, recipe.cluster.workers
    if (train.epochs is None) == (train.steps is None):
        given = "both are given" if train.epochs else "neither is given"
        yield ("train",), f"give exactly one of train.epochs and train.steps ({given})"
    if recipe.cluster.min_workers is not None:
        if train.global_batch < workers:
            yield ("train", "global_batch"), f"{train.global_batch} is fewer than cluster.workers {workers}"
    elif (shares := num_shares(recipe)) is None:
        return
    elif train.global_batch % shares:
        yield (
            ("train", "global_batch"),
            f"{train.global_batch} is not divisible by {_shares_in_words(workers, shares)}; "
            f"nearest that is: {_nearest_multiple(train.global_batch, shares)}",
        )
    elif isinstance(train.micro_batch, int) and (train.global_batch // shares) % train.micro_batch:
        share = train.global_batch // shares
        best = _nearest_divisor(share, train.micro_batch)
        yield (
            ("train", "micro_batch"),
            f"{train.micro_batch} does not divide the {share} samples of a worker "
            f"(train.global_batch {train.global_batch} / {_shares_in_words(workers, shares)}); "
            f"nearest that does: {best}",
        )


def _shares_in_words(workers: int, shares: int) -> str:
    if shares == workers:
        return f"cluster.workers {workers}"
    groups = f"{shares} groups" if shares > 1 else "one group"
    return f"{groups} of workers that compute the same samples, of cluster.workers {workers}"


def _nearest_divisor(value: int, wanted: int) -> int:
    for distance in range(1, min(wanted, 100_000)):
        for divisor in (wanted - distance, wanted + distance):
            if value % divisor == 0:
                return divisor
    return 1


def _nearest_multiple(value: int, factor: int) -> int:
    return max(factor, round(value / factor) * factor)


def _optim_problems(recipe: Recipe) -> Found:
    optim = recipe.optim
    if optim.name == "sgd":
        for field in ("betas", "eps"):
            if getattr(optim, field) is not None:
                yield ("optim", field), "is for adam and adamw, but optim.name is sgd; remove it or set it to null"
    elif optim.momentum is not None:
        yield ("optim", "momentum"), f"is for sgd, but optim.name is {optim.name}; remove it or set it to null"
    if optim.nesterov and not optim.momentum:
        yield ("optim", "nesterov"), "needs optim.name sgd and a momentum above 0"
    if optim.schedule == "step" and optim.step_every is None:
        yield ("optim", "step_every"), "is required by optim.schedule step: steps between two drops"
    if optim.schedule != "step" and optim.step_every is not None:
        yield ("optim", "step_every"), f"is for optim.schedule step, but it is {optim.schedule}; remove it"
    if optim.scale_lr != "none" and optim.reference_batch is None:
        yield ("optim", "reference_batch"), f"is required by optim.scale_lr {optim.scale_lr}: the batch that lr is for"


def _data_problems(recipe: Recipe) -> Found:
    data = recipe.data
    if isinstance(data, CsvText):
        if data.val_file is None and data.val_samples is None:
            yield ("data", "val_samples"), "is required when data.val_file is null: rows to keep for validation"
        if data.val_file is not None and data.val_samples is not None:
            yield ("data", "val_samples"), f"splits data.train_file, but data.val_file is {data.val_file!r}; drop one"


def _metric_problems(recipe: Recipe) -> Found:
    known = METRICS.get(recipe.task.name)
    checkpoint, early_stop = recipe.checkpoint, recipe.early_stop
    if checkpoint.keep_best and checkpoint.metric is None:
        yield ("checkpoint", "metric"), f"is required by checkpoint.keep_best {checkpoint.keep_best}"
    watched = [("checkpoint", checkpoint.metric, checkpoint.mode)]
    if early_stop is not None:
        watched.append(("early_stop", early_stop.metric, early_stop.mode))
    for section, metric, mode in watched:
        if metric is None:
            continue
        if known is not None and metric not in known:
            yield (
                (section, "metric"),
                f"{metric!r} is not reported by task {recipe.task.name}; allowed: {', '.join(known)}",
            )
        elif mode == "auto" and direction(metric) is None:
            yield (section, "mode"), f"whether less or more of {metric!r} is better is not clear; set min or max"


def _upload_problems(recipe: Recipe) -> Found:
    checkpoint = recipe.checkpoint
    upload_to = checkpoint.upload_to or "not set"
    if checkpoint.encryption is not None and not upload_to.startswith(("s3://", "s3a://")):
        what = f"{checkpoint.encryption} is for checkpoint.upload_to s3://..., but that is {upload_to}"
        yield ("checkpoint", "encryption"), what
    if checkpoint.kms_key is not None and not (checkpoint.encryption or "").startswith("aws:kms"):
        yield (
            ("checkpoint", "kms_key"),
            f"is for checkpoint.encryption aws:kms, but that is {checkpoint.encryption or 'not set'}",
        )


def _cluster_problems(recipe: Recipe) -> Found:
    cluster = recipe.cluster
    parallel = recipe.parallel
    if cluster.min_workers is not None and cluster.min_workers > cluster.workers:
        yield ("cluster", "min_workers"), f"{cluster.min_workers} is more than cluster.workers {cluster.workers}"
    if parallel.hierarchical and parallel.compress != "none":
        yield ("parallel", "compress"), f"{parallel.compress} does not go with parallel.hierarchical; drop one"
    if parallel.sync_every > 1:
        for field, off in (("compress", "none"), ("hierarchical", False), ("sync_batch_norm", False)):
            if getattr(parallel, field) != off:
                yield ("parallel", field), "is for gradients, and parallel.sync_every above 1 sends none; drop one"
        if recipe.train.precision == "fp16":
            yield ("train", "precision"), "fp16 scales its loss by worker, which parallel.sync_every cannot; use bf16"
    share = cluster.gpus_per_worker
    if share is not None and 0 < share < 1 < cluster.workers and parallel.backend != "gloo":
        yield (
            ("cluster", "gpus_per_worker"),
            f"{share:g} is a share of a GPU, and NCCL takes one worker a GPU; use 1, one worker, or backend gloo",
        )
    if cluster.gpus_per_worker == 0:
        for field in ("gpu_memory_fraction", "gpu_allocator"):
            if getattr(cluster, field) is not None:
                yield ("cluster", field), "needs a GPU, but cluster.gpus_per_worker is 0; remove one of them"
        if recipe.train.precision == "tf32":
            yield ("train", "precision"), "tf32 needs an NVIDIA GPU, but cluster.gpus_per_worker is 0; use fp32 or bf16"
