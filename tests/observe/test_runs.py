"""Reading runs back, whole and broken."""

import json
import os
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.observe.run_folder import RunFolder
from shoal.observe.runs import (
    age,
    curves,
    differing_fields,
    find_run,
    is_at_work,
    list_runs,
    read_events,
    read_metrics,
    read_run,
    run_names,
)
from tests.tiny import tiny_run

FILES = ("recipe.yaml", "metrics.jsonl", "events.jsonl", "summary.json")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended well."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    tiny_run(path)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(whole, tmp_path / "runs" / "copy"))


def make_run(path: Path, *events: str, status: str | None = None, time: float = 100.0) -> Path:
    """A folder by hand: events, two reports, and perhaps a summary."""
    path.mkdir(parents=True)
    (path / "recipe.yaml").write_text("name: made\n")
    (path / "events.jsonl").write_text("".join(json.dumps({"time": time, "event": name}) + "\n" for name in events))
    reports = [{"step": step, "epoch": 0, "metrics": {"train_loss": 1 / step}, "seconds": {}} for step in (2, 4)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    if status:
        (path / "summary.json").write_text(json.dumps({"status": status, "step": 9, "metrics": {"train_loss": 0.1}}))
    return path


def test_a_run_is_read_as_it_was_written(whole: Path) -> None:
    run = read_run(whole)
    summary = json.loads((whole / "summary.json").read_text())
    assert (run.name, run.status, run.step) == ("whole", "done", 12)
    assert run.summary == summary and run.metrics == summary["metrics"]
    assert run.recipe["model"] == {"name": "mlp", "hidden": [8], "dropout": 0.0}
    assert abs(run.started - time.time()) < 600
    assert [step for step, _ in curves(whole)["train_loss"]] == [1, 2, 4, 6, 8, 10, 12]
    assert [step for step, _ in curves(whole)["val_loss"]] == [6, 12]
    assert curves(whole)["val_loss"][-1][1] == summary["metrics"]["val_loss"]


@pytest.mark.parametrize(
    ("events", "summary", "status", "step", "loss"),
    [
        (("start", "done"), "done", "done", 9, 0.1),
        (("start", "failed"), "failed", "failed", 9, 0.1),
        (("start", "interrupted"), "interrupted", "interrupted", 9, 0.1),
        (("start",), None, "stopped", 4, 0.25),
        ((), None, "stopped", 4, 0.25),
        # gone on after an interruption and then killed: the summary is of the part before
        (("start", "interrupted", "resume", "start", "workers"), "interrupted", "stopped", 4, 0.25),
        # ended, but the summary is lost
        (("start", "workers", "save", "done"), None, "done", 4, 0.25),
    ],
)
def test_the_status_is_what_the_folder_last_says(
    tmp_path: Path, events: tuple[str, ...], summary: str | None, status: str, step: int, loss: float
) -> None:
    run = read_run(make_run(tmp_path / "run", *events, status=summary))
    assert (run.status, run.step, run.metrics) == (status, step, {"train_loss": loss})


def test_a_run_whose_folder_is_locked_is_running(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", "start")
    folder = RunFolder(path)
    folder.open(0)
    assert read_run(path).status == "running"
    folder.close()
    assert read_run(path).status == "stopped"


HERE = [{"event": "start", "time": 1}, {"event": "workers", "workers": [{"rank": 0, "host": socket.gethostname()}]}]
ELSEWHERE = [{"event": "start", "time": 1}, {"event": "workers", "workers": [{"rank": 0, "host": "another-machine"}]}]
RESTART = [{"event": "restart", "restarts": 1}]


@pytest.mark.parametrize(
    ("lock", "events", "silent_s", "is_running"),
    [
        # a lock that is held is beyond doubt
        (True, HERE, 9e9, True),
        (True, ELSEWHERE, 9e9, True),
        # one that is free is so for workers on this machine
        (False, HERE, 1, False),
        (False, [], 1, False),
        # else it goes by what was written, and when
        (False, ELSEWHERE, 1, True),
        (False, ELSEWHERE, 59, True),
        (False, ELSEWHERE, 61, False),
        (False, ELSEWHERE, -30, True),  # the other machine's clock is ahead
        (None, HERE, 1, True),
        (None, HERE, 61, False),
        # between two starts nobody holds it
        (False, HERE + RESTART, 1, True),
        (False, HERE + RESTART, 61, False),
    ],
)
def test_who_is_at_work_is_judged_by_the_lock_and_else_by_what_was_written(
    lock: bool | None, events: list[dict[str, Any]], silent_s: float, is_running: bool
) -> None:
    assert is_at_work(lock, events, silent_s, pause_s=60) is is_running


@pytest.mark.parametrize(
    ("host", "more", "report_s", "silent_s", "status"),
    [
        (socket.gethostname(), [], 1, 5, "stopped"),
        ("another-machine", [], 1, 5, "running"),
        ("another-machine", [], 1, 100, "stopped"),
        ("another-machine", [], 40, 100, "running"),  # it reports so rarely
        ("another-machine", [], 40, 130, "stopped"),
        (socket.gethostname(), ["failure"], 1, 100, "running"),  # it waits for machines
        (socket.gethostname(), ["failure"], 1, 310, "stopped"),
        ("another-machine", ["done"], 1, 5, "done"),
    ],
)
def test_a_run_on_shared_storage_runs_as_long_as_it_writes(
    tmp_path: Path, host: str, more: list[str], report_s: float, silent_s: float, status: str
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / ".lock").write_text("")
    (path / "recipe.yaml").write_text("name: made\nfailures: {machine_timeout_s: 300}\n")
    workers = {"event": "workers", "workers": [{"rank": 0, "host": host}, {"rank": 1, "host": "third"}]}
    events = [{"event": "start", "world_size": 2}, workers, *({"event": name} for name in more)]
    (path / "events.jsonl").write_text("".join(json.dumps({"time": 100.0} | event) + "\n" for event in events))
    report = {
        "step": 3,
        "epoch": 0,
        "metrics": {"train_loss": 1.0},
        "seconds": {"data": report_s / 4, "step": report_s * 0.75},
    }
    (path / "metrics.jsonl").write_text(json.dumps(report) + "\n")
    then = time.time() - silent_s
    for file in (path / "events.jsonl", path / "metrics.jsonl", path):
        os.utime(file, (then, then))
    run = read_run(path)
    assert (run.status, run.workers, run.restarts) == (status, 2, 0)
    assert abs(run.written - then) < 1


def test_where_the_lock_cannot_be_asked_what_was_written_tells(copy: Path) -> None:
    events = [line for line in (copy / "events.jsonl").read_text().splitlines() if json.loads(line)["event"] != "done"]
    (copy / "events.jsonl").write_text("\n".join(events) + "\n")
    assert read_run(copy).status == "stopped"
    (copy / ".lock").unlink()
    (copy / ".lock").mkdir()  # as little to be locked as a file on some file systems
    assert read_run(copy).status == "running"


def test_runs_are_listed_oldest_first_and_other_folders_left_out(tmp_path: Path) -> None:
    make_run(tmp_path / "b", "start", time=200.0)
    make_run(tmp_path / "a", "start", time=300.0)
    make_run(tmp_path / "c", "start", time=100.0)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    assert [run.name for run in list_runs(tmp_path)] == ["c", "b", "a"]
    assert sorted(run_names(tmp_path)) == ["a", "b", "c"]
    assert list_runs(tmp_path / "nowhere") == [] == run_names(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mnist-20260101-aaaa", "runs/mnist-20260101-aaaa"),
        ("runs/mnist-20260101-aaaa", "runs/mnist-20260101-aaaa"),
        ("./runs/mnist-20260101-aaaa/", "runs/mnist-20260101-aaaa"),
        ("mnist-20260101", "runs/mnist-20260101-aaaa"),
        ("elsewhere/mine", "elsewhere/mine"),
        ("dig", "runs/digits"),
        ("digits", "runs/digits"),  # a name in full, though another begins with it
    ],
)
def test_a_run_is_found_by_path_name_or_a_unique_beginning(here: Path, name: str, found: str) -> None:
    paths = ["runs/mnist-20260101-aaaa", "runs/mnist-20260202-bbbb", "runs/digits", "elsewhere/mine"]
    for path in [*paths, *(["runs/digits-2"] if name == "digits" else [])]:
        make_run(Path(path))
    assert find_run(name) == Path(found)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mnist", "2 begin so, give more of the name: mnist-20260101-aaaa, mnist-20260202-bbbb"),
        ("minst-20260101-aaaa", "did you mean mnist-20260101-aaaa?"),
        ("zzz", "see shoal runs list for the 2 in runs"),
        ("folder", "holds no recipe.yaml"),
        ("runs/mnist-20260101-aaaa/checkpoints/step-00000004", "is a checkpoint, not a run; its run is"),
    ],
)
def test_a_wrong_name_is_told_with_what_there_is(here: Path, name: str, says: str) -> None:
    for path in ("runs/mnist-20260101-aaaa", "runs/mnist-20260202-bbbb"):
        make_run(Path(path))
    checkpoint = Path("runs/mnist-20260101-aaaa/checkpoints/step-00000004")
    checkpoint.mkdir(parents=True)
    (checkpoint / "recipe.yaml").write_text("")
    Path("folder").mkdir()
    with pytest.raises(UserError) as caught:
        find_run(name)
    assert says in str(caught.value) and repr(name) in str(caught.value)


