"""Many workers as one run, on this machine: whatever happens to them, the weights are those of the undisturbed run."""

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import RunError, UserError, WorkerError
from shoal.launch.crew import LocalCrew
from shoal.launch.gang import Gang
from shoal.launch.policy import Size
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.runs import read_events, read_metrics
from tests.launch.gangs import Watch, run_gang, warm_crew
from tests.launch.processes import parent_of, wait_until_dead
from tests.tiny import own_recipe, write_own_task

DIGITS = {
    "train.epochs": None,
    "train.steps": 40,
    "evaluate.every_steps": 10,
    "checkpoint.every_steps": 1,
    "observe.every_steps": 1,
    "cluster.workers": 2,
    "cluster.threads_per_worker": 1,
    "cluster.gpus_per_worker": 0,
}


@pytest.fixture(scope="module")
def crew() -> Iterator[LocalCrew]:
    with warm_crew(2) as crew:
        yield crew


class Run:
    """A run of digits, or of a task whose loss runs a line of code, by the crew."""

    def __init__(self, crew: LocalCrew, folder: Path, recipe: Any = "digits", **overrides: Any) -> None:
        self.crew = crew
        self.prepared = prepare([recipe], DIGITS | overrides, run_dir=folder / "run")
        self.watch = Watch(folder / "run")

    def __call__(self) -> dict[str, Any]:
        return run_gang(self.crew, self.prepared, self.watch)

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.watch.run_dir) if event["event"] in names]


@pytest.fixture
def digits(crew: LocalCrew, here: Path) -> Callable[..., Run]:
    return lambda **overrides: Run(crew, here, **overrides)


def own_run(crew: LocalCrew, folder: Path, in_loss: str, **overrides: Any) -> Run:
    """The line runs in every loss, with `step`, `rank` and `model` to hand."""
    indented = "\n        "
    lines = ["import sys, time", "from shoal import UserError", "rank = torch.distributed.get_rank()", in_loss]
    write_own_task(folder, "own_task", indented.join(lines))
    few = {"train.steps": 8, "evaluate.every_steps": 4}
    return Run(crew, folder, own_recipe("own_task"), **(few | overrides))


@pytest.fixture
def own(crew: LocalCrew, here: Path) -> Callable[..., Run]:
    return lambda in_loss, **overrides: own_run(crew, here, in_loss, **overrides)


@pytest.fixture(scope="module")
def undisturbed(crew: LocalCrew, tmp_path_factory: pytest.TempPathFactory) -> str:
    summary = Run(crew, tmp_path_factory.mktemp("undisturbed"))()
    assert summary["status"] == "done" and summary["restarts"] == 0
    return str(summary["weights_sha256"])


def kill(*ranks: int, number: int = signal.SIGKILL, after_s: float = 0.0) -> Callable[[Watch], None]:
    def do(watch: Watch) -> None:
        time.sleep(after_s)
        for pid in [watch.pids()[rank] for rank in ranks]:
            with contextlib.suppress(ProcessLookupError):  # what is asserted then tells
                os.kill(pid, number)

    return do


def test_an_undisturbed_run_tells_all_once(digits: Callable[..., Run], undisturbed: str) -> None:
    run = digits()
    summary = run()
    assert summary["weights_sha256"] == undisturbed
    assert summary["world_size"] == 2 and summary["resumed_from_step"] is None
    names = run.watch.names()
    assert names[:3] == ["start", "workers", "first_step"] and names[-1] == "done"
    assert names.count("save") == 40 and "failure" not in names
    shown = [name for name, _ in run.watch.events]
    assert shown == [name for name in names if name != "first_step"]
    assert [report.step for report in run.watch.reports] == [
        record["step"] for record in read_metrics(run.watch.run_dir)
    ]
    assert len(set(run.watch.pids())) == 2
    wait_until_dead(*run.watch.pids())


