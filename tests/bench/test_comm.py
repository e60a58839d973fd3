"""The measuring works and its arithmetic is right; how much communication costs is nothing that is promised."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench import comm_collectives
from shoal.bench.comm import (
    SETTINGS,
    SIZES,
    SMALL_VIT,
    Settings,
    collective_table,
    in_units,
    measure,
    parse_sizes,
    recipe_for,
    step_table,
)
from shoal.bench.comm_collectives import COLLECTIVES, bus_factor
from shoal.bench.comm_plot import draw
from shoal.bench.comm_steps import measure as measure_steps
from shoal.bench.comm_steps import profiled
from shoal.bench.comm_trace import STEP, Span, innermost, merged, overlap, step_costs, total
from shoal.bench.workers import Failure, explain, run_job, tell_failure
from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.core.machine import usable_cores
from shoal.core.process import Process
from shoal.recipe.load import load_recipe
from tests.many import Ranks
from tests.tiny import TINY, own_recipe, write_own_task, write_tiny

Capture = pytest.CaptureFixture[str]
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
PNG = b"\x89PNG\r\n\x1a\n"


# Stretches of time.

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def seconds_of(spans: list[Any]) -> set[int]:
    return {second for start, end in spans for second in range(start, end)}


@given(SPANS, SPANS)
def test_lengths_are_those_of_the_seconds_that_are_in_them(first: list[Span], second: list[Span]) -> None:
    a, b = merged(first), merged(second)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(a))
    assert total(a) == len(seconds_of(first))
    assert overlap(a, b) == overlap(b, a) == len(seconds_of(first) & seconds_of(second))


def event(name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": start, "dur": end - start}


def test_the_innermost_operation_is_what_a_thread_does() -> None:
    nested = [event("a", 0, 10), event("b", 2, 6), event("a", 3, 4), event("b", 8, 10), event("b", 12, 13)]
    assert merged(innermost(nested, lambda name: name == "a")) == [(0, 2), (3, 4), (6, 8)]
    assert merged(innermost(nested, lambda name: name == "b")) == [(2, 3), (4, 6), (8, 10), (12, 13)]


# Traces.


def test_communication_is_exposed_while_no_thread_computes() -> None:
    trace = [
        {"ph": "M", "name": "process_name"},
        event(STEP, 0, 1000, "user_annotation"),
        event("aten::mm", 0, 300),
        event("c10d::allreduce_", 290, 300),  # starts it
        event("gloo:all_reduce", 300, 600, "user_annotation", tid=7),
        event("autograd::engine::evaluate_function: AddmmBackward0", 300, 560),  # with a hook in it that waits
        event("aten::addmm", 320, 420),
        event("aten::t", 330, 340),
        event("aten::copy_", 500, 550, tid=8),  # unpacks in another thread
        event("aten::linear", 700, 800),  # of a tensor that is spread over workers
        event("_c10d_functional::wait_tensor", 710, 760),
        event("gloo:all_gather", 690, 760, "user_annotation", tid=7),
        event(STEP, 2000, 2400, "user_annotation"),
        event("gloo:all_reduce", 1900, 2100, "user_annotation", tid=7),  # begun before
    ]
    first, second = step_costs(trace, on_gpu=False)
    assert first.step_s == pytest.approx(1000e-6) and first.calls == 2
    assert first.communication_s == pytest.approx((300 + 70) * 1e-6)
    hidden = 100 + 50 + 10
    assert first.exposed_s == pytest.approx((300 + 70 - hidden) * 1e-6)
    assert second.communication_s == second.exposed_s == pytest.approx(100e-6)


def test_on_a_gpu_kernels_are_what_counts() -> None:
    trace = [
        event(STEP, 0, 100, "user_annotation"),
        event(STEP, 0, 100, "gpu_user_annotation"),
        event("aten::mm", 0, 100),  # only starts kernels
        event("ampere_sgemm", 10, 40, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 20, 80, "kernel", tid=2),
        event("nccl:all_reduce", 20, 80, "gpu_user_annotation", tid=2),
        event("Memcpy HtoD", 70, 75, "gpu_memcpy", tid=3),
    ]
    (cost,) = step_costs(trace, on_gpu=True)
    assert cost.communication_s == pytest.approx(60e-6) and cost.exposed_s == pytest.approx((60 - 20 - 5) * 1e-6)
    assert cost.calls == 1


# Real workers.


def exchange(process: Process, folder: Path, computes: bool) -> tuple[float, float]:
    """Rank 1 comes late by 0.2 s; rank 0 computes meanwhile, or waits. What the step costs that noise hit least."""
    matrix = torch.rand(400, 400)

    def step() -> None:
        if process.rank == 1:
            time.sleep(0.2)
        work = dist.all_reduce(torch.ones(10), async_op=True)
        until = time.perf_counter() + (0.4 if computes else 0)
        while time.perf_counter() < until:
            matrix @ matrix
        work.wait()

    step()
    costs = profiled(step, 3, process, folder)
    assert len(costs) == 3 and all(cost.calls == 1 for cost in costs)
    return min((cost.communication_s, cost.exposed_s) for cost in costs)


def test_waiting_is_seen_where_nothing_is_computed_meanwhile(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    (waited, exposed), (_, exposed_of_late) = ranks(2)(exchange, tmp_path, computes=False)
    assert exposed == pytest.approx(waited) and exposed > 0.15 > 2 * exposed_of_late
    (waited, exposed), _ = ranks(2)(exchange, tmp_path, computes=True)
    assert waited > 0.15 and exposed < 0.5 * waited
    assert list(tmp_path.iterdir()) == []


def measured_steps(process: Process, tree: dict[str, Any], module_folder: str, folder: Path) -> dict[str, Any]:
    sys.path.insert(0, module_folder)
    try:
        return measure_steps(process, tree, 2, 1, folder)
    finally:
        sys.path.remove(module_folder)


def test_a_slow_worker_is_communication_for_the_others(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    late = "import time, torch.distributed; time.sleep(0.1 * torch.distributed.get_rank())"
    write_own_task(tmp_path, "comm_late", in_loss=late)
    loaded = load_recipe([own_recipe("comm_late")], {"cluster.workers": 2, "cluster.gpus_per_worker": 0})
    found = ranks(2)(measured_steps, loaded.tree(), str(tmp_path), tmp_path)
    assert found[0] == found[1]
    first, late_one = found[0]["exposed_share_by_worker"]
    assert first > 0.6 > 2 * late_one and found[0]["exposed_share"] == pytest.approx((first + late_one) / 2)
    assert found[0]["step_ms"] > 100 and found[0]["calls"] >= 1
    assert found[0]["communication_share"] >= found[0]["exposed_share"]


def test_what_other_threads_send_is_seen(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """PowerSGD sends its second factor from the thread in which the first one has arrived."""
    tiny = TINY | {"model": {"name": "mlp", "hidden": [64]}}
    loaded = recipe_for(load_recipe([tiny]), "ddp_powersgd", 2)
    assert ranks(2)(measured_steps, loaded.tree(), str(tmp_path), tmp_path)[0]["calls"] == 3


def test_collectives_are_timed_by_size(ranks: Callable[[int], Ranks]) -> None:
    found, other = ranks(2)(comm_collectives.measure, [64, 1 << 16], 3)
    assert found == other  # the slowest worker's
    assert [(row["collective"], row["bytes"]) for row in found] == [(n, s) for n in COLLECTIVES for s in (64, 1 << 16)]
    for row in found:
        assert len(row["rounds_us"]) == 3 and min(row["rounds_us"]) <= row["us"] <= max(row["rounds_us"])
        assert row["algorithm_gb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3)
        assert row["bus_gb_per_s"] == pytest.approx(row["algorithm_gb_per_s"] * bus_factor(row["collective"], 2))


def test_sizes_are_divided_among_any_number_of_workers(ranks: Callable[[int], Ranks]) -> None:
    found = ranks(3)(comm_collectives.measure, [64, 4096], 1)[0]
    assert {row["bytes"] for row in found} == {60, 4092}


@pytest.mark.parametrize(("workers", "all_reduce", "others"), [(2, 1.0, 0.5), (4, 1.5, 0.75), (8, 1.75, 0.875)])
def test_the_bus_is_used_as_nccl_tests_say(workers: int, all_reduce: float, others: float) -> None:
    assert bus_factor("all_reduce", workers) == all_reduce
    assert bus_factor("all_gather", workers) == bus_factor("reduce_scatter", workers) == others


@two_cores
@pytest.mark.slow
def test_why_a_job_failed_is_told_and_no_worker_is_left(tmp_path: Path) -> None:
    job = {"what": "nonsense", "backend": "gloo", "gpus_per_worker": 0, "threads": 1}
    failure = run_job(job, 2, tmp_path, {}, lambda record: None)
    assert failure == Failure("KeyError: 'nonsense'")
    assert processes_with(tmp_path) == []


def test_the_cause_of_a_failure_is_told_before_what_follows_from_it(tmp_path: Path) -> None:
    assert explain(tmp_path, [0, 0], 900.0) is None
    assert explain(tmp_path, [None, 0], 900.0) == Failure("did not end within 900 s")
    (tmp_path / "log-1").write_text("a\nout of memory\n")
    assert explain(tmp_path, [None, -9], 900.0) == Failure("worker 1 ended with status -9: out of memory")
    tell_failure(tmp_path, 0, lost := Failure("connection reset", is_consequence=True))
    assert explain(tmp_path, [1, -9], 900.0) == lost
    tell_failure(tmp_path, 1, broken := Failure("KeyError: 'x'"))
    assert explain(tmp_path, [1, 1, 1], 900.0) == broken
    tell_failure(tmp_path, 2, refused := Failure("model: has no blocks", is_refused=True))
    assert explain(tmp_path, [1, 1, 1], 900.0) == refused


# What is measured.


@pytest.mark.parametrize("given", [None, "auto", 8])
def test_accumulating_keeps_the_micro_batch_and_raises_the_batch(given: Any) -> None:
    loaded = load_recipe([SMALL_VIT], {"train.micro_batch": given})
    plain, four = (recipe_for(loaded, name, 2).recipe for name in ("ddp", "ddp_accumulate_4"))
    assert plain.micro_batch(2) == four.micro_batch(2) == 8
    assert (plain.train.global_batch, four.train.global_batch) == (16, 64)


def test_settings_differ_from_the_recipe_in_what_they_are_named_for() -> None:
    loaded = load_recipe([TINY], {"parallel.compress": "bf16", "cluster.workers": 4, "cluster.min_workers": 2})
    recipe = recipe_for(loaded, "ddp", 2).recipe
    assert recipe.parallel.compress == "none" and recipe.cluster.workers == 2 and recipe.cluster.min_workers is None
    assert recipe_for(loaded, "ddp_fp16", 2).recipe.parallel.compress == "fp16"
    assert {recipe_for(load_recipe([SMALL_VIT]), name, 2).recipe.parallel.strategy for name in SETTINGS} == {
        "ddp",
        "fsdp",
        "deepspeed",
        "pipeline",
        "tensor",
    }


def test_sizes_are_in_units_and_sorted() -> None:
    assert parse_sizes("1MiB, 4KiB,64B,4 KiB") == (64, 4096, 1 << 20)
    assert [in_units(size) for size in (60, 4092, 4096, 3 << 20, 1 << 30)] == [
        "60 B",
        "4092 B",
        "4 KiB",
        "3 MiB",
        "1 GiB",
    ]
    assert SIZES[0] == 4096 and SIZES[-1] == 64 << 20


RESULT: dict[str, Any] = {
    "recipe": "small_vit",
    "workers": 2,
    "device": "cpu",
    "backend": "gloo",
    "collectives": [
        {"collective": name, "bytes": size, "us": 100.0, "algorithm_gb_per_s": rate, "bus_gb_per_s": rate / 2}
        for size, rate in ((4096, 0.04), (1 << 20, 1.5))
        for name in COLLECTIVES
    ],
    "latency_us": {"all_reduce": 80.4, "all_gather": 90.0, "reduce_scatter": 120.0},
    "settings": [
        {"name": "ddp", "step_ms": 220.4, "communication_share": 0.12, "exposed_share": 0.0912, "calls": 1.0},
        {"name": "tensor", "step_ms": 400.0, "communication_share": 0.5, "exposed_share": 0.5, "calls": 64.0},
    ],
}


def test_the_tables_hold_bandwidths_and_shares() -> None:
    assert collective_table(RESULT) == [
        ["GB/s", "all_reduce", "bus", "all_gather", "bus", "reduce_scatter", "bus"],
        ["4 KiB", "0.040", "0.020", "0.040", "0.020", "0.040", "0.020"],
        ["1 MiB", "1.500", "0.750", "1.500", "0.750", "1.500", "0.750"],
        ["latency of 4 KiB", "80 us", "", "90 us", "", "120 us", ""],
    ]
    assert step_table(RESULT) == [
        ["share of a step", "step", "communication", "exposed", "calls"],
        ["ddp", "220 ms", "12.0%", "9.1%", "1"],
        ["tensor", "400 ms", "50.0%", "50.0%", "64"],
    ]


def test_the_plot_has_two_panels(tmp_path: Path) -> None:
    draw(RESULT, tmp_path / "plot.png")
    image = (tmp_path / "plot.png").read_bytes()
    width, height = (int.from_bytes(image[start : start + 4]) for start in (16, 20))
    assert image.startswith(PNG) and width > 2 * height


# Wrong input.


@pytest.mark.parametrize("word", ["", "4", "4KB", "4096", "1B", "5GiB", "-4KiB", "1.5MiB"])
def test_other_sizes_are_refused(word: str) -> None:
    with pytest.raises(UserError, match=rf"--sizes: '{word}' is not a size from 64 B to 4 GiB; write 4KiB,1MiB,64MiB"):
        parse_sizes(f"4KiB,{word}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "4KiB;1MiB"], "--sizes: '4KiB;1MiB' is not a size"),
        (["--sizes", ""], "--sizes: '' is not a size"),
        (["--rounds", "0"], "--rounds"),
        (["--steps", "0"], "--steps"),
        (["--workers", "1"], "--workers: should be 2 or more, and at most the"),
        (["--workers", "10000"], "--workers: should be 2 or more, and at most the"),
        (["--only", "dpp"], "--only: 'dpp' is not measured here; "),
        (["optim.lr=-1"], "optim.lr"),
        (["no_such_recipe"], "no_such_recipe"),
        (["parallel.backend=nccl", "cluster.gpus_per_worker=0"], "parallel.backend: nccl needs a GPU for each"),
    ],
)
@two_cores
def test_the_command_refuses_what_it_cannot_measure(words: list[str], message: str, here: Path, capfd: Capture) -> None:
    assert run(["bench", "comm", *words]) == 2
    out, err = capfd.readouterr()
    assert message in err and "Traceback" not in err and out == "" and list(here.iterdir()) == []


@two_cores
@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="has GPUs for two workers")
def test_gpus_that_are_not_there_are_refused() -> None:
    loaded = load_recipe([TINY], {"cluster.gpus_per_worker": 1})
    with pytest.raises(UserError, match=r"--workers: 2 workers need a GPU each and PyTorch sees \d"):
        measure(loaded, Settings())


# The whole of it.


def processes_with(folder: Path) -> list[str]:
    """Commands of processes that know of the folder."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended
            continue
        if any(str(folder) in word for word in words):
            found.append(" ".join(words))
    return found


