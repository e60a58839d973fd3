import contextlib
import dataclasses
import fcntl
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shoal.core.errors import UserError
from shoal.observe.records import Report, Workers
from shoal.observe.run_folder import LineFile, RunFolder, append_event, event_record
from shoal.observe.runs import is_locked

HOLD = """
import sys, time
from pathlib import Path
from shoal.observe.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
folder.open(None)
print("held", flush=True)
time.sleep(60)
"""


def report(step: int, loss: float = 0.5) -> Report:
    return Report(step, step / 10, {"train_loss": loss}, {"data": 0.1}, samples=8 * step, time=100.0 + step)


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_reports(path: Path, *steps: int, resumed_step: int | None = None) -> None:
    folder = RunFolder(path)
    folder.open(resumed_step)
    for step in steps:
        folder.report(report(step))
    folder.close()


def test_a_folder_and_its_files_are_made(tmp_path: Path) -> None:
    path = tmp_path / "some" / "where"
    folder = RunFolder(path)
    folder.open(None)
    before = time.time()
    folder.event("start", {"step": 0})
    folder.report(report(1))
    folder.report(report(2, math.nan))
    folder.tick(3)
    folder.tick(4)
    folder.write_recipe("name: x\n")
    # Read while the run goes on: what was reported is there at once.
    assert lines(path / "metrics.jsonl") == [
        {"time": 101, "step": 1, "epoch": 0.1, "samples": 8, "metrics": {"train_loss": 0.5}, "seconds": {"data": 0.1}},
        {
            "time": 102,
            "step": 2,
            "epoch": 0.2,
            "samples": 16,
            "metrics": {"train_loss": None},
            "seconds": {"data": 0.1},
        },
    ]
    event, first_step = lines(path / "events.jsonl")
    assert event["event"] == "start" and event["step"] == 0
    assert first_step["event"] == "first_step" and first_step["step"] == 3
    assert before <= float(str(event["time"])) <= time.time()
    assert (path / "recipe.yaml").read_text() == "name: x\n"
    folder.write_summary({"run": "x", "metrics": {"loss": math.inf, "accuracy": 0.5}})
    assert json.loads((path / "summary.json").read_text()) == {"run": "x", "metrics": {"loss": None, "accuracy": 0.5}}
    assert folder.checkpoints == path / "checkpoints"
    folder.close()


def test_going_on_from_a_step_forgets_the_reports_after_it(tmp_path: Path) -> None:
    write_reports(tmp_path / "run", 1, 2, 3, 4)
    write_reports(tmp_path / "run", 3, 4, 5, resumed_step=2)
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    (event,) = lines(tmp_path / "run" / "events.jsonl")
    assert event["event"] == "forgotten" and event["after_step"] == 2 and event["to_step"] == 4
    assert event["until"] == 104.0 and event["seconds"] == {"data": 0.2}, "what went into them stays known"


def test_a_line_that_a_crash_cut_short_does_not_take_the_next_one_with_it(tmp_path: Path) -> None:
    write_reports(tmp_path / "run", 1)
    for name in ("events.jsonl", "workers.jsonl"):
        (tmp_path / "run" / name).write_text('{"time": 1.0, "ev')
    write_reports(tmp_path / "run", resumed_step=0)
    for name in ("events.jsonl", "workers.jsonl"):
        assert (tmp_path / "run" / name).read_text().startswith('{"time": 1.0, "ev\n')


def test_a_report_that_tells_of_each_worker_is_a_line_of_its_own_besides(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open(None)
    workers = Workers(1.5, {"data": [0.1, 0.2]}, {"cpu_cores": [1.0, None]}, "compute", "compute: fine")
    folder.report(dataclasses.replace(report(7), workers=workers))
    folder.report(report(8))
    folder.close()
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [7, 8]
    assert lines(tmp_path / "run" / "workers.jsonl") == [{"time": 107.0, "step": 7, **vars(workers)}]


def test_going_on_from_the_beginning_forgets_them_all(tmp_path: Path) -> None:
    write_reports(tmp_path / "run", 1, 2)
    write_reports(tmp_path / "run", 1, resumed_step=0)
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl")] == [1]


def test_lines_that_a_crash_cut_short_do_not_swallow_the_next_ones(tmp_path: Path) -> None:
    path = tmp_path / "run"
    write_reports(path, 1, 2)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "metr')
    (path / "events.jsonl").write_text('{"time": 1, "event": "start"}\n{"time": 2, "ev')
    folder = RunFolder(path)
    folder.open(2)
    folder.report(report(3))
    folder.event("resume", {})
    folder.close()
    assert [line["step"] for line in lines(path / "metrics.jsonl")] == [1, 2, 3]
    events = (path / "events.jsonl").read_text().splitlines()
    assert json.loads(events[-1])["event"] == "resume" and len(events) == 3


def test_one_process_at_a_time_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert is_locked(path)
        second = RunFolder(path)
        with pytest.raises(UserError, match="is being trained by another process; stop that one first"):
            second.open(None)
        assert is_locked(path), "the refused one must not have opened it for others"
    finally:
        holder.kill()
        holder.communicate()
    assert not is_locked(path)
    with pytest.raises(UserError, match="another run has started in"):
        second.open(None)
    second.close()
    second.open(0)
    assert is_locked(path)
    second.close()
    assert not is_locked(path)


def test_a_look_at_the_lock_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open("r+") as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        threading.Timer(0.1, lambda: fcntl.flock(looking, fcntl.LOCK_UN)).start()
        folder = RunFolder(tmp_path)
        folder.open(None)
        folder.close()


def test_who_takes_over_a_run_may_wait_for_the_one_before_to_end(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True)
    killer = threading.Timer(1.0, holder.kill)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        folder = RunFolder(tmp_path)
        with pytest.raises(UserError, match="is being trained by another process"):
            folder.lock(wait_s=0.0)
        killer.start()
        folder.lock(wait_s=60.0)
        folder.lock()
        folder.close()
    finally:
        killer.cancel()
        holder.kill()
        holder.communicate()


def test_events_of_the_launcher_and_of_the_first_worker_stay_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"

    def write(who: int) -> None:
        for number in range(50):
            fields = {"who": who, "number": number, "stacks": "x" * 20_000}
            assert append_event(file, event_record("hang", fields))

    writers = [threading.Thread(target=write, args=(who,)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    written = lines(file)
    assert sorted((event["who"], event["number"]) for event in written) == [(w, n) for w in range(4) for n in range(50)]


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_told_with_its_option(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"^--run-dir: .* cannot be written: "):
        RunFolder(tmp_path / where).open(None)


def test_lines_that_a_full_disk_refuses_come_when_it_takes_them_and_are_never_cut(
    small_disk: Path,
) -> None:
    path = small_disk / "metrics.jsonl"
    file = LineFile(path)
    file.append({"step": 1})
    filler = small_disk / "filler"
    fill(filler)
    for step in range(2, 40):
        file.append({"step": step, "words": "x" * 5000})
    kept = [record["step"] for record in lines(path)]
    assert kept == list(range(1, len(kept) + 1)) and len(kept) < 39, "whole lines, as many as there was room for"
    assert not append_event(path, {"step": 99, "words": "x" * 5000})
    filler.unlink()
    file.append({"step": 40})
    file.close()
    assert [record["step"] for record in lines(path)] == list(range(1, 41))


def fill(path: Path) -> None:
    """Write until the disk takes no more."""
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(b"x" * 4096):
            pass


def test_a_disk_that_fails_in_another_way_is_told(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "metrics.jsonl")
    os.close(file._descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.append({"step": 1})
