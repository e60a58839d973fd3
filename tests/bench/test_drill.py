"""Real drills: real runs, broken for real."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.drill import Request, run_drills
from shoal.core.errors import UserError
from shoal.observe.runs import read_events, read_metrics
from tests.launch.processes import wait_until_dead
from tests.launch.watched import RECIPE

DIGITS = [
    *("train.steps=200", "train.epochs=null", "checkpoint.every_steps=20", "evaluate.every_steps=100"),
    *("cluster.workers=2", "cluster.threads_per_worker=1", "cluster.gpus_per_worker=0"),
]
LOCAL = ("kill-worker",)
MORE = (
    *("hang-worker", "slow-worker", "kill-driver"),
    *("corrupt-checkpoint", "kill-while-saving", "fill-disk"),
)
"""These take longer; what they break is broken in tests of the launcher and of checkpoints too."""
Result = dict[str, Any]


def run_locally(folder: Path, names: tuple[str, ...]) -> Result:
    """Drills that need no Ray, on digits with dropout."""
    said: list[str] = []
    result = run_drills(Request(["digits"], DIGITS, names, "local", folder=folder / "runs", seed=1, say=said.append))
    assert any("undisturbed" in line for line in said)
    return result


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_locally(tmp_path_factory.mktemp("drill"), LOCAL)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_locally(tmp_path_factory.mktemp("drill"), MORE)


def drill(result: Result, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A drill's result and the events of its run."""
    found: dict[str, Any] = next(drill for drill in result["drills"] if drill["drill"] == name)
    return found, read_events(Path(found["run_dir"]))


@pytest.mark.parametrize("name", LOCAL)
def test_nothing_is_lost(local: Result, name: str) -> None:
    check_nothing_is_lost(local, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_nothing_is_lost_in_more_drills(more: Result, name: str) -> None:
    check_nothing_is_lost(more, name)


def check_nothing_is_lost(result: Result, name: str) -> None:
    """The run ended with the undisturbed weights, after it was well under way when it was broken."""
    found, events = drill(result, name)
    assert found["passed"] and found["losses"] == [] and found["same_weights"] is True
    summary = json.loads((Path(found["run_dir"]) / "summary.json").read_text())
    assert summary["weights_sha256"] == result["undisturbed"]["weights_sha256"]
    saved = [event["step"] for event in events if event["event"] == "save"]
    assert saved[1] < found["at_step"] < 200 == saved[-1]
    reports = [report for report in read_metrics(Path(found["run_dir"])) if "train_loss" in report["metrics"]]
    assert [report["step"] for report in reports] == list(range(1, 201))
    wait_until_dead(*(worker["pid"] for event in events if event["event"] == "workers" for worker in event["workers"]))


def test_a_worker_was_killed(local: Result) -> None:
    found, events = drill(local, "kill-worker")
    (failure,) = [event for event in events if event["event"] == "failure"]
    assert failure["rank"] == found["rank"] and "SIGKILL" in failure["message"]
    assert found["world_sizes"] == [2, 2]
    assert 0 <= found["noticed_after_s"] < found["training_again_after_s"] < 60
    # A step takes milliseconds here, and on busy cores the save before it as long as tens of them.
    assert 0 <= found["steps_lost"] <= 60


@pytest.mark.slow
def test_a_worker_hung(more: Result) -> None:
    found, events = drill(more, "hang-worker")
    (hang,) = [event for event in events if event["event"] == "hang"]
    assert "is stopped" in hang["stacks"][str(found["rank"])]
    assert found["noticed_after_s"] >= hang["timeout_s"] >= 3.0
    assert found["training_again_after_s"] > found["noticed_after_s"]


@pytest.mark.slow
def test_a_worker_was_slow_and_nobody_minded(more: Result) -> None:
    found, events = drill(more, "slow-worker")
    assert found["world_sizes"] == [2] and found["noticed_after_s"] is None and found["steps_lost"] == 0
    assert not {"failure", "restart", "hang"} & {event["event"] for event in events}
    times = [event["time"] for event in events if event["event"] == "save"]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) > 1.0, "it was not slow"


@pytest.mark.slow
def test_the_launcher_was_killed_and_the_run_resumed(more: Result) -> None:
    found, events = drill(more, "kill-driver")
    assert [event["event"] for event in events].count("start") == 2
    assert "failure" not in {event["event"] for event in events}, "somebody was left to notice"
    assert 0 <= found["noticed_after_s"] < found["training_again_after_s"]


@pytest.mark.slow
def test_a_spoilt_checkpoint_was_rejected(more: Result) -> None:
    found, events = drill(more, "corrupt-checkpoint")
    (rejected,) = [event for event in events if event["event"] == "checkpoint_rejected"]
    (resume,) = [event for event in events if event["event"] == "resume"]
    assert resume["step"] == max(
        event["step"] for event in events if event["event"] == "save" and event["step"] < rejected["step"]
    )
    assert found["steps_lost"] == rejected["step"] - resume["step"] > 0
    assert list((Path(found["run_dir"]) / "checkpoints").glob(f"corrupt-step-{rejected['step']:08d}-*"))
    spoilt = found["broken"].split()[3].partition("/")[2]
    assert spoilt in rejected["reason"] or spoilt == "manifest.json"


