"""What a worker says of its device, and that all of a run compute alike."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shoal.core.kernels import can_compile_c, can_compile_kernels
from shoal.core.process import Process
from shoal.recipe.automatic import CPU, Hardware
from shoal.recipe.load import load_recipe
from shoal.train.hardware import for_workers, hardware_of
from tests.many import Ranks
from tests.recipe.test_automatic import CNN


def test_a_cpu_is_a_cpu() -> None:
    assert hardware_of(torch.device("cpu")) == CPU


def test_without_a_c_compiler_or_what_python_brings_for_it_nothing_can_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    (tmp_path / "Python.h").touch()
    assert can_compile_c(lambda name: "/usr/bin/gcc" if name == "gcc" else None, str(tmp_path))
    assert not can_compile_c(lambda name: None, str(tmp_path))
    assert not can_compile_c(lambda name: "/usr/bin/gcc", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("CC", "mycc")
    assert can_compile_c(lambda name: None, str(tmp_path))
    assert can_compile_kernels() is False or torch.cuda.is_available()


def what_comes_out(process: Process) -> str:
    return for_workers(load_recipe([CNN], ["cluster.workers=2"]).recipe, process).train.precision


def test_all_workers_come_to_the_same(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2)(what_comes_out) == ["fp32", "fp32"]
    assert Hardware.common([Hardware(True, True), Hardware(True, False)]) == Hardware(True, False)
