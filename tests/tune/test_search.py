"""Whole searches on a real Ray."""

import csv
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.errors import RunError, UserError
from shoal.launch.api import train
from shoal.tune.api import tune
from tests.tiny import own_recipe, write_own_task
from tests.tune.searching import QUICK, journal, search, start, summary_of, what_came_of, worker_pids, write_slow


def test_a_search_leaves_all_that_it_found(here: Path):
    space = {"optim.lr": "loguniform(1e-4, 1e-1)", "train.global_batch": "choice(8, 16)"}
    summary = search(here / "s", space, trials=5, scheduler="asha", keep_checkpoints=1)
    assert summary["status"] == "done"
    assert sum(summary["trials_by_status"].values()) == 5
    best = summary["best"]
    assert best["value"] == min(record["value"] for record in summary["trials"])
    assert json.loads((here / "s" / "summary.json").read_text())["best"] == best
    rows = list(csv.DictReader((here / "s" / "trials.csv").open()))
    assert [float(row["optim.lr"]) for row in rows] == [r["config"]["optim.lr"] for r in summary["trials"]]
    recipe = yaml.safe_load((here / "s" / "best.yaml").read_text())
    assert recipe["optim"]["lr"] == best["config"]["optim.lr"]
    assert "<html" in (here / "s" / "report.html").read_text()
    kept = [path.parent.name for path in (here / "s" / "trials").glob("*/checkpoints")]
    assert kept == [Path(best["run_dir"]).name], "keep_checkpoints keeps those of the best alone"
    # What the best trial learned is what its recipe learns anew.
    again = train(here / "s" / "best.yaml", run_dir=here / "again", progress="silent", launcher="local")
    if best["status"] == "done":
        found = json.loads((Path(best["run_dir"]) / "summary.json").read_text())
        assert again["weights_sha256"] == found["weights_sha256"]


def test_stopped_trials_save_compute(here: Path):
    # The second is worse at every rung, and comes second because one place is all there is.
    write_slow(here, steps=60)
    summary = search(
        here / "s", {"optim.lr": "grid(0.1, 1e-6)"}, here / "slow.yaml", scheduler="asha", concurrency=1, grace=6
    )
    first, second = summary["trials"]
    assert (first["status"], second["status"]) == ("done", "stopped")
    assert second["reason"] == "place 2 of 2 at step 6, and 1 went on"
    assert 6 <= second["steps_trained"] < 40
    assert summary["trained"] == 60 + second["steps_trained"]
    assert summary["saved"] == pytest.approx(1 - summary["trained"] / 120, abs=1e-3)


