"""What is made of a run's folder: of one that goes on, has ended, was broken, or says hardly anything."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from shoal.core.storage import to_json_line
from shoal.observe.ledger import read_ledger
from shoal.observe.monitor.choose import newest_run
from shoal.observe.monitor.facts import Facts, facts_of, to_json
from shoal.observe.monitor.frame import frame
from shoal.observe.monitor.look import Look
from shoal.observe.monitor.standing import is_over
from shoal.observe.monitor.watch import RunWatch
from shoal.observe.monitor.wording import ending
from shoal.observe.runs import resume_command
from tests.made_run import BEGAN, make_run


def look_at(path: Path) -> Facts:
    watch = RunWatch(path)
    watch.poll()
    return facts_of(watch)


def append(path: Path, **record: Any) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def shift(folder: Path, by_s: float) -> None:
    """As if it had been written at another time."""
    for name in ("events", "metrics", "workers"):
        path = folder / f"{name}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in records:
            for key in ("time", "asked", "clock"):
                record |= {key: record[key] + by_s} if key in record else {}
        path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def ended(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "digits-a")


@pytest.fixture
def going(tmp_path: Path) -> Path:
    """A run at step 300 of 400, whose newest report is of now."""
    folder = make_run(tmp_path / "runs" / "digits-b", steps=300, ended=None)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    shift(folder, time.time() - last)
    return folder


def test_a_run_that_goes_on(going: Path) -> None:
    facts = look_at(going)
    assert (facts.status, facts.step, facts.num_steps, facts.world_size) == ("running", 300, 400, 2)
    assert facts.strategy == "ddp" and facts.restarts == 1 and facts.num_failures == 1
    assert facts.left_s == pytest.approx(10.0, abs=1.1)
    assert facts.elapsed_s == pytest.approx(5 + 25 + 12 + 10, abs=1.5)
    assert facts.rates["samples_per_s"].now == facts.rates["samples_per_s"].mean == pytest.approx(640.0)
    shares = {"data": 0.2, "forward": 0.2, "backward": 0.5, "comm": 0.08, "optimizer": 0.02}
    assert {phase: share for phase, share in facts.phases.items() if share} == pytest.approx(shares)
    assert facts.bottleneck == "compute" and facts.verdict.startswith("compute: 72%")
    assert facts.last_checkpoint is not None and facts.last_checkpoint.step == 300
    assert facts.last_checkpoint.age_s == pytest.approx(0.0, abs=1.5) and facts.last_checkpoint.size_bytes == 223212
    assert [worker.is_slowest for worker in facts.workers] == [False, True]
    assert facts.workers[0].system["cpu_cores"] == 0.97 and "gpu_busy" not in facts.workers[0].system
    assert facts.goodput == pytest.approx(read_ledger(going, time.time()).goodput, abs=0.03)
    assert facts.cost is None and facts.waits_s is None


def test_a_price_becomes_money(going: Path) -> None:
    recipe = (going / "recipe.yaml").read_text()
    (going / "recipe.yaml").write_text(recipe.replace("price_per_hour: null", "price_per_hour: 3.6"))
    facts = look_at(going)
    assert facts.cost == pytest.approx(2 * (facts.elapsed_s or 0) * 0.001, rel=0.05)
    assert facts.cost_at_end == pytest.approx((facts.cost or 0) + 2 * (facts.left_s or 0) * 0.001)


def test_an_ended_run_is_told_by_its_summary(ended: Path) -> None:
    facts = look_at(ended)
    assert (facts.status, facts.step, facts.left_s, facts.goodput) == ("done", 400, None, 0.8)
    assert facts.phases_over_s == 45.0 and facts.elapsed_s == pytest.approx(62.0)
    assert ending(facts).startswith("done: 400 steps in 1 min 02 s  train_loss ")


def test_a_failed_run_says_why_and_how_to_go_on(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=120, ended=None, fails_at=None)
    append(
        folder / "events.jsonl", time=BEGAN + 99, event="failed", step=120, message="loss is nan\nat step 120\x1b[2J"
    )
    facts = look_at(folder)
    assert facts.status == "failed"
    assert ending(facts) == f"failed at step 120: loss is nan; go on with: shoal train --resume {folder}"


def test_how_to_go_on_says_where_the_run_ran(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended="interrupted")
    launch = {"launcher": "ray", "address": "10.0.0.1:6379"}
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    lines = [line | ({"launch": launch} if line["event"] == "start" else {}) for line in lines]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = f"shoal train --resume {folder} --launcher ray --address 10.0.0.1:6379"
    assert ending(look_at(folder)).endswith(f"; go on with: {command}") and resume_command(folder, launch) == command


@pytest.mark.parametrize("launch", [None, {}, {"launcher": "auto"}, {"launcher": None, "address": ""}, "ray", [1]])
def test_where_nothing_was_asked_for_there_is_nothing_to_say_again(launch: object) -> None:
    assert resume_command(Path("a b"), launch) == "shoal train --resume 'a b'"


def test_the_numbers_are_one_json_object(going: Path) -> None:
    record = json.loads(to_json_line(to_json(look_at(going))))
    assert {
        *("run", "status", "step", "num_steps", "left_s", "rates", "phases", "verdict", "bottleneck", "workers"),
        *("last_checkpoint", "failures", "restarts", "goodput", "cost", "metrics", "epoch", "elapsed_s"),
    } <= set(record)
    assert record["failures"][0]["rank"] == 1 and record["workers"][1]["is_slowest"] is True


def test_a_resumed_run_is_read_anew(going: Path) -> None:
    watch = RunWatch(going)
    watch.poll()
    assert facts_of(watch).step == 300
    lines = (going / "metrics.jsonl").read_text().splitlines(keepends=True)
    (going / "new").write_text("".join(line for line in lines if json.loads(line)["step"] <= 200))
    (going / "new").replace(going / "metrics.jsonl")
    append(going / "events.jsonl", time=time.time(), event="failure", rank=0, message="gone", kind="died", node="vm")
    watch.poll()
    facts = facts_of(watch)
    assert facts.step == 200 and facts.curves["train_loss"].last == (200, pytest.approx(0.4344, abs=1e-3))
    assert facts.waits_s == pytest.approx(0.0, abs=1.0)  # starting again


def test_a_long_file_is_read_in_parts_and_shown_meanwhile(going: Path) -> None:
    line = (going / "metrics.jsonl").read_text().splitlines(keepends=True)[-2]
    with (going / "metrics.jsonl").open("a") as file:
        file.write(line * 10_000)
    watch = RunWatch(going)
    watch.poll(budget_s=0.0)
    assert watch.is_behind and 0 < facts_of(watch).read_share < 1
    polls = 1
    while watch.is_behind:
        watch.poll(budget_s=0.0)
        polls += 1
    assert polls >= 2 and facts_of(watch).read_share == 1.0


# ---------------------------------------------------------------- who is at work


def test_a_folder_whose_lock_is_free_has_stopped_after_a_while(going: Path) -> None:
    text = (going / "events.jsonl").read_text().replace('"host": "vm"', f'"host": "{os.uname().nodename}"')
    (going / "events.jsonl").write_text(text)
    (going / ".lock").touch()
    watch = RunWatch(going)
    watch.poll()
    assert facts_of(watch).status == "running"  # its launcher may be about to start others
    watch._was_silent_s = 11.0
    facts = facts_of(watch)
    assert facts.status == "stopped" and is_over(watch, "stopped")
    assert "nobody trains there now; go on with: shoal train --resume" in ending(facts)
    lock = FileLock(going / ".lock")
    with lock:
        assert facts_of(watch).status == "running"


def test_a_silent_run_of_another_machine_may_still_come_back(going: Path) -> None:
    text = (going / "events.jsonl").read_text().replace('"host": "vm"', '"host": "elsewhere"')
    (going / "events.jsonl").write_text(text)
    (going / ".lock").touch()
    watch = RunWatch(going)
    watch.poll()
    watch._was_silent_s = 3600.0
    assert facts_of(watch).status == "stopped" and not is_over(watch, "stopped")


@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_the_clock_of_the_writer_counts(going: Path, ahead_s: float) -> None:
    shift(going, ahead_s)
    watch = RunWatch(going)
    watch.poll()
    assert facts_of(watch).elapsed_s == pytest.approx(52, abs=3)
    now = time.time() + ahead_s
    append(going / "metrics.jsonl", time=now, step=310, epoch=13.4, samples=1, metrics={}, seconds={"forward": 1.0})
    watch.poll()
    facts = facts_of(watch)
    assert facts.last_checkpoint is not None and facts.last_checkpoint.age_s < 5
    assert facts.elapsed_s == pytest.approx(52, abs=3) and facts.status == "running" and facts.silent_s < 3
    assert facts.left_s is not None and facts.left_s < 12


# ---------------------------------------------------------------- broken folders


def test_a_folder_that_says_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: x\n")
    facts = look_at(tmp_path)
    assert facts.status == "running" and facts.step == 0 and facts.waits_s is not None
    assert "getting ready ... " in frame(facts, 80, 24, Look())[1].plain


def test_a_folder_that_is_gone(ended: Path) -> None:
    watch = RunWatch(ended)
    watch.poll()
    shutil.rmtree(ended)
    watch.poll()
    facts = facts_of(watch)
    assert facts.status == "gone" and is_over(watch, "gone") and ending(facts) == f"the run's folder is gone: {ended}"


@pytest.mark.parametrize("wrong", [10**400, -1, None, "x", 1e308, True])
@pytest.mark.parametrize(("file", "field"), [("metrics", "step"), ("events", "asked"), ("workers", "over_s")])
def test_a_wrong_number_does_no_harm(ended: Path, file: str, field: str, wrong: Any) -> None:
    (ended / "summary.json").unlink()
    path = ended / f"{file}.jsonl"
    first, *others = path.read_text().splitlines()
    path.write_text("\n".join([others[0], json.dumps(json.loads(first) | {field: wrong}), *others, ""]))
    facts = look_at(ended)
    assert facts.step == 400
    assert "train_loss" in "".join(line.plain for line in frame(facts, 80, 24, Look()))


def test_a_run_from_before_workers_and_times(ended: Path) -> None:
    (ended / "workers.jsonl").unlink()
    (ended / "summary.json").unlink()
    reports = [json.loads(line) for line in (ended / "metrics.jsonl").read_text().splitlines()]
    for report in reports:
        del report["time"], report["samples"]
        report["seconds"] = {"forward_backward": 0.7, "data": 0.3}
    (ended / "metrics.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    facts = look_at(ended)
    assert facts.step == 400 and facts.bottleneck == "input" and set(facts.phases) == {"forward_backward", "data"}
    assert [worker.rank for worker in facts.workers] == [0, 1] and not facts.workers[0].shares


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=60, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.data())
def test_whatever_is_in_the_files_there_is_a_frame(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = make_run(tmp_path_factory.mktemp("any") / "run", steps=200, ended="done", fails_at=150)
    for name in ("events", "metrics", "workers"):
        path = folder / f"{name}.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        for record in data.draw(st.lists(st.sampled_from(records), max_size=4)):
            key = data.draw(st.sampled_from(sorted(record)))
            record[key] = data.draw(ANYTHING)
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        path.write_bytes(content[: int(data.draw(st.floats(0, 1)) * len(content))])
    (folder / "summary.json").write_text(json.dumps(data.draw(ANYTHING)))
    (folder / "recipe.yaml").write_text(json.dumps(data.draw(ANYTHING)))
    facts = look_at(folder)
    to_json_line(to_json(facts))
    for width, height in ((1, 1), (30, 8), (80, 24), (200, 60)):
        lines = frame(facts, width, height, Look())
        assert len(lines) <= height and all(line.cell_len <= width for line in lines)
    ending(facts)


# ---------------------------------------------------------------- which run


def test_the_newest_run_that_is_running_is_watched(tmp_path: Path) -> None:
    assert newest_run(tmp_path / "runs") is None
    for age_s, name in ((300, "a"), (200, "b"), (100, "c")):
        folder = make_run(tmp_path / "runs" / name, steps=100, fails_at=None)
        for path in folder.iterdir():
            os.utime(path, (time.time() - age_s, time.time() - age_s))
    assert newest_run(tmp_path / "runs") == tmp_path / "runs" / "c"
    with FileLock(tmp_path / "runs" / "a" / ".lock"):
        assert newest_run(tmp_path / "runs") == tmp_path / "runs" / "a"
