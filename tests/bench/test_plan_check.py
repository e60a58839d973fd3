"""What is foreseen is what real workers take."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.bench import plan_check
from shoal.bench.plan_check import compare, measure, recipe_for
from shoal.bench.plan_memory import HostMemory
from shoal.core.errors import RunError, UserError
from shoal.parallel.sizes import Memory
from shoal.recipe.load import load_recipe
from shoal.train.advise import Outcome
from shoal.train.forecast import forecast
from tests.tiny import TINY, own_recipe, write_own_task

CPU = {"cluster.gpus_per_worker": 0, "cluster.threads_per_worker": 1}
GPT: dict[str, Any] = {
    "task": "language_modelling",
    "model": {"name": "gpt", "layers": 4, "heads": 4, "dim": 256},
    "data": {"name": "tokens", "dir": ".", "context": 128, "vocab_size": 8000},
    "train": {"steps": 3, "global_batch": 8},
}
IMAGES: dict[str, Any] = {
    "task": "image_classification",
    "data": {"name": "synthetic", "samples": 64, "val_samples": 2, "shape": [3, 224, 224], "classes": 1000},
    "train": {"steps": 3, "global_batch": 8},
}
FULL = {
    "gpt2": GPT | {"model": {"name": "gpt"}, "data": {"name": "tokens", "dir": ".", "context": 256}},
    "resnet50": IMAGES | {"model": {"name": "resnet50"}},
    "vit": IMAGES | {"model": {"name": "vit", "patch": 16, "dim": 768, "layers": 12, "heads": 12}},
}


def compared(tree: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    loaded = load_recipe([tree], {**CPU, **overrides})
    return compare(loaded, forecast(loaded.recipe, 1 << 40, on_gpu=False).own)


def write_tokens(folder: Path, vocab_size: int) -> None:
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(0, vocab_size, 60_000).astype("<u2").tofile(folder / name)


def test_a_language_model_takes_what_was_foreseen(here: Path) -> None:
    write_tokens(here, 8000)
    found = compared(GPT)
    assert found["agrees"] and abs(found["parts"]["peak"]["difference"]) < 0.1
    weights, optimizer = found["parts"]["weights"], found["parts"]["optimizer"]
    assert weights["difference"] == 0 and optimizer["difference"] == pytest.approx(0, abs=0.001)
    assert found["parts"]["peak"]["measured_bytes"] > 4 * weights["measured_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("compress", ["bf16", "powersgd"])
def test_what_packing_takes_was_foreseen(compress: str, here: Path) -> None:
    write_tokens(here, 8000)
    found = compared(GPT, **{"cluster.workers": 2, "parallel.strategy": "ddp", "parallel.compress": compress})
    assert abs(found["parts"]["peak"]["difference"]) < 0.05, found["parts"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        {"parallel.strategy": "ddp"},
        {"parallel.strategy": "fsdp"},
        {"parallel.strategy": "deepspeed", "parallel.deepspeed.stage": 1},
        {"parallel.strategy": "deepspeed", "parallel.deepspeed.stage": 2},
        {"parallel.strategy": "deepspeed", "parallel.deepspeed.stage": 3},
        {"parallel.strategy": "pipeline", "train.micro_batch": 2},
        {"parallel.strategy": "tensor"},
    ],
    ids=lambda strategy: "-".join(str(value) for value in strategy.values()),
)
@pytest.mark.parametrize("model", FULL)
def test_every_strategy_takes_what_was_foreseen(model: str, strategy: dict[str, Any], here: Path) -> None:
    if model == "resnet50" and strategy["parallel.strategy"] in ("pipeline", "tensor"):
        pytest.skip("it says not how it is divided")
    write_tokens(here, 50_000)
    found = compared(FULL[model], **{"cluster.workers": 2, **strategy})
    assert abs(found["parts"]["peak"]["difference"]) < 0.1, found["parts"]


@pytest.mark.slow
@pytest.mark.parametrize("model", FULL)
def test_one_process_takes_what_was_foreseen(model: str, here: Path) -> None:
    write_tokens(here, 50_000)
    found = compared(FULL[model], **{"train.global_batch": 4})
    assert abs(found["parts"]["peak"]["difference"]) < 0.1, found["parts"]


def test_steps_are_taken_as_they_were_foreseen_and_no_secret_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_DIR", "of somebody")
    monkeypatch.setenv("SHOAL_TEST_BATCH", "32")
    pipeline = {"strategy": "pipeline", "deepspeed": {"nvme_dir": "${env:SHOAL_TEST_DIR}"}}
    tree = GPT | {"parallel": pipeline, "cluster": {"workers": 3}}
    loaded = load_recipe([tree], {**CPU, "train.global_batch": 64})
    own = forecast(loaded.recipe, 1 << 40, on_gpu=False).own
    assert own.micro_batch == 10 and recipe_for(loaded, own).recipe.train.micro_batch is None, "10 does not divide 64"
    assert recipe_for(loaded, own).tree()["parallel"]["deepspeed"]["nvme_dir"] == "${env:SHOAL_TEST_DIR}"
    given = {"train.micro_batch": "${env:SHOAL_TEST_BATCH}", "train.global_batch": 64}
    loaded = load_recipe([tree], {**CPU, **given})
    own = forecast(loaded.recipe, 1 << 40, on_gpu=False).own
    assert recipe_for(loaded, own).tree()["train"]["micro_batch"] == "${env:SHOAL_TEST_BATCH}"
    smaller = replace(own, micro_batch=4, is_own_micro_batch=False)
    assert recipe_for(loaded, smaller).tree()["train"]["micro_batch"] == 4


@pytest.mark.parametrize(
    ("foreseen", "taken", "agrees"),
    [(10, 9.5, True), (10, 10.7, True), (10, 12.0, False), (10, 8.5, False), (1, 1.45, True), (1, 1.55, False)],
)
def test_what_is_kept_in_the_hosts_memory_is_compared_too(
    foreseen: int, taken: float, agrees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With figures of GPUs' workers made up, in GiB."""
    loaded = load_recipe([TINY], {"parallel.strategy": "fsdp", "parallel.fsdp.cpu_offload": True})
    option = forecast(loaded.recipe, 1 << 40, on_gpu=True).own.option
    outcome = Outcome(option, memory=Memory(activations=1 << 30, host=foreseen << 30), micro_batch=1)
    worker = {"peak": 1 << 30, "weights": 0, "optimizer": 0, "host": int(taken * 2**30), "device": "cuda"}
    workers = [worker | {"seconds": [2.0, 0.5, 0.75]}, worker | {"seconds": [0.25], "peak": 2, "host": 1}]
    monkeypatch.setattr(plan_check, "measure", lambda loaded, num_steps: workers[:: -1 if agrees else 1])
    found = compare(loaded, outcome)
    assert found["agrees"] is agrees and found["off"] == ([] if agrees else ["in host"])
    assert found["parts"]["in host"]["measured_bytes"] == int(taken * 2**30)
    assert found["step_s"] == 0.5 and "in host" in found["how"]