@pytest.mark.parametrize(("rank", "step"), [(0, 3), (1, 3), (0, 9), (1, 10), (0, 39)])
def test_a_killed_worker_costs_nothing(digits: Callable[..., Run], undisturbed: str, rank: int, step: int) -> None:
    run = digits()
    run.watch.when_step(step, kill(rank))
    summary = run()
    assert summary["status"] == "done" and summary["weights_sha256"] == undisturbed
    names = run.watch.names()
    if step < 39:  # else it may have done all that there was to do
        assert summary["restarts"] == 1 and summary["resumed_from_step"] >= step - 2  # one was being written
        order = [name for name in names if name in ("failure", "restart", "resume", "workers", "done")]
        assert order == ["workers", "failure", "restart", "resume", "workers", "done"]
        (failure,) = run.events("failure")
        assert (failure["rank"], failure["kind"]) == (rank, "died")
        assert "killed by SIGKILL" in failure["message"] and failure["node"]
    steps = [record["step"] for record in read_metrics(run.watch.run_dir)]
    assert steps == sorted(steps) and steps.count(40) == 2, "every report once, the last with its evaluation"


def test_workers_killed_again_and_again_at_random_moments_cost_nothing(
    digits: Callable[..., Run], undisturbed: str
) -> None:
    run = digits()
    chance = random.Random(7)
    for _ in range(4):
        ranks = chance.choice([(0,), (1,), (0, 1)])
        step = chance.randrange(2, 36)
        run.watch.when_step(step, kill(*ranks, after_s=chance.random() * 0.05))
    summary = run()
    assert summary["weights_sha256"] == undisturbed
    assert 1 <= summary["restarts"] <= 4
    assert summary["restarts"] == run.watch.names().count("restart") == run.watch.names().count("failure")


SLOW_WRITES = """
import os, time
real = os.fsync
def fsync(descriptor):
    print("writing", os.getpid(), flush=True)
    time.sleep(0.04)
    real(descriptor)
os.fsync = fsync
"""


def test_rank_0_killed_whatever_it_is_writing_costs_nothing(
    own: Callable[..., Run], here: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From the first file of the run's folder to the last of its first checkpoint."""
    steps = {"train.steps": 4, "evaluate.every_steps": 100, "failures.max_restarts": 20}
    run = own("pass", **steps)
    expected = own_run(run.crew, tmp_path_factory.mktemp("undisturbed"), "pass", **steps)()["weights_sha256"]
    task = here / "own_task.py"
    task.write_text(SLOW_WRITES + task.read_text())
    written = 0
    killed: list[int] = []

    def kill_at_the_next(name: str, fields: dict[str, Any]) -> None:
        """At the first thing that it writes, then at the second after the next start, and so on to the first save."""
        nonlocal written
        if name == "print" and fields["rank"] == 0 and fields["line"].startswith("writing"):
            pid = int(fields["line"].split()[1])
            written += 1
            if written == len(killed) + 1 and pid not in killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)
        elif name in ("failure", "save"):
            written = 0 if name == "failure" else 1000

    run.watch.always(kill_at_the_next)
    summary = run()
    assert summary["weights_sha256"] == expected
    assert summary["restarts"] == len(killed) >= 5, "so many files and folders are synced, at least"
    left = {path.name for path in (here / "run" / "checkpoints").iterdir()}
    assert all(name.startswith("step-") for name in left), left


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_killed_during_an_evaluation_costs_nothing(
    own: Callable[..., Run], tmp_path_factory: pytest.TempPathFactory, rank: int
) -> None:
    run = own("model.training or (print('evaluating', flush=True), time.sleep(0.1))")
    expected = own_run(run.crew, tmp_path_factory.mktemp("undisturbed"), "pass")()["weights_sha256"]
    run.watch.when_printed("evaluating", kill(rank))
    summary = run()
    assert summary["weights_sha256"] == expected and summary["restarts"] == 1
    evaluated = [record["step"] for record in read_metrics(run.watch.run_dir) if "val_loss" in record["metrics"]]
    assert evaluated == [4, 8]


@pytest.mark.slow
def test_the_warm_process_killed_costs_nothing(digits: Callable[..., Run], undisturbed: str) -> None:
    run = digits()
    run.watch.when_step(5, lambda watch: os.kill(parent_of(watch.pids()[0]), signal.SIGKILL))
    summary = run()
    assert summary["weights_sha256"] == undisturbed and summary["restarts"] == 1
    (failure,) = run.events("failure")
    assert failure["message"] == "the process that the worker was forked from is gone"


