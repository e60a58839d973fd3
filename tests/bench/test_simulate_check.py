"""What the simulation begins with is measured by real workers, and its predictions hold."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench import simulate_links
from shoal.bench.comm import TINY_VIT
from shoal.bench.simulate import DEFAULT_STRATEGIES, Settings, efficiencies, notes, simulate, table
from shoal.bench.simulate_check import CHECKED, CheckSettings, check, check_notes, check_table
from shoal.bench.simulate_links import ACROSS, ALL, PAIRS, cases_of
from shoal.bench.simulate_measured import Loopback, fit
from shoal.bench.simulate_network import Members
from shoal.bench.simulate_plot import draw, draw_check
from shoal.bench.simulate_recipes import SIMULATED, one_micro_batch, recipe_for
from shoal.bench.simulate_steps import Meeting, measure, measure_shape, weights_of
from shoal.bench.simulate_work import ROOT, from_record
from shoal.core.errors import RunError, UserError
from shoal.core.group import Group
from shoal.core.machine import usable_cores
from shoal.core.process import Process
from shoal.recipe.load import load_recipe
from tests.many import Ranks
from tests.tiny import TINY

two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")
CPU = {"cluster.gpus_per_worker": 0, "cluster.threads_per_worker": 1}
PNG = b"\x89PNG\r\n\x1a\n"


# Collectives of this machine.


def record(who: str, collective: str, size: int, waited: float, beside: float, dtype: str = "fp32") -> dict[str, Any]:
    named = {"who": who, "collective": collective, "dtype": dtype, "bytes": size}
    return {**named, "waited_s": [waited, 9.0, waited], "beside_s": [beside, beside, -9.0]}


def test_between_sizes_that_were_measured_lie_straight_lines() -> None:
    rows = [record(ALL, "all_reduce", 1000, 1.0, 0.5), record(ALL, "all_reduce", 3000, 2.0, 2.0)]
    wires, two = Loopback(2, rows), Members(2, 2)
    costs = [wires.message("all_reduce", size, two) for size in (4, 1000, 2000, 3000, 5000)]
    assert [cost.seconds for cost in costs] == [1.0, 1.0, 1.5, 2.0, 3.0]
    assert [cost.busy for cost in costs] == [0.5, 0.5, 0.75, 1.0, 1.0]
    noisy = Loopback(2, [record(ALL, "all_reduce", 1000, 2.0, 0.0), record(ALL, "all_reduce", 3000, 1.0, 0.0)])
    assert noisy.message("all_reduce", 9000, two).seconds == 1.0
    assert wires.waits and wires.message("all_reduce", 1000, Members(1, 1)).seconds == 0


def test_groups_within_the_workers_have_measurements_of_their_own() -> None:
    rows = [record(who, "all_reduce", 8, took, 0.0) for who, took in ((ALL, 1.0), (PAIRS, 2.0), (ACROSS, 3.0))]
    wires = Loopback(4, rows)
    groups = (Members(4, 4), Members(4, 2), Members(2, 2), Members(2, 1, alike=2))
    assert [wires.message("all_reduce", 8, group).seconds for group in groups] == [1.0, 1.0, 2.0, 3.0]


@given(st.floats(1e-5, 1e-2), st.floats(1e-10, 1e-8))
def test_the_line_through_points_that_lie_on_one(alpha: float, beta: float) -> None:
    found = fit([(size, alpha + beta * size) for size in (1e3, 1e4, 1e5, 1e6, 1e7)])
    assert found == pytest.approx((alpha, beta), rel=1e-3)


def test_latency_rate_and_cost_of_adding_up() -> None:
    lines = {"all_reduce": 3e-9, "all_gather": 1e-9, "reduce_scatter": 2e-9}
    rows = [record(ALL, name, size, 1e-3 + beta * size, 0) for name, beta in lines.items() for size in (10**4, 10**7)]
    found = Loopback(2, rows).summary()
    assert found["latency_us"] == pytest.approx(dict.fromkeys(lines, 1000.0))
    assert found["gb_per_s"] == pytest.approx({name: 1e-9 / beta for name, beta in lines.items()})
    assert found["reduce_ns_per_kb"] == pytest.approx(2000.0)
    assert fit([(10.0, 1.0)]) == (1.0, 0.0)


@pytest.mark.parametrize("count", [2, 4])
def test_every_case_is_measured_by_all_workers(ranks: Callable[[int], Ranks], count: int) -> None:
    rows, *others = ranks(count)(simulate_links.measure, [1 << 14, 1 << 18], 2)
    assert all(other == rows for other in others)  # the slowest worker's
    assert [(row["who"], row["collective"], row["dtype"]) for row in rows[::2]] == cases_of(count)
    assert all(len(row["waited_s"]) == len(row["beside_s"]) == 2 for row in rows)
    assert all(math.isfinite(value) for row in rows for value in row["waited_s"] + row["beside_s"])
    wires = Loopback(count, rows)
    assert wires.message("all_reduce", 1e7, Members(count, count), "bf16").seconds > 0


# Steps.


def tiny(**sections: Any) -> Any:
    return load_recipe([TINY_VIT | sections], CPU | {"train.global_batch": 8})


def measured_steps(process: Process, tree: dict[str, Any]) -> dict[str, Any]:
    return measure(process, tree, 3, 1, None)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp"])
def test_workers_that_train_together_tell_the_slowest(ranks: Callable[[int], Ranks], strategy: str) -> None:
    rows = ranks(4)(measured_steps, recipe_for(tiny(), strategy, 4, 2).tree())
    assert rows[0] == rows[3] and sum(rows[0]["phases_s"]) == pytest.approx(rows[0]["step_s"]) and rows[0]["step_s"] > 0


def alone(process: Process, tree: dict[str, Any]) -> dict[str, Any]:
    """As `shoal.bench.worker` has it: nobody to send to, and the others are met by a store."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

    meeting = Meeting(PrefixStore("alone", _get_default_store()), process.rank, process.world_size)
    return measure(replace(process, rank=0, world_size=1, group=Group()), tree, 3, 1, meeting)