def test_each_worker_tells_what_it_took() -> None:
    found = measure(load_recipe([TINY], CPU | {"cluster.workers": 2, "parallel.strategy": "fsdp"}), 2)
    assert len(found) == 2 and all(len(worker["steps"]) == 2 and worker["device"] == "cpu" for worker in found)
    assert sum(worker["weights"] for worker in found) == 4 * (16 * 8 + 8 + 8 * 3 + 3)


@pytest.mark.parametrize(
    ("in_loss", "error", "message"),
    [
        ("raise ZeroDivisionError('in the loss')", RunError, "--check: ZeroDivisionError: in the loss"),
        pytest.param(
            "return model(batch[0])",
            UserError,
            r"--check: task.loss returned a tensor of shape \(8, 1\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_is_wrong_with_a_task_is_told(in_loss: str, error: type[Exception], message: str, here: Path) -> None:
    write_own_task(here, "task_of_check", in_loss)
    with pytest.raises(error, match=message):
        measure(load_recipe([own_recipe("task_of_check")]), 2)


def memory_rises_and_falls() -> None:
    memory, size = HostMemory(), 64 << 20
    tensor = torch.ones(size // 4)
    assert memory.now() > 0.9 * size
    del tensor
    memory.reset_peak()
    assert memory.peak() < 0.5 * size
    with_pinned = HostMemory(with_pinned=True)
    shared = torch.ones(size // 4).share_memory_()  # which the kernel counts as it does pinned memory
    assert with_pinned.now() > 0.9 * size and with_pinned.peak() > 0.9 * size and memory.now() < 0.5 * size
    del shared
    del memory


def test_the_memory_of_a_process_is_seen_to_rise_and_fall() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the kernel does not let a process reset its peak")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        # Of this one, what tests before have left would be given back meanwhile.
        alone.submit(memory_rises_and_falls).result()
