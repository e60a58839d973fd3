"""A recipe inside Ray Train: for those whose jobs are `TorchTrainer`s already.

    from ray.train import RunConfig, ScalingConfig, FailureConfig
    from ray.train.torch import TorchTrainer
    from shoal.launch.ray_train import train_loop

    TorchTrainer(
        train_loop,
        train_loop_config={"recipe": "digits", "run_dir": "/shared/runs/digits-1"},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    ).fit().return_value

Ray Train starts the workers and starts them again; the run goes on from its newest committed checkpoint, whether or not
Ray Train has heard of it. It does hear of each: the checkpoint is copied to Ray's storage in the background, and is
reported with its validation metrics, so that `Result.checkpoint` and Tune see it: a folder that holds `step-...`.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shoal.checkpoint.folder import being_read, read_info, step_of
from shoal.core.errors import UserError
from shoal.core.group import Group
from shoal.core.process import Process
from shoal.observe.console import make_console
from shoal.recipe.load import load_recipe
from shoal.recipe.merge import override_paths
from shoal.train.request import RunRequest
from shoal.train.worker import train_worker


def train_loop(config: dict[str, Any]) -> dict[str, Any]:
    """Train `recipe` (a name, a file, a mapping) with `overrides` in `run_dir`; rank 0 returns the summary."""
    import ray.train
    import ray.train.torch

    if "recipe" not in config or "run_dir" not in config:
        raise UserError("train_loop_config: needs recipe and run_dir, a folder on storage that every machine shares")
    context = ray.train.get_context()
    overrides = override_paths(config.get("overrides", {}))
    overrides |= {("cluster", "workers"): context.get_world_size(), ("cluster", "min_workers"): None}
    loaded = load_recipe([config["recipe"]], {".".join(path): value for path, value in overrides.items()})
    cluster = loaded.recipe.cluster
    control = dist.new_group(backend="gloo")
    process = Process(
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        device=ray.train.torch.get_device(),
        group=Group(context.get_world_rank(), context.get_world_size(), control),
        local_rank=context.get_local_rank(),
        local_world_size=context.get_local_world_size(),
        node=str(context.get_node_rank()),
        agent_pid=os.getppid(),
    )
    run_dir = Path(config["run_dir"])
    console = make_console("lines" if process.is_first else "silent")
    request = RunRequest(
        loaded=loaded,
        run_dir=run_dir,
        console=console,
        resume=process.group.from_first((run_dir / "recipe.yaml").is_file()),
        threads=cluster.cpus_per_worker or 1,
        on_saved=_report_to_ray(process.is_first),
    )
    return train_worker(request, process)


def _report_to_ray(is_first: bool) -> Callable[[Path, Mapping[str, float]], None]:
    """Makes every checkpoint one of Ray Train's; called by all workers, for each of them reports."""
    import ray.train
    from ray.train import Checkpoint, CheckpointUploadMode

    storage = ray.train.get_context().get_storage()

    def report(path: Path, metrics: Mapping[str, float]) -> None:
        lock = contextlib.ExitStack()
        if is_first:
            lock.enter_context(being_read(read_info(path)))  # nobody deletes it before it is copied

        def copy(checkpoint: Checkpoint, name: str) -> Checkpoint:
            import pyarrow.fs

            target = f"{storage.experiment_fs_path}/{name}"
            with lock:
                files = storage.storage_filesystem
                files.create_dir(f"{target}/{path.name}")
                pyarrow.fs.copy_files(str(path), f"{target}/{path.name}", destination_filesystem=files)
            return Checkpoint(target, files)

        ray.train.report(
            {"step": step_of(path), **metrics},
            checkpoint=Checkpoint(str(path)) if is_first else None,
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=False,
            checkpoint_upload_fn=copy,
        )

    return report
