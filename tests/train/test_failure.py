"""What a user is told of a failure."""

import errno
from pathlib import Path

import pytest
import torch

from shoal.core.errors import NoMemoryError, RunError, UserError
from shoal.train.failure import in_words


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "set train.micro_batch below 8 "),
        (MemoryError(), r"out of memory \(MemoryError\)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes\nmore"), r"out of memory .* 9 bytes\)"),
        (
            ValueError("Expected more than 1 value per channel when training"),
            "choose train.global_batch and train.micro",
        ),
        (RuntimeError("Expected to have finished reduction in the prior iteration"), "find_unused_parameters=true"),
        (
            RuntimeError("aten.addmm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor"),
            r"used as if it were whole \(aten\.addmm.*have the task call the model.*or use parallel\.strategy=ddp",
        ),
        (
            NotImplementedError("Operator aten.x.default does not have a sharding strategy registered."),
            "used as if it were whole",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed"), "lower data.workers"),
        (OSError(errno.ENOSPC, "No space left on device"), "^/runs/one cannot be written: No space left on device"),
        (UserError("data: image 3 is corrupt"), "^data: image 3 is corrupt$"),
    ],
)
def test_a_known_cause_is_told_with_a_remedy(error: Exception, says: str) -> None:
    told = in_words(error, Path("/runs/one"), micro_batch=8)
    assert type(told) is (NoMemoryError if "out of memory" in str(told) else RunError)
    with pytest.raises(RunError, match=says):
        raise told


@pytest.mark.parametrize(
    "error", [RunError("in words already"), KeyError("x"), RuntimeError(""), OSError(errno.EPERM, "no"), SystemExit(3)]
)
def test_any_other_stays_as_it_is(error: BaseException) -> None:
    assert in_words(error, Path("/runs/one"), micro_batch=8) is error
