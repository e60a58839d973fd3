"""What is made of events, reports and folders: every number that Prometheus is told has its reason here."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.observe.prometheus.exposition import Exposition
from shoal.observe.prometheus.folder import folder_samples, read_past
from shoal.observe.prometheus.names import METRICS, TABLE, Sample
from shoal.observe.prometheus.samples import samples_of
from shoal.observe.prometheus.state import RunState
from shoal.observe.records import Report
from tests.made_run import make_run
from tests.observe.prometheus.servers import gpu_workers, train_on_gpus

START = {"run": "r", "world_size": 2, "strategy": "ddp", "device": "cpu", "num_steps": 400, "step": 0, "asked": 95.0}
START |= {"global_batch": 64}
TRAINED = {"train_loss": 1.0, "lr": 0.1, "samples_per_s": 640.0}


def value(samples: list[Sample], name: str, **labels: str) -> float | None:
    """The only one that fits."""
    found = [s.value for s in samples if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) <= 1, found
    return found[0] if found else None


def report(step: int, when: float, **more: Any) -> Report:
    fields = {"metrics": TRAINED, "seconds": {"data": 0.2, "forward": 0.7, "comm": 0.1}, "samples": 64 * step}
    return Report(step=step, epoch=step / 23, time=when, **{**fields, **more})


def started(**more: Any) -> RunState:
    state = RunState("r")
    state.event("start", START | more, 100.0)
    return state


def test_nothing_is_told_before_a_run_has_started() -> None:
    assert samples_of(RunState("r"), 100.0) == []


def test_a_run_that_only_starts_has_no_progress_yet() -> None:
    samples = samples_of(started(), 110.0)
    assert value(samples, "shoal_run_active") == 1
    assert value(samples, "shoal_run_start_timestamp_seconds") == 100
    assert value(samples, "shoal_run_progress_timestamp_seconds") is None
    assert value(samples, "shoal_failures_total", kind="lost") == 0, "a growth is only seen in what was there before"


def test_reports_become_steps_samples_shares_and_goodput() -> None:
    state = started()
    for step in (10, 20, 30):
        state.report(report(step, 100.0 + step / 10))
    samples = samples_of(state, 103.0)
    assert value(samples, "shoal_run_step") == value(samples, "shoal_steps_total") == 30
    assert value(samples, "shoal_samples_total") == 1920
    assert value(samples, "shoal_samples_per_second") == 640
    assert value(samples, "shoal_metric", metric="train_loss") == 1
    assert value(samples, "shoal_step_seconds", phase="forward") == pytest.approx(0.07)
    assert value(samples, "shoal_data_wait_ratio") == pytest.approx(0.2)
    assert value(samples, "shoal_communication_ratio") == pytest.approx(0.1)
    # Asked for at 95, and 0.8 of three seconds were steps.
    assert value(samples, "shoal_goodput_ratio") == pytest.approx(2.4 / 8.0)
    assert value(samples, "shoal_run_progress_timestamp_seconds") == 103


def test_an_evaluation_between_two_reports_is_no_second_step() -> None:
    state = started()
    state.report(report(10, 101.0))
    state.report(report(10, 102.0, metrics={"val_loss": 2.0}, seconds={"evaluate": 1.0}))
    samples = samples_of(state, 102.0)
    assert value(samples, "shoal_steps_total") == 10 and value(samples, "shoal_samples_total") == 640
    assert value(samples, "shoal_step_seconds", phase="forward") == pytest.approx(0.07)
    assert value(samples, "shoal_metric", metric="val_loss") == 2


def test_counters_never_fall_when_steps_are_made_again() -> None:
    state = started()
    state.report(report(30, 103.0, samples=1920))
    state.tick(37, 103.7)
    state.event("failure", {"kind": "died", "message": "the worker's process was killed by SIGKILL"}, 104.0)
    state.event("restart", {"restarts": 1}, 104.0)
    state.event("start", START | {"step": 20}, 110.0)
    samples = samples_of(state, 110.0)
    assert value(samples, "shoal_run_step") == 20 and value(samples, "shoal_steps_total") == 37
    state.report(report(30, 111.0, samples=1920))
    samples = samples_of(state, 111.0)
    assert value(samples, "shoal_steps_total") == 47
    assert value(samples, "shoal_samples_total") == 1920 + 640
    assert value(samples, "shoal_restarts_total") == 1 and value(samples, "shoal_failures_total", kind="died") == 1


def test_a_failure_that_a_worker_and_its_launcher_tell_is_one() -> None:
    state = started()
    words = "out of memory (CUDA out of memory. Tried to allocate 2 GiB): set train.micro_batch below 8"
    state.event("failed", {"error": "RunError", "message": words}, 101.0)
    state.event("failure", {"rank": 0, "kind": "run", "message": words}, 101.1)
    state.event("failed", {"error": "run", "message": words}, 101.2)
    samples = samples_of(state, 102.0)
    assert value(samples, "shoal_failures_total", kind="out_of_memory") == 1
    assert sum(s.value for s in samples if s.name == "shoal_failures_total") == 1
    assert value(samples, "shoal_run_active") == 0


def test_checkpoints() -> None:
    state = started()
    state.event("save", {"step": 10, "bytes": 100, "stall_s": 0.5, "seconds": 2.0}, 160.0)
    state.event("save_failed", {"step": 20, "message": "No space left on device"}, 200.0)
    state.event("save", {"step": 20, "bytes": 200, "stall_s": 0.25, "seconds": 1.0}, 300.0)
    samples = samples_of(state, 300.0)
    assert value(samples, "shoal_checkpoints_total") == 2 and value(samples, "shoal_checkpoint_failures_total") == 1
    assert value(samples, "shoal_checkpoint_stall_seconds_total") == 0.75
    assert value(samples, "shoal_checkpoint_last_timestamp_seconds") == 300
    assert value(samples, "shoal_checkpoint_last_step") == 20
    assert value(samples, "shoal_checkpoint_interval_seconds") == 140
    assert value(samples, "shoal_checkpoint_last_size_bytes") == 200


def test_workers_add_up_by_rank_and_the_slow_one_shows() -> None:
    state = started()
    for _ in range(2):
        state.take_workers(gpu_workers())
    samples = samples_of(state, 101.0)
    assert value(samples, "shoal_phase_seconds_total", rank="1", phase="backward") == pytest.approx(1.0)
    assert value(samples, "shoal_gpu_busy_ratio", rank="1") == 0.93
    assert value(samples, "shoal_bottleneck", bottleneck="compute") == 1
    assert value(samples, "shoal_bottleneck", bottleneck="input") == 0
    slow = gpu_workers(size=4)
    slow.seconds["forward"][2] *= 3  # type: ignore[index]
    state.take_workers(slow)
    samples = samples_of(state, 102.0)
    excess = [value(samples, "shoal_straggler_excess_ratio", rank=str(rank)) for rank in range(4)]
    assert excess[2] == pytest.approx(0.6 / 0.92) and excess[0] == excess[1] == excess[3] == 0


def test_tokens_are_counted_by_their_rate() -> None:
    exposition = Exposition()
    train_on_gpus(exposition, steps=50)
    # 0.1 s a step, and 163,840 a second.
    assert value(exposition.samples(), "shoal_tokens_total") == pytest.approx(50 * 0.1 * 163840)


def test_a_value_that_is_no_number_is_told_as_none() -> None:
    state = started()
    state.report(report(10, 101.0, metrics={"train_loss": None}))
    assert math.isnan(value(samples_of(state, 101.0), "shoal_metric", metric="train_loss") or 0.0)


def test_fewer_workers_leave_no_ghosts() -> None:
    state = started()
    state.take_workers(gpu_workers())
    state.event("start", START | {"world_size": 1}, 120.0)
    ranks = {sample.labels.get("rank") for sample in samples_of(state, 121.0)}
    assert ranks == {None, "0"}


def test_a_folder_tells_the_same_as_the_run_did(tmp_path: Path) -> None:
    samples = folder_samples(make_run(tmp_path / "digits-1"))
    assert {sample.labels["run"] for sample in samples} == {"digits-1"}
    # 400 steps, and 50 that were lost with the worker that died.
    assert value(samples, "shoal_steps_total") == 450 and value(samples, "shoal_samples_total") == 450 * 64
    assert value(samples, "shoal_restarts_total") == 1 and value(samples, "shoal_failures_total", kind="died") == 1
    assert value(samples, "shoal_run_active") == 0 and value(samples, "shoal_run_step") == 400
    assert value(samples, "shoal_checkpoints_total") == 4
    assert value(samples, "shoal_goodput_ratio") == pytest.approx(0.516, abs=0.001)


def test_a_run_goes_on_counting_what_its_folder_tells_of_before(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "digits-1", ended=None, steps=300)
    exposition = Exposition("digits-1")
    exposition.begin(folder)
    exposition.event("start", START | {"step": 300})
    samples = exposition.samples()
    assert value(samples, "shoal_failures_total", kind="died") == 1 and value(samples, "shoal_restarts_total") == 1
    assert value(samples, "shoal_checkpoint_last_step") == 300
    assert value(samples, "shoal_steps_total") == 0, "a process counts its own steps, from 0"
    exposition.begin(folder)
    assert value(exposition.samples(), "shoal_failures_total", kind="died") == 1, "what is told twice counts once"


def test_goodput_goes_on_over_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    first = [{"time": 100.0, "event": "start", **START}, {"time": 103.0, "event": "failure", "kind": "died"}]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in first))
    records = [report(step, 100.0 + step / 10).to_record() for step in (10, 20)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    samples = folder_samples(folder)
    before = value(samples, "shoal_goodput_ratio")
    assert before is not None
    state = RunState("r")
    state.remember(*read_past(folder))
    state.event("start", START, 113.0)
    state.report(report(10, 123.0, seconds={"forward": 10.0}))
    # Ten more seconds of work after ten of waiting, by two workers; what was lost with the failure stays lost.
    after = value(samples_of(state, 123.0), "shoal_goodput_ratio")
    assert after == pytest.approx((before * 8.0 + 10.0) / 28.0)


@pytest.mark.parametrize("ahead_s", [-600.0, 600.0])
def test_clocks_that_differ_by_minutes_do_no_harm(tmp_path: Path, ahead_s: float) -> None:
    """The folder's last words were written by a machine whose clock is behind, or ahead."""
    folder = tmp_path / "r"
    folder.mkdir()
    began = 10_100.0 + ahead_s
    first = [
        {"time": began, "event": "start", **START, "asked": began - 5.0},
        {"time": began + 3.0, "event": "save", "step": 10},
        {"time": began + 3.0, "event": "failure", "kind": "died"},
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in first))
    (folder / "metrics.jsonl").write_text(json.dumps(report(10, began + 1.0).to_record()) + "\n")
    past = value(folder_samples(folder), "shoal_goodput_ratio")
    assert past == pytest.approx(0.8 / 8.0), "by the run's own times, whatever the time is here"
    state = RunState("r")
    state.remember(*read_past(folder))
    state.event("start", START | {"asked": 10_110.0}, 10_113.0)
    state.report(report(20, 10_123.0, seconds={"forward": 10.0}))
    samples = samples_of(state, 10_123.0)
    # Two workers: eight seconds before, thirteen now, ten of them useful; nothing of it lies in what is past.
    assert value(samples, "shoal_goodput_ratio") == pytest.approx((2 * 0.8 + 2 * 10.0) / (2 * 8.0 + 2 * 13.0))
    state.event("save", {"step": 20}, 10_124.0)
    interval_s = value(samples_of(state, 10_124.0), "shoal_checkpoint_interval_seconds")
    assert interval_s == pytest.approx(11.0), "since the start"