def test_a_stopped_worker_is_found_out_and_replaced(digits: Callable[..., Run], undisturbed: str) -> None:
    run = digits(**{"failures.hang_timeout_s": 2})
    run.watch.when_step(5, kill(1, number=signal.SIGSTOP))
    summary = run()
    assert summary["weights_sha256"] == undisturbed and summary["restarts"] == 1
    order = [name for name in run.watch.names() if name in ("hang", "failure", "restart", "resume")]
    assert order == ["hang", "failure", "restart", "resume"]
    (hang,) = run.events("hang")
    assert 1 in hang["ranks"] or 0 in hang["ranks"]
    assert "run_loop" in hang["stacks"]["0"] and "is stopped (state T)" in hang["stacks"]["1"]
    (failure,) = run.events("failure")
    assert (failure["rank"], failure["kind"]) == (1, "hung"), "the one that stands, not those that wait for it"


@pytest.mark.slow
def test_a_worker_that_hangs_before_its_first_step_is_found_out_and_replaced(
    own: Callable[..., Run], here: Path
) -> None:
    run = own("pass", **{"failures.hang_timeout_s": 1, "nccl.timeout_s": 4})
    task = here / "own_task.py"
    stuck = """
import time, pathlib, torch
if torch.distributed.get_rank() == 1 and not pathlib.Path("was_here").exists():
    pathlib.Path("was_here").touch()
    time.sleep(600)
"""
    task.write_text(stuck + task.read_text())
    assert run()["status"] == "done"
    told = {event["event"]: event for event in read_events(run.watch.run_dir)}  # though there was no folder then
    assert told["slow_start"]["time"] < told["start"]["time"]
    assert told["slow_start"]["ranks"] and "own_task.py" in told["slow_start"]["stacks"]["1"]  # rank 0 may be first
    assert told["failure"]["kind"] == "network" and told["restart"]["restarts"] == 1


def test_sigterm_to_a_worker_saves_and_goes_on(
    digits: Callable[..., Run], crew: LocalCrew, tmp_path_factory: pytest.TempPathFactory
) -> None:
    steps = {"checkpoint.every_steps": 1000, "train.steps": 240}
    expected = Run(crew, tmp_path_factory.mktemp("undisturbed"), **steps)()["weights_sha256"]
    run = digits(**steps)
    run.watch.when_step(20, kill(1, number=signal.SIGTERM))
    summary = run()
    assert summary["weights_sha256"] == expected
    assert summary["restarts"] == 0 and summary["resumed_from_step"] >= 20
    assert "failure" not in run.watch.names()
    saves = [event["step"] for event in run.events("save")]
    assert saves == [summary["resumed_from_step"], 240]


def test_a_worker_with_loader_processes_is_missed_at_once(digits: Callable[..., Run], undisturbed: str) -> None:
    """Loader workers outlive their trainer by seconds, and hold its pipes and its lock."""
    run = digits(**{"data.workers": 1})
    killed: list[float] = []
    run.watch.when_step(5, lambda watch: (killed.append(time.time()), kill(0)(watch)))  # type: ignore[func-returns-value]
    summary = run()
    assert summary["weights_sha256"] == undisturbed and summary["restarts"] == 1
    (failure,) = run.events("failure")
    assert failure["time"] - killed[0] < 3.0


def test_a_place_that_is_lost_is_replaced(digits: Callable[..., Run], undisturbed: str, crew: LocalCrew) -> None:
    crew.members()[1].call("close").result()
    run = digits()
    summary = run()
    assert summary["weights_sha256"] == undisturbed and summary["restarts"] == 1