def test_where_nothing_has_run_that_is_said(here: Path) -> None:
    with pytest.raises(UserError, match=f"no runs in {here}/runs"):
        find_run("anything")


@given(data=st.data())
@settings(max_examples=60)
def test_a_folder_cut_or_garbled_anywhere_can_still_be_read(whole: Path, data: st.DataObject) -> None:
    folder = whole.parent / "broken"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name in FILES:
        content = (whole / name).read_bytes()
        damage = data.draw(st.sampled_from(["none", "cut", "garble", "empty", "missing"]), label=name)
        place = data.draw(st.integers(0, len(content) - 1))
        if damage == "cut":
            content = content[:place]
        elif damage == "garble":
            content = content[:place] + data.draw(st.binary(min_size=1, max_size=40)) + content[place + 40 :]
        if damage != "missing":
            (folder / name).write_bytes(b"" if damage == "empty" else content)
    check_readable(folder)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content",
    [
        "null",
        "[]",
        "3",
        '{"step": null, "metrics": null, "status": null, "time": null, "event": null}',
        '{"step": "x", "metrics": [1], "status": 3, "time": "noon", "event": 3}',
        '{"step": 1, "metrics": {"a": "b", "c": null, "d": NaN, "e": [1]}, "time": 1e400, "event": "start"}',
        '{"time": -5, "event": "start", "step": -3, "metrics": {"a": Infinity}}',
        '{"time": 1, "event": "done"}',
        "when: 2020-99-99\n",
    ],
)
def test_a_file_with_something_else_in_it_can_still_be_read(copy: Path, name: str, content: str) -> None:
    (copy / name).write_text(content + "\n")
    check_readable(copy)