def test_those_that_send_nothing_begin_every_step_together(ranks: Callable[[int], Ranks]) -> None:
    rows = ranks(2)(alone, recipe_for(tiny(), "single", 1).tree())
    assert rows[0] == rows[1] and len(rows[0]["phases_s"]) == 3 and all(phase > 0 for phase in rows[0]["phases_s"])
    assert Meeting(None, 0, 1).gather("mine") == ["mine"]


def shape_of(process: Process, tree: dict[str, Any]) -> dict[str, Any]:
    return measure_shape(process, tree, 4, 1)


def test_a_model_tells_when_its_gradients_are_there(ranks: Callable[[int], Ranks]) -> None:
    loaded = load_recipe([SIMULATED], CPU)
    found = ranks(1)(shape_of, one_micro_batch(loaded).tree())[0]
    shape = from_record(found)
    assert shape.num_blocks == 8 and sum(shape.forward) == pytest.approx(1) and sum(shape.backward) == pytest.approx(1)
    assert shape.buffers == 0 and len(shape.ready) == len(shape.weights)
    ends = [max(s for w, s in zip(shape.weights, shape.ready, strict=True) if w.block == b) for b in range(8)]
    assert ends == sorted(ends, reverse=True) and 0.03 < ends[-1] < 0.35 and ends[0] > 0.8
    assert all(0.02 < share < 0.3 for share in shape.forward[1:-1])


def test_a_model_without_blocks_and_with_statistics(ranks: Callable[[int], Ranks]) -> None:
    norms = TINY | {"model": {"name": "simple_cnn", "channels": [4, 8], "hidden": 8}}
    found = ranks(1)(shape_of, recipe_for(load_recipe([norms]), "single", 1).tree())[0]
    assert {block for block, _, _ in found["weights"]} <= {ROOT, 0, 1}
    assert sum(from_record(found).backward) == pytest.approx(1)
    mlp = ranks(1)(shape_of, recipe_for(load_recipe([TINY]), "single", 1).tree())[0]
    assert sum(from_record(mlp).forward) == pytest.approx(1) and max(mlp["ready"]) > 0.5


def test_weights_are_counted_by_rows() -> None:
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 8, 5), nn.BatchNorm2d(8))
    model[1].bias.requires_grad = False  # type: ignore[union-attr]
    assert weights_of(model) == [[ROOT, 8, 75], [ROOT, 8, 1], [ROOT, 8, 1]]


# All of it.