@pytest.fixture
def failing(here: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A recipe whose task does what its argument says."""
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.setenv("PYTHONPATH", str(here))
    write_own_task(
        here,
        "fails",
        in_loss="""
        if step > 3 and args["how"] == "raise": raise ValueError("no such thing")
        if step > 3 and args["how"] == "memory": raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        if step > 3 and args["how"] == "nan": return (model(batch[0]) * float("nan")).mean()
        if step > 3 and args["how"] == "die": os.kill(os.getpid(), signal.SIGKILL)
        """.strip(),
    )
    return own_recipe("fails", how="well") | {"failures": {"max_restarts": 1}}


def test_trials_that_fail_are_told_apart_and_hold_up_nobody(failing: dict[str, Any], here: Path):
    space = {"task.args.how": "grid(well, raise, memory, nan, die, fine)"}
    summary = search(here / "s", space, failing, max_failed=0.9)
    found = {record["config"]["task.args.how"]: record for record in summary["trials"]}
    assert {how: record["status"] for how, record in found.items()} == {
        **{"well": "done", "raise": "failed", "memory": "failed", "nan": "failed", "die": "failed", "fine": "done"}
    }
    assert (found["raise"]["kind"], found["memory"]["kind"], found["nan"]["kind"], found["die"]["kind"]) == (
        *("exception", "memory", "diverged", "died"),
    )
    assert "ValueError: no such thing" in found["raise"]["reason"]
    assert "out of memory" in found["memory"]["reason"]
    assert "train loss became nan" in found["nan"]["reason"]
    assert "SIGKILL" in found["die"]["reason"]
    assert summary["best"]["config"]["task.args.how"] in ("well", "fine")
    trace = next(event for event in journal(here / "s") if event.get("kind") == "exception")["traceback"]
    assert "fails.py" in trace


def test_too_many_failures_end_the_search_with_their_reason(failing: dict[str, Any], here: Path):
    space = {"task.args.how": "choice(raise)", "optim.lr": "uniform(0.1, 0.2)"}
    with pytest.raises(RunError, match=r"which is more than tune.max_failed 0.5.*no such thing") as caught:
        search(here / "s", space, failing, trials=20)
    assert caught.value.__dict__["summary"]["trials_by_status"]["failed"] < 9
    assert json.loads((here / "s" / "summary.json").read_text())["status"] == "failed"


def test_a_search_that_has_failed_is_no_success_when_it_is_resumed(failing: dict[str, Any], here: Path):
    for first in (True, False):
        with pytest.raises(RunError, match=r"1 of 2 trials .* more than tune.max_failed 0.4.*no such thing"):
            if first:
                search(here / "s", {"task.args.how": "grid(well, raise)"}, failing, max_failed=0.4)
            else:
                tune(resume=here / "s", progress="silent")
        assert json.loads((here / "s" / "summary.json").read_text())["status"] == "failed"


def test_searches_share_a_store(here: Path):
    recipe = QUICK | {"checkpoint": {"upload_to": f"file://{here}/store"}}
    for name in ("one", "two"):
        summary = search(here / name, recipe=recipe, trials=2)
        assert summary["trials_by_status"] == {"done": 2}
        assert (
            yaml.safe_load((here / name / "best.yaml").read_text())["checkpoint"]["upload_to"] == f"file://{here}/store"
        )
    assert sorted(path.relative_to(here / "store") for path in (here / "store").glob("*/*")) == [
        Path(name) / number for name in ("one", "two") for number in ("0000", "0001")
    ]


def test_what_failed_is_tried_again_when_its_cause_is_mended(failing: dict[str, Any], here: Path):
    space = {"task.args.how": "grid(raise, well)"}
    first = search(here / "s", space, failing)
    assert [record["status"] for record in first["trials"]] == ["failed", "done"]
    (here / "fails.py").write_text((here / "fails.py").read_text().replace("raise ValueError", "pass;"))
    again = tune(resume=here / "s", retry_failed=True, progress="silent")
    assert [record["status"] for record in again["trials"]] == ["done", "done"]
    assert [record["starts"] for record in again["trials"]] == [2, 1]


def test_a_metric_that_nobody_reports_ends_the_search_at_the_first_evaluation(failing: dict[str, Any], here: Path):
    with pytest.raises(RunError, match=r"tune.metric: 'val_accuracy' is not reported; allowed: .*val_loss") as caught:
        search(here / "s", {"optim.lr": "uniform(0.1, 0.2)"}, failing, trials=20, metric="val_accuracy")
    assert len(caught.value.__dict__["summary"]["trials"]) < 6


def test_quality_against_speed(here: Path):
    space = {"model.hidden": "grid([4], [64])"}
    summary = search(here / "s", space, metric=["val_loss", "samples_per_s:max"])
    assert summary["pareto"]
    for record in summary["trials"]:
        own = json.loads((Path(record["run_dir"]) / "summary.json").read_text())
        assert record["values"]["samples_per_s"] == own["samples_per_s"]
        assert record["values"]["val_loss"] is not None


def test_settings_that_do_not_go_together_fail_alone(here: Path):
    space = {"train.global_batch": "grid(4, 16)", "train.micro_batch": "grid(8)"}
    with pytest.raises(UserError, match=r"space: train.micro_batch"):  # at an end of the space already
        search(here / "s", space, QUICK | {"train": {"epochs": 1, "global_batch": 4}})
    assert not (here / "s").exists()
    summary = search(here / "s", space, QUICK | {"train": {"epochs": 1, "global_batch": 16}}, max_failed=1.0)
    assert [record["status"] for record in summary["trials"]] == ["failed", "done"]
    assert "train.micro_batch" in summary["trials"][0]["reason"]


def test_trials_of_two_workers_on_four_places_never_deadlock(here: Path):
    began = time.monotonic()
    summary = search(here / "s", trials=5, concurrency=2, recipe=QUICK | {"cluster": {"workers": 2}})
    assert summary["trials_by_status"] == {"done": 5}
    running, most = set(), 0
    for event in journal(here / "s"):
        if event["event"] == "run":
            running.add(event["trial"])
        elif event["event"] == "ended":
            running.discard(event["trial"])
        most = max(most, len(running))
    assert most == 2
    assert time.monotonic() - began < 120


def test_several_objectives_give_a_front(here: Path):
    pytest.importorskip("optuna")
    space = {"model.hidden": "choice([4], [64], [256])", "optim.lr": "loguniform(1e-3, 1e-1)"}
    summary = search(here / "s", space, trials=5, metric=["val_loss", "val_accuracy"], search="optuna")
    assert summary["objectives"] == ["val_loss:min", "val_accuracy:max"]
    assert summary["best"]["trial"] in summary["pareto"]
    values = {record["trial"]: record["values"] for record in summary["trials"]}
    for number in summary["pareto"]:
        own = values[number]
        assert not any(
            other["val_loss"] < own["val_loss"] and other["val_accuracy"] > own["val_accuracy"]
            for other in values.values()
        )
    assert (here / "s" / "optuna.journal").is_file()


@pytest.mark.parametrize("scheduler", [pytest.param("none", marks=pytest.mark.slow), "hyperband"])
def test_a_tuner_that_is_killed_goes_on_to_the_same_end(here: Path, scheduler: str):
    """Between results, with trials half done; what was finished is not run again, and all weights are the same."""
    write_slow(here, steps=60)
    own = ["tune.grace=6"] if scheduler == "hyperband" else []
    words = ("slow.yaml", "space.yaml", "--trials", "5", "--scheduler", scheduler, "--json", *own)
    calm = summary_of(start(*words, "--search-dir", "calm", folder=here))
    process, chance = start(*words, "--search-dir", "wild", folder=here), random.Random(1)
    for number in range(3):
        _wait_for(here / "wild", lambda events, n=number: _num_results(events) > 2 + 5 * n, process)
        if number == 1:
            _wait_for(here / "wild", lambda events: worker_pids(here / "wild"), process)
            os.kill(chance.choice(worker_pids(here / "wild")), signal.SIGKILL)
            continue
        process.kill()
        process.communicate()
        process = start("--resume", "wild", "--json", folder=here)
    wild = summary_of(process)
    assert what_came_of(wild) == what_came_of(calm)
    ended = [event["trial"] for event in journal(here / "wild") if event["event"] == "ended" and "busy_s" in event]
    assert len(ended) == len(set(ended)), "no trial was run to its end twice"


def _num_results(events: list[dict[str, Any]]) -> int:
    return sum(event["event"] == "result" for event in events)


def _wait_for(folder: Path, is_so: Any, process: Any, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so(journal(folder)):
        assert process.poll() is None, "the search ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_resume_may_add_trials_and_nothing_else(here: Path):
    search(here / "s", trials=2)
    summary = tune(resume=here / "s", trials=4, progress="silent")
    assert summary["trials_by_status"] == {"done": 4}
    assert [record["starts"] for record in summary["trials"]] == [1, 1, 1, 1]
    with pytest.raises(UserError, match=r"tune.trials: 4 have been made, and 3 is fewer"):
        tune(resume=here / "s", trials=3, progress="silent")
    assert tune(resume=here / "s", progress="silent")["status"] == "done"
    with pytest.raises(UserError, match=r"tune.seed: cannot change"):
        tune(resume=here / "s", seed=3, progress="silent")
    with pytest.raises(UserError, match="not empty"):
        search(here / "s", trials=2)
