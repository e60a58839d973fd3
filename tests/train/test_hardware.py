"""What a worker says of its device, and that all of a run compute alike."""

from collections.abc import Callable

import pytest
import torch

from shoal.core.process import Process
from shoal.recipe.automatic import CPU, Hardware
from shoal.recipe.load import load_recipe
from shoal.train.hardware import for_workers, hardware_of
from tests.many import Ranks
from tests.recipe.test_automatic import CNN


def test_a_cpu_is_a_cpu() -> None:
    assert hardware_of(torch.device("cpu")) == CPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_without_a_c_compiler_cannot_compile() -> None:
    device = torch.device("cuda", 0)
    assert hardware_of(device, find=lambda name: f"/usr/bin/{name}").can_compile
    assert not hardware_of(device, find=lambda name: None).can_compile


def what_comes_out(process: Process) -> str:
    return for_workers(load_recipe([CNN], ["cluster.workers=2"]).recipe, process).train.precision


def test_all_workers_come_to_the_same(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(what_comes_out) == ["fp32", "fp32"]
    assert Hardware.common([Hardware(True, True), Hardware(True, False)]) == Hardware(True, False)
