"""How a failure of a run is told to the user."""

import errno
from pathlib import Path

import torch

from shoal.core.errors import NoMemoryError, RunError, UserError


def in_words(  # noqa: PLR0911 - one return a cause
    error: BaseException, run_dir: Path, micro_batch: int, snapshot: Path | None = None
) -> BaseException:
    """What the user is told when a run fails: words and a remedy where the cause is known, else the error itself.

    `snapshot`: of the memory of a GPU that was too small.
    """
    message = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RunError):  # in words already
        return error
    if isinstance(error, UserError):  # in the middle of a run: a corrupt image, say
        return RunError(str(error))
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in message:
        return NoMemoryError(
            f"out of memory ({message}): "
            f"set train.micro_batch below {micro_batch} "
            "(the global batch stays the same), train.activation_checkpointing=true, or use a smaller model"
            + (f"; what held the memory is in {snapshot}" if snapshot is not None else "")
        )
    if "Expected more than 1 value per channel" in message:
        return RunError(
            f"batch norm cannot train on a single sample ({message}): choose train.global_batch and train.micro_batch "
            "so that the last step of an epoch has more"
        )
    if "Expected to have finished reduction in the prior iteration" in message:
        return RunError(
            "the loss does not use every parameter of the model, and ddp waits for the gradient of each: "
            "set parallel.find_unused_parameters=true, or freeze the parameters that are not used"
        )
    if "got mixed torch.Tensor and DTensor" in message or "does not have a sharding strategy registered" in message:
        return RunError(
            f"each worker holds a part of every weight, and one was used as if it were whole ({message}): have the "
            "task call the model, model(...), and do in its forward() what needs weights, other methods or parts of "
            "it; or use parallel.strategy=ddp, where every worker holds all of it"
        )
    if isinstance(error, RuntimeError) and message.startswith("DataLoader worker"):
        return RunError(f"a process that reads data died ({message}); it may be short of memory: lower data.workers")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS):
        return RunError(f"{run_dir} cannot be written: {error.strerror}; make room, then resume the run")
    return error
