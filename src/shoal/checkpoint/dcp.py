"""A checkpoint for PyTorch's distributed checkpointing (DCP): into plain tensors or DTensors, however they are sharded.

    dcp.load(state_dict, storage_reader=DcpReader(path))

DCP plans which block each process needs; where the blocks are, and what they hold, comes from Shoal's files. DCP's own
files hold pickles, and so are neither written nor read.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shoal.checkpoint.folder import read_info
from shoal.checkpoint.read import Tensors


class DcpReader(StorageReader):
    """One checkpoint, that is: the folder `step-...`."""

    def __init__(self, path: Path | str) -> None:
        self.tensors = Tensors(read_info(Path(path)))

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a reader is of one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Names, types, shapes, and which block is where."""
        entries: dict[str, Any] = {}
        for name, places in self.tensors.places.items():
            chunks = [ChunkStorageMetadata(torch.Size(place.offset), torch.Size(place.shape)) for place in places]
            properties = TensorProperties(dtype=self.tensors.dtypes[name])
            entries[name] = TensorStorageMetadata(properties, torch.Size(self.tensors.shapes[name]), chunks)
        return Metadata(entries)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As DCP has planned it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As DCP has planned it."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every block that the plan asks for."""
        for item in plan.items:
            index: MetadataIndex = item.storage_index
            assert index.offset is not None
            offset = [a + b for a, b in zip(index.offset, item.storage_offsets, strict=True)]
            block = self.tensors.block(index.fqn, offset, list(item.lengths))
            target = planner.resolve_tensor(item).detach()
            target.copy_(block)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """A path."""
        return isinstance(checkpoint_id, str | Path)


def load_into(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors that are there, plain or distributed, with those of a checkpoint. Each process reads by itself."""
    load(tensors, storage_reader=DcpReader(path), no_dist=True)