def test_an_error_on_one_rank_is_told_by_its_traceback_and_not_retried(own: Callable[..., Run]) -> None:
    run = own("if rank == 1 and step == 5: raise ValueError('wrong on one')")
    with pytest.raises(WorkerError, match=r"^worker 1 on \S+: ValueError: wrong on one$") as caught:
        run()
    lines = caught.value.trace.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1] == "ValueError: wrong on one"
    assert "own_task.py" in caught.value.trace and "shoal/launch" not in caught.value.trace
    assert run.watch.names()[-2:] == ["failure", "failed"] and "restart" not in run.watch.names()
    (failure,) = run.events("failure")
    assert failure["rank"] == 1 and failure["traceback"] == caught.value.trace
    assert not any(name in ("failure", "print") for name, _ in run.watch.events), "the traceback comes first"
    summary = json.loads((run.watch.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"] == "wrong on one" and summary["world_size"] == 2


def test_an_error_of_input_before_the_start_leaves_nothing(own: Callable[..., Run], here: Path) -> None:
    run = own("pass", **{"checkpoint.metric": "val_loss"})
    task = here / "own_task.py"
    task.write_text(
        task.read_text().replace(
            "def datasets(self):",
            "def datasets(self):\n"
            "        if torch.distributed.get_rank() == 1:\n"
            "            raise __import__('shoal').UserError('data: is not on this machine')",
        )
    )
    with pytest.raises(UserError, match=r"^data: is not on this machine$"):
        run()
    assert not (here / "run").exists() and run.watch.events == []


def test_an_error_of_input_in_the_middle_is_a_failure_of_the_run(own: Callable[..., Run]) -> None:
    run = own("if rank == 0 and step == 5: raise UserError('data: image 7 is corrupt')")
    with pytest.raises(RunError, match=r"^data: image 7 is corrupt$") as caught:
        run()
    assert not isinstance(caught.value, WorkerError)
    assert run.watch.names()[-1] == "failed" and "restart" not in run.watch.names()


def test_a_worker_that_dies_every_time_is_given_up(own: Callable[..., Run]) -> None:
    run = own("if rank == 1 and step == 2: os._exit(9)", **{"failures.max_restarts": 2, "checkpoint.every_steps": 4})
    words = r"ended with status 9 and without a word \(worker 1 on .*\); given up after 2 restarts in a row without"
    with pytest.raises(RunError, match=words):
        run()
    assert [event["restarts"] for event in run.events("restart")] == [1, 2]
    assert run.watch.names()[-2:] == ["failure", "failed"]


def test_no_restart_is_made_where_none_is_borne(own: Callable[..., Run]) -> None:
    run = own("if rank == 1 and step == 2: os._exit(9)", **{"failures.max_restarts": 0})
    with pytest.raises(RunError, match=r"failures.max_restarts says how many are borne$"):
        run()
    assert run.events("restart") == []


@pytest.mark.slow
def test_progress_starts_the_budget_anew(own: Callable[..., Run]) -> None:
    """It dies in every second step, but each time after a new checkpoint."""
    line = "if rank == 0 and step == 2: __import__('time').sleep(0.5); os._exit(9)"  # when the first is written
    run = own(line, **{"failures.max_restarts": 1, "checkpoint.every_steps": 1})
    summary = run()
    assert summary["status"] == "done" and summary["step"] == 8 and summary["restarts"] == 7


def test_stopping_saves_and_resuming_goes_on_exactly(digits: Callable[..., Run], undisturbed: str) -> None:
    run = digits()
    run.watch.when_step(7, lambda watch: setattr(watch, "stop_reason", "SIGINT"))
    summary = run()
    assert summary["status"] == "interrupted" and summary["ended_by"] == "SIGINT" and 7 <= summary["step"] < 40
    resumed = prepare(resume=run.watch.run_dir)
    final = run_gang(run.crew, resumed, Watch(run.watch.run_dir))
    assert final["weights_sha256"] == undisturbed and final["resumed_from_step"] == summary["step"]


def test_stopping_before_the_start_leaves_nothing(own: Callable[..., Run], here: Path) -> None:
    run = own("pass")
    task = here / "own_task.py"
    task.write_text(f"import time; print('loading', flush=True); time.sleep(0.5)\n{task.read_text()}")
    run.watch.when_printed("loading", lambda watch: setattr(watch, "stop_reason", "SIGTERM"))
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (here / "run").exists()
    run.watch.stop_reason = "SIGTERM"  # even before any worker is started
    with pytest.raises(KeyboardInterrupt):
        run()


def test_a_worker_that_dies_while_the_run_is_stopped_leaves_what_was_saved(digits: Callable[..., Run]) -> None:
    run = digits()

    def stop_and_kill(watch: Watch) -> None:
        watch.stop_reason = "SIGINT"
        kill(0, 1)(watch)

    run.watch.when(lambda name, fields: name == "save" and fields["step"] >= 6, stop_and_kill)
    summary = run()
    assert summary["status"] == "interrupted" and summary["step"] >= 6 and str(run.watch.run_dir) in summary["resume"]
    assert run.watch.names()[-2:] == ["failure", "interrupted"]
    (newest,) = sorted((run.watch.run_dir / "checkpoints").glob("step-*"))[-1:]
    assert newest.name == f"step-{summary['step']:08d}"


def test_a_signal_to_every_process_saves_and_ends_the_run(digits: Callable[..., Run]) -> None:
    """As Slurm and systemd send it: to the launcher, the warm process and the trainers."""
    run = digits(**{"checkpoint.every_steps": 1000, "train.steps": 400})

    def everywhere(watch: Watch) -> None:
        watch.stop_reason = "SIGTERM"
        for pid in (parent_of(watch.pids()[0]), *watch.pids()):
            os.kill(pid, signal.SIGTERM)

    run.watch.when_step(7, everywhere)
    summary = run()
    assert summary["status"] == "interrupted" and summary["ended_by"] == "SIGTERM"
    assert run.watch.names().count("start") == 1


def test_a_disk_that_stays_full_is_told_in_words(own: Callable[..., Run]) -> None:
    line = "import resource; rank == 0 and step == 3 and resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    run = own(line, **{"checkpoint.every_steps": 4, "checkpoint.give_up_after_s": 0.5})
    with pytest.raises(RunError, match=r"step 8 could not be written to .*: worker 0: File too large; earlier"):
        run()
    failed = [fields for name, fields in run.watch.events if name == "save_failed"]
    assert {fields["message"] for fields in failed} == {"worker 0: File too large"}
    assert run.watch.names()[-1] == "failed"


def test_a_folder_that_cannot_be_written_is_told_in_words(crew: LocalCrew, here: Path) -> None:
    prepared = prepare(["digits"], DIGITS, run_dir="/proc/self/run")
    with pytest.raises(UserError, match=r"^--run-dir: /proc/self/run cannot be written: "):
        run_gang(crew, prepared, Watch(Path("/proc/self/run")))


def test_prints_of_all_workers_arrive_once_with_their_rank(own: Callable[..., Run]) -> None:
    run = own("model.training and print('at', step, file=sys.stderr if rank else sys.stdout)")
    run()
    lines = [(rank, line) for rank, line in run.watch.printed() if line.startswith("at")]
    assert sorted(lines) == [(rank, f"at {step}") for rank in (0, 1) for step in range(1, 9)]
    assert [line for rank, line in lines if rank == 1] == [f"at {step}" for step in range(1, 9)], "in order"


def test_values_from_the_environment_reach_workers_and_are_never_written(
    own: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    monkeypatch.setenv("SHOAL_TEST_SECRET", "swordfish-1234")
    line = "step == 3 and print('length', len(args['key'])); assert step < 5, 'refused ' + args['key']"
    run = own(line, **{"task.args": {"key": "${env:SHOAL_TEST_SECRET}"}})
    how = Launch(run.watch, run.watch.stop, launcher="local")
    monkeypatch.setattr("shoal.launch.crew.LocalCrew", lambda workers: _Lent(run.crew))
    with pytest.raises(WorkerError) as caught:
        launch(run.prepared, how)
    assert (0, "length 14") in run.watch.printed() and (1, "length 14") in run.watch.printed()
    assert "refused ${env:SHOAL_TEST_SECRET}" in str(caught.value)
    assert "swordfish" not in str(caught.value) + caught.value.trace
    assert "swordfish" not in repr(run.watch.events)
    for path in (here / "run").rglob("*"):
        assert path.is_dir() or b"swordfish" not in path.read_bytes(), path


class _Lent:
    """The crew of all tests, which is not closed after one."""

    def __init__(self, crew: LocalCrew) -> None:
        self.crew = crew

    def __getattr__(self, name: str) -> Any:
        return getattr(self.crew, name)

    def close(self) -> None:
        pass


def test_what_is_needed_and_never_comes_is_an_error(crew: LocalCrew, here: Path) -> None:
    class Short(_Lent):
        def obstacle(self) -> str:
            return "3 workers need 3 CPU and the cluster has 2"

    prepared = prepare(["digits"], DIGITS, run_dir=here / "run")
    watch = Watch(here / "run")
    gang = Gang(prepared, Launch(watch, watch.stop), Short(crew), Size(3, 3), threads=1)
    with pytest.raises(UserError, match=r"^cluster.workers: 3 workers need 3 CPU and the cluster has 2; ask for fewer"):
        gang.run()
    assert watch.events == [] and not (here / "run").exists()