@pytest.mark.slow
def test_a_worker_was_killed_while_a_checkpoint_was_written(more: Result) -> None:
    found, events = drill(more, "kill-while-saving")
    (failure,) = [event for event in events if event["event"] == "failure"]
    assert failure["rank"] == found["rank"] and "SIGKILL" in failure["message"]
    step = int(found["broken"].partition("while step-")[2].split()[0])
    before, after = events[: events.index(failure)], events[events.index(failure) :]
    saved = [event["step"] for event in before if event["event"] == "save"]
    assert step not in saved and step - saved[-1] == 20, "it had been committed"
    (resume,) = [event for event in events if event["event"] == "resume"]
    assert resume["step"] == saved[-1]
    assert step in [event["step"] for event in after if event["event"] == "save"]
    left = [path.name for path in (Path(found["run_dir"]) / "checkpoints").iterdir()]
    assert left and all(name.startswith("step-") for name in left)


def check_disk_was_full(found: dict[str, Any], events: list[dict[str, Any]]) -> None:
    """Saves failed and nobody minded, and afterwards they did not."""
    assert len(found["world_sizes"]) == 1 and found["steps_lost"] == 0 and found["training_again_after_s"] is None
    assert not {"failure", "restart", "hang", "resume"} & {event["event"] for event in events}
    failed = [event for event in events if event["event"] == "save_failed"]
    assert len(failed) >= 2 and all("File too large" in event["message"] for event in failed)
    assert 0 <= found["noticed_after_s"] < 30
    assert events.index(failed[-1]) < max(index for index, event in enumerate(events) if event["event"] == "save")


@pytest.mark.slow
def test_a_disk_was_full_for_a_while(more: Result) -> None:
    found, events = drill(more, "fill-disk")
    check_disk_was_full(found, events)
    times = [event["time"] for event in events]
    assert times == sorted(times), "what was kept was written later, but happened then"


@pytest.mark.slow
def test_the_launcher_itself_may_train_on_a_full_disk_and_have_others_read_its_data(tmp_path: Path) -> None:
    words = [*DIGITS, "cluster.workers=1", "data.workers=1", "evaluate.every_steps=20"]
    result = run_drills(Request(["digits"], words, ["fill-disk"], "local", folder=tmp_path / "runs"))
    found, events = drill(result, "fill-disk")
    assert found["passed"] and found["same_weights"] is True, found
    check_disk_was_full(found, events)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_whoever_is_killed_and_whatever_is_spoilt_nothing_is_lost(tmp_path: Path, seed: int) -> None:
    names = ["corrupt-checkpoint", "kill-while-saving", "fill-disk"]
    result = run_drills(Request(["digits"], DIGITS, names, "local", folder=tmp_path / "runs", seed=seed))
    assert result["passed"], result


@pytest.mark.slow
def test_nodes_that_go_leave_a_smaller_run_with_the_same_samples(tmp_path: Path) -> None:
    words = [*RECIPE[1:], "train.steps=1500", "cluster.workers=2", "cluster.min_workers=1"]
    result = run_drills(Request(RECIPE[:1], words, ["kill-node", "preempt"], folder=tmp_path / "runs"))
    for name in ("kill-node", "preempt"):
        found, events = drill(result, name)
        assert found["passed"], found
        assert found["world_sizes"] == [2, 1] and found["same_weights"] is None
        assert "to 0.0001 for 20 steps after it" in found["compared"] and found["loss_difference"] < 1e-4
        assert found["training_again_after_s"] < 60
        (resize,) = [event for event in events if event["event"] == "resize"]
        assert (resize["from"], resize["to"]) == (2, 1)
    assert drill(result, "preempt")[0]["steps_lost"] <= 1


@pytest.mark.slow
def test_a_spare_node_takes_over_and_the_weights_are_the_same(tmp_path: Path) -> None:
    words = [*RECIPE[1:], "train.steps=1500", "cluster.workers=2"]
    result = run_drills(Request(RECIPE[:1], words, ["kill-node", "preempt"], folder=tmp_path / "runs"))
    for found in result["drills"]:
        assert found["passed"] and found["same_weights"] is True and found["world_sizes"] == [2, 2], found


def test_a_run_that_saves_too_seldom_is_not_drilled(tmp_path: Path) -> None:
    words = [*DIGITS, "train.steps=40", "checkpoint.every_steps=30", "cluster.workers=1"]
    request = Request(["digits"], words, ["slow-worker"], "local", folder=tmp_path / "runs")
    with pytest.raises(UserError, match=r"checkpoint.every_steps: the run saves after steps 30, 40 and ends at 40; .*"):
        run_drills(request)