@pytest.mark.parametrize("now", [0.0, 90.0, 1e9])
def test_goodput_is_a_share_whatever_the_clock_says(now: float) -> None:
    state = started()
    state.report(report(10, 101.0))
    goodput = value(samples_of(state, now), "shoal_goodput_ratio")
    assert goodput is None or 0.0 <= goodput <= 1.0


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", "workers.jsonl", "recipe.yaml"])
def test_a_folder_in_which_something_is_missing_or_broken_tells_what_is_left(tmp_path: Path, name: str) -> None:
    folder = make_run(tmp_path / "r")
    broken = b'\n{"time": 1, "step": "x", "seconds": [1], "metrics": 3}\n[1]\n'
    (folder / name).write_bytes((folder / name).read_bytes()[:-20] + broken)
    assert isinstance(folder_samples(folder), list)
    (folder / name).unlink()
    assert isinstance(folder_samples(folder), list)


def test_a_run_of_long_ago_without_times_and_workers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", fails_at=None)
    (folder / "workers.jsonl").unlink()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        del line["time"]
        line["seconds"] = {"data": 0.1, "forward_backward": 0.9}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = folder_samples(folder)
    assert value(samples, "shoal_run_step") == 400
    assert value(samples, "shoal_step_seconds", phase="forward_backward") == pytest.approx(0.09)


def test_every_metric_of_the_table_can_be_told() -> None:
    exposition = Exposition()
    train_on_gpus(exposition)
    told = exposition.samples()
    assert {sample.name for sample in told} == set(TABLE)
    for sample in told:
        assert set(sample.labels) == {"run", *TABLE[sample.name].labels}, sample


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert metric.name.startswith("shoal_") and metric.name.endswith("_total") == (metric.kind == "counter")
        assert metric.help.endswith("."), metric
        # OpenMetrics has one name for both.
        assert metric.kind == "gauge" or metric.name.removesuffix("_total") not in TABLE
