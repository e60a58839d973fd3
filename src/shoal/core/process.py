"""Which process of the run this is, and the device it computes on."""

from dataclasses import dataclass

import torch

from shoal.core.errors import UserError


@dataclass(frozen=True)
class Process:
    """One of `world_size` processes that train together; rank 0 writes what is written once."""

    rank: int
    world_size: int
    device: torch.device


def choose_device(gpus_per_worker: int | None, local_rank: int = 0) -> torch.device:
    """The device for a worker: None takes a GPU where there is one, 0 the CPU, 1 a GPU or an error."""
    available = torch.cuda.is_available()
    if gpus_per_worker == 0 or (gpus_per_worker is None and not available):
        return torch.device("cpu")
    if not available:
        raise UserError(
            "cluster.gpus_per_worker: 1 GPU is asked for and PyTorch sees none; "
            "leave out --gpu, set cluster.gpus_per_worker=0, or check the driver with nvidia-smi"
        )
    return torch.device("cuda", local_rank)
