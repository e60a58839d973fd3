"""Checkpoints of a few tensors, written as a run writes them."""

from collections.abc import Mapping
from pathlib import Path

import torch

from shoal.checkpoint.folder import list_checkpoints
from shoal.checkpoint.manifest import CheckpointInfo
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from shoal.checkpoint.write import Snapshot
from shoal.core.process import Process
from tests.many import CPU


def save(
    folder: Path, tensors: Mapping[str, torch.Tensor], step: int = 1, process: Process | None = None
) -> CheckpointInfo:
    """One more checkpoint in `folder`; every worker of a group must call this."""
    process = process or Process(0, 1, CPU)
    saver = Saver(folder, CheckpointSection(keep_last=100), process, recipe="name: saved\n")
    saver.save(Snapshot(step, 0, {"val_loss": 1.0 / step}, tensors, {"unit": {}}, {"rank": process.rank}))
    saver.finish()
    return list_checkpoints(folder)[-1]