def test_a_step_is_measured_here_and_simulated_elsewhere(tmp_path: Path) -> None:
    lines: list[str] = []
    found = simulate(tiny(), Settings(steps=2, max_gpus=16), lines.append)
    assert [line.split(":")[0] for line in lines] == ["single", "ddp", "fsdp", "ddp_bf16", "ddp_powersgd"]
    assert found["step"] == "measured here, on CPU, 1 threads" and found["step_ms"] > 0
    assert found["own_ms"]["fsdp"] == found["own_ms"]["hsdp"] and found["weights"] > 1000 and found["blocks"] == 4
    rows = table(found)
    assert rows[0][:4] == ["GPUs", "ddp", "eff.", "exposed"] and [row[0] for row in rows[1:]] == [
        "1",
        "2",
        "4",
        "8",
        "16",
    ]
    assert len({len(row) for row in rows}) == 1 and rows[1][2] == "100.0%"
    assert dict(notes(found))["network"] == "nvlink+ib, 8 GPUs a machine"
    assert set(found["strategies"]) == set(DEFAULT_STRATEGIES) and efficiencies(found, "ddp")[0] == 1
    draw(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_what_a_worker_refuses_is_the_users_error_and_what_fails_is_not() -> None:
    no_data = {"data": {"name": "mnist", "dir": "/nowhere", "download": False}}
    with pytest.raises(UserError, match="data"):
        simulate(load_recipe([TINY | no_data], CPU), Settings(steps=1, strategies=("ddp",)))
    no_norm = load_recipe([TINY | {"model": {"name": "mlp", "hidden": [4]}}], CPU | {"model.hidden": [1 << 40]})
    with pytest.raises(RunError, match="a step could not be measured"):
        simulate(no_norm, Settings(steps=1, strategies=("ddp",)))


@two_cores
@pytest.mark.alone
def test_a_quick_check_measures_and_predicts(tmp_path: Path) -> None:
    """Of a model so small that nothing is promised of it."""
    lines: list[str] = []
    chosen = CheckSettings(rounds=2, steps=2, workers=(2,), strategies=("ddp", "fsdp"))
    found = check(tiny(), chosen, lines.append)
    assert len(lines) == 2 and lines[0].startswith("round 1 of 2: off by ")
    assert [(row["strategy"], row["workers"]) for row in found["checks"]] == [("ddp", 2), ("fsdp", 2)]
    for row in found["checks"]:
        assert 0 < row["alone_ms"] < row["predicted_ms"] and row["measured_ms"] > 0 and len(row["errors"]) == 2
        assert row["ok"] == (abs(row["error"]) <= 0.15) and min(row["errors"]) <= row["error"] <= max(row["errors"])
    assert set(found["network"]) == {"2"} and found["network"]["2"]["latency_us"]["all_reduce"] > 10
    assert check_table(found)[1][0] == "ddp, 2 workers" and "GB/s" in dict(check_notes(found))["2 workers"]
    draw_check(found, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_the_verdict_names_what_is_off() -> None:
    row = {
        "strategy": "ddp",
        "workers": 2,
        "alone_ms": 1.0,
        "predicted_ms": 2.0,
        "measured_ms": 1.5,
        "errors": [0.33],
        "others_share": 0.02,
    }
    network = {"latency_us": {"all_reduce": 5.0}, "gb_per_s": {"all_reduce": None}}
    found = {"checks": [{**row, "error": 0.33, "ok": False}], "network": {"2": network}, "allowed": 0.15}
    assert dict(check_notes(found)) == {
        "2 workers": "all_reduce 5 us + nothing a byte",
        "others": "took at most 2.0% of the cores beside a measurement",
        "verdict": "off by over 15%: ddp with 2 workers",
    }
    assert check_table(found)[1][4:] == ["+33.0% !", "+33.0% to +33.0%"]


@two_cores
@pytest.mark.parametrize("workers", list(CHECKED))
@pytest.mark.alone
@pytest.mark.slow
def test_predictions_are_off_by_15_percent_at_most(workers: int) -> None:
    found = check(load_recipe([SIMULATED], CPU), CheckSettings(rounds=3, workers=(workers,)), print)
    assert [row["strategy"] for row in found["checks"]] == list(CHECKED[workers])
    assert all(row["ok"] for row in found["checks"]), check_table(found)


def test_a_check_needs_gloo() -> None:
    with pytest.raises(UserError, match="--check: runs on CPUs, which do not talk by nccl"):
        check(load_recipe([TINY_VIT], {"parallel.backend": "nccl"}), CheckSettings())
