"""Some steps are recorded in full, and whatever goes wrong with that, training goes on."""

import gzip
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from shoal.cli.main import run
from shoal.core.process import Process
from shoal.observe.runs import read_events, read_metrics
from shoal.observe.section import ProfileSection
from shoal.train.profile_table import operator_table, read_profiles
from shoal.train.profiling import Profiler, _records, make_profiler
from tests.tiny import own_recipe, tiny_run, write_own_task, write_tiny

Capture = pytest.CaptureFixture[str]


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self.events.append((name, fields))

    def report(self, report: Any) -> None: ...

    def tick(self, step: int) -> None: ...


def process(rank: int = 0, world_size: int = 1) -> Process:
    return Process(rank, world_size, torch.device("cpu"))


def make(folder: Path, told: Told, **fields: Any) -> Profiler:
    return make_profiler(ProfileSection(**fields), folder, process(), told)


def train(profiler: Profiler, steps: int, first: int = 1) -> list[bool]:
    """Steps of a real model, counted from `first`; what the profiler said after each."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = []
    for step in range(first, first + steps):
        model(torch.randn(4, 8)).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        said.append(profiler.after_step(step))
    return said


def trace_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    with gzip.open(folder / "profile" / f"rank-{rank:05d}.trace.json.gz", "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


@pytest.mark.parametrize(
    ("after", "steps", "made", "recorded"),
    [(1, 3, 8, [2, 4]), (2, 1, 8, [3, 3]), (5, 2, 20, [6, 7]), (3, 5, 6, [4, 6]), (3, 5, 8, [4, 8])],
)
def test_the_steps_that_were_asked_for_are_recorded(
    after: int, steps: int, made: int, recorded: list[int], tmp_path: Path
) -> None:
    told = Told()
    profiler = make(tmp_path, told, after=after, steps=steps)
    train(profiler, made)
    profiler.close()
    (record,) = read_profiles(tmp_path)
    assert record["steps"] == recorded and record["rank"] == 0 and record["device"] == "cpu"
    num_steps = recorded[1] - recorded[0] + 1
    calls = {row["name"]: row["calls"] for row in record["operators"]}
    assert calls["aten::addmm"] == 2 * num_steps and calls["aten::relu"] == num_steps
    assert sum(event.get("name") == "aten::addmm" for event in trace_of(tmp_path)) == 2 * num_steps
    assert 0 < sum(row["self_cpu_s"] for row in record["operators"]) <= record["seconds"] < 60
    own = [row["self_cpu_s"] for row in record["operators"]]
    assert own == sorted(own, reverse=True) and all(row["cpu_s"] >= row["self_cpu_s"] for row in record["operators"])
    path = str(tmp_path / "profile" / "rank-00000.trace.json.gz")
    assert told.events[0] == ("profile", {"rank": 0, "steps": recorded, "path": path})
    words = (
        f"only {num_steps} of {steps} steps are profiled: {made} steps were made, and recording begins after {after}"
    )
    missing = [fields["message"].split(";")[0] for _, fields in told.events[1:]]
    assert missing == ([words] if num_steps < steps else [])
    assert sorted(file.name for file in (tmp_path / "profile").iterdir()) == [
        "rank-00000.json",
        "rank-00000.trace.json.gz",
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_its_kernels_are_counted_with_their_operators(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    profiler = make_profiler(ProfileSection(after=2, steps=2), tmp_path, Process(0, 1, device), Told())
    weight = torch.randn(1024, 1024, device=device)
    for step in range(1, 6):
        (weight @ weight).relu_()
        profiler.after_step(step)
    (record,) = read_profiles(tmp_path)
    assert record["device"] == torch.cuda.get_device_name(device)
    hottest = record["operators"][0]
    assert hottest["name"] == "aten::mm" and hottest["calls"] == 2
    assert 0 < hottest["self_device_s"] <= record["seconds"]
    assert any(event.get("cat") == "kernel" for event in trace_of(tmp_path))
    assert operator_table(record)[1][0] == "aten::mm"


def test_what_follows_the_last_step_is_not_recorded(tmp_path: Path) -> None:
    told = Told()
    profiler = make_profiler(ProfileSection(after=3, steps=4), tmp_path, process(), told, num_steps=5)
    assert train(profiler, 5) == [False, True, True, False, True]
    train(Profiler(), 3)  # an evaluation
    profiler.close()
    calls = {row["name"]: row["calls"] for row in read_profiles(tmp_path)[0]["operators"]}
    assert calls["aten::relu"] == 2 and len(told.events) == 2
    assert told.events[1][1]["message"].startswith("only 2 of 4 steps are profiled: 5 steps were made, ")


def test_only_beginning_and_end_take_time_that_is_no_steps(tmp_path: Path) -> None:
    said = train(make(tmp_path, Told(), after=4, steps=3), 9)
    assert said == [False, False, True, True, False, False, True, False, False]


def test_steps_are_counted_from_this_start(tmp_path: Path) -> None:
    train(make(tmp_path, Told(), after=2, steps=2), 6, first=101)
    assert read_profiles(tmp_path)[0]["steps"] == [103, 104]


@pytest.mark.alone
def test_without_profiling_nothing_is_done(tmp_path: Path) -> None:
    told = Told()
    profilers = [Profiler(), make_profiler(None, tmp_path, process(), told)]
    profilers += [make_profiler(ProfileSection(ranks=[0, 2]), tmp_path, process(1, 3), told)]
    for profiler in profilers:
        began = time.perf_counter()
        assert not any(profiler.after_step(step) for step in range(10_000))
        assert time.perf_counter() - began < 0.2  # 20 us a step; it is below one, and this machine may be busy
        profiler.close()
    assert told.events == [] and list(tmp_path.iterdir()) == []


def test_chosen_workers_record() -> None:
    assert [_records([0, 2], rank) for rank in range(3)] == [True, False, True]
    assert all(_records("all", rank) for rank in range(3))


def test_a_worker_that_is_not_there_is_told_of(tmp_path: Path) -> None:
    told = Told()
    for ranks in ([0, 5], [5, 7]):
        for rank in range(2):
            profiler = make_profiler(ProfileSection(ranks=ranks, after=1, steps=1), tmp_path, process(rank, 2), told)
            train(profiler, 4)
            profiler.close()
    warnings = [fields["message"] for name, fields in told.events if name == "warning"]
    assert warnings == [
        "observe.profile.ranks: there is no worker 5; there are workers 0 to 1",
        "observe.profile.ranks: there is no worker 5, 7; there are workers 0 to 1, so nothing is profiled",
    ]
    assert read_profiles(tmp_path) == []
    train(make(tmp_path, told, ranks=[1]), 20)
    assert told.events[-1][1]["message"].endswith("no worker 1; the only worker is 0, so nothing is profiled")


def test_what_another_worker_recorded_is_told_in_the_runs_folder(tmp_path: Path) -> None:
    told = Told()
    profiler = make_profiler(ProfileSection(after=1, steps=1, ranks=[1]), tmp_path, process(1, 2), told)
    train(profiler, 3)
    (event,) = read_events(tmp_path)
    assert (event["event"], event["rank"], event["steps"]) == ("profile", 1, [2, 2])
    assert told.events == [] and trace_of(tmp_path, 1)


def test_a_run_that_ends_before_says_so(tmp_path: Path) -> None:
    for made in (0, 1, 8, 9):
        told = Told()
        profiler = make(tmp_path, told, after=9)
        train(profiler, made)
        profiler.close()
        profiler.close()  # a second time is harmless
        ((name, fields),) = told.events
        made_words = "1 step was made" if made == 1 else f"{made} steps were made"
        assert name == "warning" and fields["message"] == (
            f"nothing is profiled: {made_words}, and recording begins after 9; "
            "train longer, or set observe.profile.after lower"
        )
    assert read_profiles(tmp_path) == []


def test_the_first_worker_says_for_the_others_that_a_run_was_too_short(tmp_path: Path) -> None:
    told = Told()
    for rank in range(2):
        profiler = make_profiler(ProfileSection(after=3, steps=4, ranks=[1]), tmp_path, process(rank, 2), told)
        train(profiler, 5)
        profiler.close()
    assert warned(told).startswith("only 2 of 4 steps are profiled: 5 steps were made, and recording begins after 3;")
    assert [event["event"] for event in read_events(tmp_path)] == ["profile"]


def test_what_an_earlier_start_recorded_is_gone(tmp_path: Path) -> None:
    train(make(tmp_path, Told(), after=1, steps=1), 3)
    assert len(read_profiles(tmp_path)) == 1
    train(make(tmp_path, Told(), after=9), 1)
    assert read_profiles(tmp_path) == [] and list((tmp_path / "profile").iterdir()) == []


def test_what_others_recorded_in_an_earlier_start_is_gone_but_not_what_they_are_to_record(tmp_path: Path) -> None:
    for rank in range(3):
        train(make_profiler(ProfileSection(after=1, steps=1, ranks="all"), tmp_path, process(rank, 3), Told()), 3)
    (tmp_path / "profile" / "rank-00002.memory.json").write_text("{}")
    train(make_profiler(ProfileSection(after=9, ranks=[1, 2]), tmp_path, process(0, 2), Told()), 1)
    left = sorted(file.name for file in (tmp_path / "profile").iterdir())
    assert left == ["rank-00001.json", "rank-00001.trace.json.gz", "rank-00002.memory.json"]


def warned(told: Told) -> str:
    ((name, fields),) = told.events
    assert name == "warning"
    return str(fields["message"])


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    told = Told()
    profiler = make(tmp_path, told, after=1, steps=1)
    (tmp_path / "profile").write_text("in the way")
    assert train(profiler, 4) == [True, True, False, False]
    assert "nothing is profiled on worker 0: " in warned(told) and "File exists" in warned(told)


def test_a_full_disk_is_a_warning(small_disk: Path) -> None:
    told = Told()
    profiler = make(small_disk, told, after=1, steps=1)
    (small_disk / "profile").mkdir()
    with (small_disk / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            assert file.write(b"x" * 4096)
    train(profiler, 4)
    assert "No space left on device" in warned(told)
    assert list((small_disk / "profile").iterdir()) == []


def test_another_profiler_at_work_is_no_trouble_for_the_run(tmp_path: Path) -> None:
    told = Told()
    profiler = make(tmp_path, told, after=1, steps=2)
    with profile():
        assert len(train(profiler, 6)) == 6
    profiler.close()
    assert len(told.events) == 1


def test_profiles_that_are_broken_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    for number, text in enumerate(["", "[1]", '{"operators": 3, "steps": [1, 2]}', '{"rank": 0', "\udcff"]):
        file = tmp_path / "profile" / f"rank-0000{number}.json"
        file.write_text(text, errors="surrogateescape")
    assert read_profiles(tmp_path) == [] == read_profiles(tmp_path / "nowhere")


def test_the_table_is_of_one_step() -> None:
    zero = {"self_device_s": 0.0, "device_s": 0.0}
    rows = [
        {"name": "aten::mm", "calls": 4, "self_cpu_s": 0.04, "cpu_s": 0.06, **zero},
        {"name": "x" * 90, "calls": 3, "self_cpu_s": 0.02, "cpu_s": 0.02, **zero},
    ]
    record = {"rank": 3, "steps": [11, 12], "seconds": 0.1, "device": "cpu", "operators": rows}
    assert operator_table(record) == [
        ["worker 3, cpu", "ms a step", "share", "with callees", "calls a step"],
        ["aten::mm", "20.000", "40.0%", "30.000", "2"],
        ["x" * 57 + "...", "10.000", "20.0%", "10.000", "1.5"],
    ]
    rows[1] |= {"self_device_s": 0.08, "device_s": 0.08}
    assert operator_table(record, most=1)[1][1] == "0.000"
    assert operator_table(record)[2][1:4] == ["40.000", "80.0%", "40.000"]


# Whole runs


def test_a_run_is_profiled_by_an_option(here: Path, capfd: Capture) -> None:
    command = ["train", str(write_tiny(here)), "--profile", "observe.profile.after=3", "--run-dir", "one"]
    assert run(command) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert any(line.startswith("worker 0, cpu ") and line.endswith("calls a step") for line in lines)
    assert any(line.startswith("aten::addmm ") for line in lines)
    assert lines[-1] == "trace: one/profile/rank-00000.trace.json.gz (open it at https://ui.perfetto.dev)"
    assert "USDT" not in err and "Kineto" not in err
    assert read_profiles(here / "one")[0]["steps"] == [4, 6]
    (event,) = [event for event in read_events(here / "one") if event["event"] == "profile"]
    assert event["rank"] == 0 and event["steps"] == [4, 6]
    assert (
        tiny_run(here / "two")["weights_sha256"]
        == json.loads((here / "one/summary.json").read_text())["weights_sha256"]
    )
    assert not (here / "two" / "profile").exists()


def test_with_json_the_summary_alone_is_on_stdout(here: Path, capfd: Capture) -> None:
    assert run(["train", str(write_tiny(here)), "--profile", "--json"]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    assert json.loads(line)["status"] == "done"
    assert "aten::addmm" in err  # steps 11 and 12 of 12, and then the run ended


def test_starting_and_writing_is_booked_to_reports(here: Path) -> None:
    tiny_run(here / "one", {"observe.profile": {"after": 3, "steps": 2}})
    written_s = next(report["seconds"] for report in read_metrics(here / "one") if report["step"] == 6)
    assert written_s.get("report", 0.0) > written_s.get("data", 0.0)


def test_a_failure_while_recording_leaves_what_there_is(
    here: Path, monkeypatch: pytest.MonkeyPatch, train_here: Callable[..., dict[str, Any]]
) -> None:
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    write_own_task(here, "fails_while_profiled", "assert step < 6")
    recipe = own_recipe("fails_while_profiled") | {"observe": {"every_steps": 2, "profile": {"after": 2, "steps": 50}}}
    with pytest.raises(AssertionError):
        train_here(recipe, run_dir=here / "one")
    assert read_profiles(here / "one")[0]["steps"] == [3, 5]
    names = [event["event"] for event in read_events(here / "one")]
    assert names.index("profile") < names.index("failed")


@pytest.mark.slow
def test_every_worker_may_record(here: Path, capfd: Capture) -> None:
    command = ["train", str(write_tiny(here)), "--workers", "2", "--launcher", "local", "--run-dir", "one"]
    assert run([*command, "--profile-ranks", "all", "observe.profile.after=2"]) == 0
    assert [record["rank"] for record in read_profiles(here / "one")] == [0, 1]
    ranks = sorted(event["rank"] for event in read_events(here / "one") if event["event"] == "profile")
    assert ranks == [0, 1] and trace_of(here / "one", 1)


@pytest.mark.parametrize(
    ("options", "section"),
    [
        (["--profile"], {"steps": 3, "after": 10, "ranks": [0]}),
        (["--profile", "observe.profile.steps=7"], {"steps": 7, "after": 10, "ranks": [0]}),
        (["--profile-ranks", "0,1"], {"steps": 3, "after": 10, "ranks": [0, 1]}),
        (["--profile", "--profile-ranks", "all"], {"steps": 3, "after": 10, "ranks": "all"}),
    ],
    ids=str,
)
def test_options_are_fields_of_the_recipe(
    options: list[str], section: dict[str, Any], here: Path, capsys: Capture
) -> None:
    import yaml

    assert run(["train", "digits", *options, "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["observe"]["profile"] == section


def test_what_the_recipe_says_of_profiling_stays(here: Path, capsys: Capture) -> None:
    import yaml

    recipe = write_tiny(here, observe={"profile": {"steps": 5, "ranks": [1]}})
    assert run(["train", str(recipe), "--profile", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["observe"]["profile"] == {"steps": 5, "after": 10, "ranks": [1]}


@pytest.mark.parametrize("ranks", ["", "a", "0,", "-1", "1.5", "0;1"])
def test_ranks_that_are_none_are_refused(ranks: str, here: Path, capsys: Capture) -> None:
    assert run(["train", "digits", "--profile-ranks", ranks, "--dry-run"]) == 2
    assert f"--profile-ranks: {ranks!r} should be workers by number" in capsys.readouterr().err