@two_cores
def test_the_command_prints_tables_and_writes_json_and_a_plot(here: Path, capfd: Capture) -> None:
    """Of a model without blocks, which a pipeline cannot divide."""
    write_tiny(here)
    words = ["tiny.yaml", "--quick", "--only", "ddp,ddp_accumulate_2,gpipe", "--json", "-o", "out"]
    assert run(["bench", "comm", *words]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["backend"] in ("gloo", "nccl") and found["workers"] == 2 and found["recipe"] == "tiny"
    assert [row["bytes"] for row in found["collectives"]] == [4096] * 3 + [1 << 20] * 3
    assert list(found["latency_us"]) == list(COLLECTIVES)
    assert [row["name"] for row in found["settings"]] == ["ddp", "ddp_accumulate_2"]
    assert all(0 < row["exposed_share"] <= row["communication_share"] < 1 for row in found["settings"])
    assert list(found["not_measured"]) == ["gpipe"] and "gpipe: " + found["not_measured"]["gpipe"] in err
    assert "latency of 4 KiB" in err and "share of a step" in err and "written to out/comm-" in err
    written = sorted((here / "out").iterdir())
    assert [path.suffix for path in written] == [".json", ".png"]
    kept = json.loads(written[0].read_text())
    assert kept["benchmark"] == "comm" and kept.items() >= found.items()


@two_cores
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)]
)
def test_an_end_from_outside_leaves_no_worker(number: signal.Signals, status: int, here: Path) -> None:
    (here / "temporary").mkdir()
    environment = os.environ | {"TMPDIR": str(here / "temporary")}
    command = [sys.executable, "-m", "shoal.cli.main", "bench", "comm", "--quick", "--rounds", "100000"]
    with subprocess.Popen(command, cwd=here, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while len(processes_with(here)) < 2 or not list(here.glob("temporary/*/collectives/records.jsonl")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    deadline = time.monotonic() + 10
    while processes_with(here) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(here) == []
    if number == signal.SIGINT:
        assert list((here / "temporary").iterdir()) == [] and [path.name for path in here.iterdir()] == ["temporary"]