@pytest.mark.parametrize("name", FILES)
def test_a_folder_in_place_of_a_file_can_still_be_read(copy: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).mkdir()
    check_readable(copy)


def check_readable(path: Path) -> None:
    """Nothing raises, and every value has the type that readers count on."""
    run = read_run(path)
    assert run.status in {"done", "stopped"} or isinstance(run.status, str)
    assert isinstance(run.step, int) and run.step >= 0
    assert isinstance(run.metrics, dict) and isinstance(run.summary, dict) and isinstance(run.recipe, dict)
    assert isinstance(run.started, float | int)
    for points in curves(path).values():
        assert all(isinstance(step, int) and isinstance(value, float) and value == value for step, value in points)
    assert all("event" in event and "time" in event for event in read_events(path))
    assert all("step" in record for record in read_metrics(path))
    assert list_runs(path.parent) is not None
    assert differing_fields([run.recipe, {"a": 1}])["a"] == [None, 1]


def test_a_cut_file_is_read_as_far_as_it_goes(copy: Path) -> None:
    metrics = copy / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-20])
    assert [step for step, _ in curves(copy)["train_loss"]] == [1, 2, 4, 6, 8, 10, 12]
    assert [step for step, _ in curves(copy)["val_loss"]] == [6], "the last line was cut"


@pytest.mark.parametrize(
    ("recipes", "differing"),
    [
        ([{"a": 1}, {"a": 1}], {}),
        ([{"a": 1}, {"a": 2}], {"a": [1, 2]}),
        ([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}], {"a.c": [2, 3]}),
        ([{"a": {"b": 1}}, {}], {"a.b": [1, None]}),
        ([{"a": 1}, {"a": {"b": 1}}], {"a": [1, None], "a.b": [None, 1]}),
        ([{"a": {}}, {"a": {}}], {}),
        ([{"a": [1, 2]}, {"a": [1, 3]}], {"a": [[1, 2], [1, 3]]}),
        ([{"a": 1}, {"a": 1}, {"a": 2}], {"a": [1, 1, 2]}),
        ([{"b": 1, "a": 1}, {"b": 2, "a": 2}], {"a": [1, 2], "b": [1, 2]}),
    ],
)
def test_fields_that_differ_are_told_by_their_dotted_name(
    recipes: list[dict[str, Any]], differing: dict[str, list[Any]]
) -> None:
    found = differing_fields(recipes)
    assert found == differing
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 s ago"), (59, "59 s ago"), (61, "1 min ago"), (3700, "1 h ago"), (90000, "1 d ago"), (-50, "0 s ago")],
)
def test_an_age_is_told_in_the_largest_unit(seconds: float, words: str) -> None:
    assert age(time.time() - seconds) == words
