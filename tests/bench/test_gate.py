"""The gate lets noise pass, finds what is slower, and says which phase of the step it is."""

import json
import math
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.bench.baselines import (
    MOST_RUNS,
    Timing,
    changing,
    differences,
    file_name,
    find_baseline,
    key_of,
    read_baseline,
    write_baseline,
)
from shoal.bench.gate import in_words, judge, read_timing, runs_with, step_windows, table
from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.launch.api import train
from shoal.observe.runs import read_events, read_run
from tests.made_run import make_run

Capture = pytest.CaptureFixture[str]
SEEDS = 100


def timeline(  # a run as it is: neighbours resemble each other, some steps are far off, and whole runs differ
    rng: np.random.Generator,
    step_s: float = 0.1,
    count: int = 60,
    noise: float = 0.05,
    memory: float = 0.7,
    between: float = 0.015,
    outliers: float = 0.0,
    name: str = "run",
    **phases_s: float,
) -> Timing:
    drawn, state = [], 0.0
    for _ in range(count):
        state = memory * state + math.sqrt(1 - memory**2) * rng.normal()
        drawn.append(state)
    times = step_s * np.exp(noise * np.array(drawn) + between * rng.normal())
    times[rng.random(count) < outliers] *= rng.uniform(3, 30)
    return Timing(name, 0.0, times.tolist(), phases_s)


def share(verdict: str, num_before: int, factor: float = 1.0, seeds: int = SEEDS, **how: float) -> float:
    """Of many runs, how many are judged so, after `num_before` of the same or a `factor` faster ones."""
    count = 0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        before = [timeline(rng, **how) for _ in range(num_before)]  # type: ignore[arg-type]
        count += judge(timeline(rng, 0.1 * factor, **how), before).verdict == verdict  # type: ignore[arg-type]
    return count / seeds


@pytest.mark.parametrize("num_before", [1, 3, 8])
def test_the_same_is_ok(num_before: int) -> None:
    assert share("ok", num_before) >= 0.95


@pytest.mark.parametrize("num_before", [1, 3])
def test_outliers_are_no_regression(num_before: int) -> None:
    assert share("ok", num_before, outliers=0.15) >= 0.95


def test_much_noise_is_no_regression() -> None:
    assert share("regression", 3, noise=0.4, memory=0.9) <= 0.07


def test_runs_that_differ_much_from_each_other_are_borne_once_that_is_known() -> None:
    """By 4%: a tenth of the pairs of runs is more than 10% apart; with eight runs known, few are taken for slower (8%
    in the long run, because the 1.5% that is assumed still weighs)."""
    assert share("regression", 8, between=0.04, noise=0.01) <= 0.1
    assert share("regression", 8, factor=1.3, between=0.04, noise=0.01) >= 0.95


@pytest.mark.parametrize(("num_before", "noise", "found"), [(1, 0.02, 0.9), (3, 0.05, 0.95), (8, 0.05, 0.95)])
def test_ten_percent_slower_is_found(num_before: int, noise: float, found: float) -> None:
    assert share("regression", num_before, factor=1.1, noise=noise) >= found


def test_fifteen_percent_slower_is_found_under_noise_and_outliers() -> None:
    assert share("regression", 3, factor=1.15, outliers=0.15) >= 0.95


def test_a_change_too_small_to_matter_is_none_however_certain() -> None:
    assert share("ok", 10, factor=1.03, noise=0.001, between=0.001) == 1.0
    rng = np.random.default_rng(0)
    before = [timeline(rng, noise=0.001, between=0.001) for _ in range(10)]
    assert judge(timeline(rng, 0.103, noise=0.001, between=0.001), before, threshold=0.01).verdict == "regression"


def test_faster_is_found() -> None:
    assert share("faster", 3, factor=0.85) >= 0.95
    assert share("faster", 3) <= 0.05


def lucky_or_not(rng: np.random.Generator, number: int) -> Timing:
    """A run as they come: one of twenty has the machine for itself and is faster by a tenth to a third."""
    luck = rng.uniform(0.7, 0.9) if rng.random() < 0.05 else 1.0
    steps = timeline(rng, 0.1 * luck, outliers=0.05).step_s
    return Timing(f"run-{number}", float(number), steps, {})


def test_over_many_gates_few_alarms_are_false_and_most_slow_downs_are_found() -> None:
    """As in CI: each run is kept unless it is called a regression. Of the first three, people say what is normal."""
    gates, alarms, found = 0, 0, []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        runs = [lucky_or_not(rng, 0)]
        for number in range(1, 16):
            now = lucky_or_not(rng, number)
            is_slower = judge(now, runs).verdict == "regression"
            if len(runs) >= 3:
                gates += 1
                alarms += is_slower
                if number % 3 == 0:
                    slow = timeline(rng, 0.11, outliers=0.05)
                    found.append(judge(slow, runs).verdict == "regression")
            elif is_slower:
                runs = [now]  # --accept
            runs = runs if is_slower else runs_with(now, runs)[-MOST_RUNS:]
    assert gates > 300 and alarms / gates < 0.05, (alarms, gates)
    assert len(found) > 120 and sum(found) / len(found) > 0.9, (sum(found), len(found))


def numbered(rng: np.random.Generator, *step_s: float) -> list[Timing]:
    return [
        Timing(str(number), float(number), timeline(rng, value, noise=0.01, between=0.005).step_s, {})
        for number, value in enumerate(step_s)
    ]


@pytest.mark.parametrize("num_normal", [1, 2, 3, 9])
def test_a_lucky_run_does_not_make_the_next_one_a_regression(num_normal: int) -> None:
    for seed in range(10):
        *before, now = numbered(np.random.default_rng(seed), *[0.1] * num_normal, 0.075, 0.1)
        assert len(kept_runs := runs_with(before[-1], before[:-1])) == num_normal + 1
        assert judge(now, kept_runs).verdict == "ok"


@pytest.mark.parametrize("num_before", [1, 3, 9])
def test_three_faster_runs_in_a_row_begin_a_new_level(num_before: int) -> None:
    *made, last = numbered(np.random.default_rng(1), *[0.1] * num_before, 0.08, 0.08, 0.08, 0.1)
    runs: list[Timing] = []
    for number, now in enumerate(made):
        assert len(runs) == number
        runs = runs_with(now, runs)
    assert [one.run for one in runs] == [str(num_before + number) for number in range(3)]
    assert judge(last, runs).verdict == "regression"
    # With a normal one in between, they are no level.
    rng = np.random.default_rng(2)
    *before, now = numbered(rng, *[0.1] * num_before, 0.08, 0.08, 0.1, 0.08)
    assert len(runs_with(now, before)) == num_before + 4


def test_the_interval_holds_the_truth() -> None:
    inside = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        low, high = judge(timeline(rng, 0.12), [timeline(rng) for _ in range(4)]).interval
        inside += low < 1.2 < high
    assert inside / SEEDS >= 0.85


def test_the_same_question_has_the_same_answer() -> None:
    runs = [timeline(np.random.default_rng(seed), 0.1 + 0.01 * (seed == 0)) for seed in range(4)]
    assert judge(runs[0], runs[1:]) == judge(runs[0], runs[1:])


@pytest.mark.parametrize("grown", ["data", "forward", "backward", "optimizer", "comm"])
def test_the_phase_that_grew_is_named(grown: str) -> None:
    rng = np.random.default_rng(3)
    phases = {"data": 0.001, "forward": 0.03, "backward": 0.05, "optimizer": 0.01, "comm": 0.009}
    before = [timeline(rng, **phases) for _ in range(3)]  # type: ignore[arg-type]
    noisy = {name: seconds * 1.02 for name, seconds in phases.items()}
    found = judge(timeline(rng, 0.12, **noisy | {grown: phases[grown] + 0.02}), before)  # type: ignore[arg-type]
    assert found.verdict == "regression" and found.grown is not None and found.grown.phase == grown
    assert f"; {grown} grew most, by 2" in in_words(found, 0.05) and " ms a step" in in_words(found, 0.05)
    assert [row[0] for row in table(found)[1:]] == ["step (median)", *[p for p in _order() if p in phases]]


def _order() -> tuple[str, ...]:
    from shoal.observe.phases import STEPPING

    return STEPPING


def test_runs_that_tell_fewer_phases_are_compared_by_what_both_tell() -> None:
    rng = np.random.default_rng(0)
    before = [timeline(rng, data=0.01, forward_backward=0.08, optimizer=0.01)]
    found = judge(timeline(rng, 0.12, data=0.03, forward=0.03, backward=0.05, optimizer=0.01), before)
    changes = {change.phase: (change.before_s, change.now_s) for change in found.changes}
    assert set(changes) == {"compute", "data"}
    assert changes["compute"] == pytest.approx((0.09, 0.09)) and changes["data"] == (0.01, 0.03)


def test_a_line_of_words_for_each_case() -> None:
    rng = np.random.default_rng(0)
    before = numbered(rng, 0.1)
    assert in_words(judge(numbered(rng, 0.1)[0], before), 0.025).startswith(
        "ok: a step takes as long as before, within 2.5% ("
    )
    assert in_words(judge(numbered(rng, 0.05)[0], before), 0.05).startswith(
        "faster: a step takes less time, by more than 5%"
    )
    restless = timeline(rng, 0.13, count=12, noise=0.6, memory=0.9)
    assert "may be chance (" in in_words(judge(restless, before), 0.001)


# From a run's folder


def reports(*rows: tuple[int, dict[str, float]]) -> list[dict[str, Any]]:
    return [{"step": step, "metrics": {}, "seconds": seconds} for step, seconds in rows]


def test_step_times_come_from_the_steps_between_two_reports() -> None:
    seconds = {"data": 1.0, "forward": 2.0, "backward": 3.0, "evaluate": 50.0, "checkpoint": 9.0}
    found = step_windows(reports((20, seconds), (30, seconds), (30, {"evaluate": 4.0}), (50, seconds)), [0])
    assert found == [
        {"data": 0.1, "forward": 0.2, "backward": 0.3},
        {"data": 0.05, "forward": 0.1, "backward": 0.15},
    ]


def test_the_first_steps_of_every_start_are_left_out() -> None:
    rows = [(step, {"forward": float(step)}) for step in range(10, 101, 10)]
    kept = [round(10 * window["forward"]) for window in step_windows(reports(*rows), [0, 50])]
    assert kept == [30, 40, 50, 80, 90, 100]
    # A start between two reports: what is told at 60 is of its five steps alone.
    kept = [round(10 * window["forward"]) for window in step_windows(reports(*rows), [0, 55])]
    assert kept == [30, 40, 50, 90, 100]


def test_reports_that_are_broken_are_left_out() -> None:
    rows = reports((30, {"forward": 1.0}), (40, {"forward": 2.0}))
    rows += [{"step": 50, "seconds": None}, {"step": 60}, {"step": 70, "seconds": {"forward": None, "data": "x"}}]
    rows += reports((80, {"forward": 4.0}), (90, {"forward": math.nan, "data": 1.0}), (100, {"forward": 0.0}))
    rows += reports((110, {"forward": 1.0, "data": -1.0}), (120, {"forward": math.inf, "data": 1.0}))
    assert step_windows(rows, []) == [{"forward": 0.2}, {"forward": 0.4}]


def read(folder: Path) -> tuple[Timing, dict[str, Any]]:
    whole, events = read_run(folder), read_events(folder)
    return read_timing(whole, events), key_of(whole, events)


def test_a_runs_folder_is_read(tmp_path: Path) -> None:
    timing, key = read(make_run(tmp_path / "one"))
    assert timing.step_s == pytest.approx([0.1] * len(timing.step_s)) and len(timing.step_s) > 20
    assert timing.phases_s["backward"] == pytest.approx(0.05) and timing.run == "one"
    assert key["world_size"] == 2 and key["micro_batch"] == 32 and key["strategy"] == "ddp"
    assert key["train"]["precision"] == "auto" and key["hardware"]["device"] == "cpu"
    assert file_name(key).startswith("simple_cnn-digits-cpu-x2-")
    own = key | {"model": None, "data": None, "task": {"name": "my_task:Task", "args": ""}}
    assert file_name(own).startswith("my_task_task-cpu-x2-")


def test_of_a_long_run_a_part_is_taken_from_all_of_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "one", fails_at=None)
    rows = [{"step": 10 * n, "metrics": {}, "seconds": {"forward": 10.0 + n}} for n in range(1, 60_000)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = read(folder)[0].step_s
    assert 900 < len(steps) <= 1000 and max(steps) > 5900 and min(steps) < 7
    assert judge(Timing("a", 0.0, steps, {}), [Timing("b", 0.0, steps, {})]).verdict == "ok"


def rewrite_recipe(folder: Path, before: str, after: str) -> None:
    file = folder / "recipe.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("precision: auto", "precision: bf16", False),
        ("global_batch: 64", "global_batch: 128", False),
        ("compile: auto", "compile: true", False),
        ("hidden: 64", "hidden: 65", False),
        ("name: digits\n", "name: other\n", True),
        ("lr: 0.003", "lr: 0.03", True),
        ("seed: 0", "seed: 1", True),
        ("every_steps: 10", "every_steps: 20", True),
    ],
)
def test_what_makes_a_step_longer_by_right_is_another_kind(
    before: str, after: str, is_same: bool, tmp_path: Path
) -> None:
    key = read(make_run(tmp_path / "one"))[1]
    rewrite_recipe(make_run(tmp_path / "two"), before, after)
    other = read(tmp_path / "two")[1]
    assert (file_name(other) == file_name(key)) is is_same


def test_runs_that_cannot_be_judged_are_refused(tmp_path: Path) -> None:
    for folder, says in {
        make_run(tmp_path / "failed", ended="failed"): "is failed; only a run that is done",
        make_run(tmp_path / "short", steps=60, fails_at=None): "has 4 reports after the first 20 steps, and at least 8",
    }.items():
        with pytest.raises(UserError, match=says):
            read(folder)
    resized = make_run(tmp_path / "resized")
    text = (resized / "events.jsonl").read_text()
    (resized / "events.jsonl").write_text(text.replace('"world_size": 2', '"world_size": 1', 1))
    with pytest.raises(UserError, match=r"another number of workers \(1 and 2\)"):
        read(resized)
    silent = make_run(tmp_path / "silent")
    (silent / "events.jsonl").write_text("")
    with pytest.raises(UserError):
        read(silent)


# Baselines


def _with_run(**fields: Any) -> str:
    whole = {"run": "a", "time": 0, "step_s": [0.1], "phases_s": {}} | fields
    return json.dumps({"version": 1, "key": {}, "runs": [whole]})


def kept(folder: Path, *runs: Timing) -> Path:
    baseline = find_baseline(folder, read(make_run(folder.parent / "of-this-kind"))[1])
    with changing(baseline.path):
        write_baseline(baseline.path, baseline.key, runs)
    return baseline.path


def timing(name: str, time: float = 0.0) -> Timing:
    return Timing(name, time, [0.123456789, 0.2], {"data": 0.000123456}, {"shoal": "1"})


def test_what_is_kept_is_read_back_to_four_digits(tmp_path: Path) -> None:
    path = kept(tmp_path / "baselines", timing("one"), timing("two", 1.0))
    assert [run.run for run in read_baseline(path).runs] == ["one", "two"]
    assert read_baseline(path).runs[0] == Timing("one", 0.0, [0.1235, 0.2], {"data": 0.0001235}, {"shoal": "1"})
    lines = path.read_text().splitlines()
    assert sum('"run": ' in line for line in lines) == 2 and json.loads(path.read_text())["version"] == 1


def test_the_newest_runs_are_kept(tmp_path: Path) -> None:
    runs = [timing(str(number), number) for number in range(MOST_RUNS + 3)]
    assert [run.run for run in read_baseline(kept(tmp_path / "b", *runs[::-1])).runs] == [r.run for r in runs[3:]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it is not JSON: Expecting value"),
        ("\x80", "it is not JSON: "),
        ("[" * 100_000, "it is not JSON: "),
        ("[]", "it has no version and key"),
        ('{"benchmark": "step", "machine": {}}', "it has no version and key"),
        ('{"version": 1, "key": []}', "it has no version and key"),
        ('{"version": 1, "key": {}}', "runs is missing"),
        ('{"version": 99, "key": {}, "runs": []}', "is of version 99, and this Shoal reads 1"),
        (_with_run(step_s=[]), "run a has step times that are none"),
        (_with_run(step_s=[0.1, 0.0]), "run a has step times that are none"),
        (_with_run(step_s=[0.1, math.nan]), "run a has step times that are none"),
        (_with_run(step_s=[0.1, -0.1]), "run a has step times that are none"),
        (_with_run(step_s=[10**400]), "too large"),
        (_with_run(step_s="x"), "could not convert"),
        (_with_run(step_s=None), "is no baseline, or a broken one"),
        (_with_run(phases_s=[]), "is no baseline, or a broken one"),
        (_with_run(phases_s={"data": math.inf}), "run a has times that are none"),
        (_with_run(time=math.nan), "run a has times that are none"),
        ('{"version": 1, "key": {}, "runs": [7]}', "is no baseline, or a broken one"),
        ('{"version": 1, "key": {}, "runs": 7}', "is no baseline, or a broken one"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_baseline_that_is_broken_is_told(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match=says) as told:
        read_baseline(path)
    assert str(told.value).startswith(f"--baselines: {path} is ") and "remove it" in str(told.value)


def test_kinds_are_told_apart_in_words(tmp_path: Path) -> None:
    key = read(make_run(tmp_path / "one"))[1]
    assert differences(key, key) == ""
    other = key | {"hardware": key["hardware"] | {"cores": 64}, "model": {"name": "simple_cnn", "args": "other"}}
    assert differences(other, key) == "hardware.cores 64 there, None here; other fields of model"
    assert len(file_name(key | {"task": {"name": "x" * 300}, "model": None, "data": None})) < 100
    strange = key | {"train": [1, 2], "extra": {"a": [1]}}
    assert "extra.a [1] there, None here" in differences(strange, key)


def test_gates_that_write_at_once_lose_nothing(here: Path) -> None:
    runs = [make_run(here / f"run-{number}") for number in range(6)]
    gates = [threading.Thread(target=run, args=(["bench", "gate", str(one), "--save"],)) for one in runs]
    for gate in gates:
        gate.start()
    for gate in gates:
        gate.join()
    (file,) = (here / "baselines").iterdir()
    assert sorted(kept.run for kept in read_baseline(file).runs) == [one.name for one in runs]


def test_who_changes_a_baseline_waits_for_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "one.json"
    code = f"""
import sys, time; from pathlib import Path; from shoal.bench.baselines import changing
with changing(Path({str(path)!r})): print('in', flush=True); sys.stdin.readline()
print(time.time(), flush=True)
"""
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None and other.stdin is not None and other.stdout.readline() == "in\n"
    threading.Timer(0.3, lambda: (other.stdin.write("\n"), other.stdin.flush())).start()  # type: ignore[union-attr,func-returns-value]
    began = time.monotonic()
    with changing(path):
        assert time.monotonic() - began > 0.25
    assert other.wait(10) == 0
    other.stdin.close()
    other.stdout.close()


# The command


def slowed(folder: Path, factor: float, phase: str) -> Path:
    """The same run, with one phase of every step longer."""
    make_run(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rng = np.random.default_rng(len(folder.name))
    for line in lines:
        line["seconds"] = {name: seconds * math.exp(0.01 * rng.normal()) for name, seconds in line["seconds"].items()}
        if phase in line["seconds"]:
            line["seconds"][phase] *= factor
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_command_from_the_first_run_to_a_regression(here: Path, capfd: Capture) -> None:
    names = [slowed(here / f"run{'x' * number}", 1.0, "data") for number in range(4)]
    assert run(["bench", "gate", str(names[0])]) == 2
    err = capfd.readouterr().err
    assert "--baselines: there is no folder baselines; to begin one with this run, add --save" in err
    assert not (here / "baselines").exists()
    for number, name in enumerate(names[:3]):
        assert run(["bench", "gate", str(name), "--save"]) == 0
        out, err = capfd.readouterr()
        assert "saved in baselines/simple_cnn-digits-cpu-x2-" in out + err
        assert ("no baseline yet: this is the first run of its kind" in out) is (number == 0)
        assert (" (its folder is new)" in out) is (number == 0)
        assert ("only assumed" in out) is (number in (1, 2))
    (file,) = (here / "baselines").iterdir()
    before = file.read_text()
    assert run(["bench", "gate", str(names[3])]) == 0
    assert "ok: a step takes as long as before, within 5%" in capfd.readouterr().out

    slow = slowed(here / "slow", 2.0, "data")
    assert run(["bench", "gate", str(slow), "--save"]) == 1
    out, err = capfd.readouterr()
    assert re.search(r"regression: a step takes longer by more than 5% and beyond chance \(\+(19|20)\.\d%", out)
    assert re.search(r"; data grew most, by (19\.\d|20|20\.\d) ms a step \(20(\.\d)? -> (39\.\d|40|40\.\d)\)", out)
    assert "not saved; to take this run for the new normal, add --accept" in out
    assert file.read_text() == before
    assert run(["bench", "gate", str(slow), "--threshold", "0.5"]) == 0


def test_a_faster_run_is_a_level_once_three_agree(here: Path, capfd: Capture) -> None:
    for name in ("normal", "normal-too"):
        assert run(["bench", "gate", str(slowed(here / name, 1.0, "data")), "--save"]) == 0
    (file,) = (here / "baselines").iterdir()
    for number in range(3):
        fast = slowed(here / f"fast{'x' * number}", 0.3, "backward")
        (fast / "events.jsonl").write_text(
            re.sub(r'"time": 17', f'"time": {18 + number}', (fast / "events.jsonl").read_text())
        )
        capfd.readouterr()
        assert run(["bench", "gate", str(fast), "--save"]) == 0
        out = capfd.readouterr().out
        if number == 0:
            assert "faster: a step takes less time" in out
            assert "the level is the new one once 3 runs in a row are as fast, or at once with --accept" in out
    assert "; 3 runs in a row are faster now, so the 2 slower runs before them are dropped" in out
    assert [kept.run for kept in read_baseline(file).runs] == ["fast", "fastx", "fastxx"]
    assert run(["bench", "gate", "normal", "--save"]) == 1


def test_a_regression_may_be_accepted(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", str(slowed(here / "one", 1.0, "data")), "--save"]) == 0
    slow = str(slowed(here / "slow", 3.0, "data"))
    assert run(["bench", "gate", slow]) == 1
    out = capfd.readouterr().out
    assert out.splitlines()[-1] == (
        "the one run in the baseline may have had luck: train once more, and compare that; "
        "to take this run for the new normal, add --accept"
    )
    assert run(["bench", "gate", slow, "--accept", "--json"]) == 0
    out, err = capfd.readouterr()
    assert "in place of the 1 run before it" in err
    assert json.loads(out)["verdict"] == "regression" and json.loads(out)["saved"] is True
    (file,) = (here / "baselines").iterdir()
    assert [kept.run for kept in read_baseline(file).runs] == ["slow"]
    assert run(["bench", "gate", str(slowed(here / "slow-too", 3.0, "data"))]) == 0


def test_with_json_the_result_is_the_one_line_on_stdout(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", str(slowed(here / "one", 1.0, "data")), "--save", "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["verdict"] == "no baseline" and json.loads(line)["saved"] is True
    assert run(["bench", "gate", str(slowed(here / "slow", 1.5, "forward")), "--json"]) == 1
    (line,) = capfd.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["verdict"] == "regression" and found["grew"] == "forward" and found["baseline_runs"] == 1
    assert found["ratio"] == pytest.approx(1.1, abs=0.01) and found["p"] < 0.05
    assert found["phases"]["forward"]["step_s"] == pytest.approx(0.03, rel=0.02)
    assert found["key"]["world_size"] == 2 and found["run"] == "slow"


def test_a_run_is_not_compared_with_itself(here: Path, capfd: Capture) -> None:
    one = slowed(here / "one", 1.0, "data")
    assert run(["bench", "gate", str(one), "--save"]) == 0
    assert run(["bench", "gate", str(one)]) == 2
    assert "holds this very run alone; train once more, and compare that run" in capfd.readouterr().err
    assert run(["bench", "gate", str(one), "--save"]) == 0
    (file,) = (here / "baselines").iterdir()
    assert len(read_baseline(file).runs) == 1


def test_the_nearest_other_kind_is_named(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", str(make_run(here / "one")), "--save", "--baselines", "kept"]) == 0
    rewrite_recipe(make_run(here / "two"), "precision: auto", "precision: bf16")
    capfd.readouterr()
    assert run(["bench", "gate", "two", "--baselines", "kept"]) == 2
    err = capfd.readouterr().err
    assert "the nearest, kept/simple_cnn-" in err and "differs: train.precision auto there, bf16 here" in err
    (file,) = (here / "kept").iterdir()
    assert run(["bench", "gate", "two", "--baselines", str(file)]) == 2
    assert "is of another kind of run: train.precision auto there, bf16 here" in capfd.readouterr().err


def test_wrong_input_is_told(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", "nowhere"]) == 2
    assert "run 'nowhere': not found" in capfd.readouterr().err
    assert run(["bench", "gate", str(make_run(here / "on", ended=None))]) == 2
    assert "only a run that is done can be judged" in capfd.readouterr().err
    (here / "result.json").write_text("{}")
    assert run(["bench", "gate", "result.json"]) == 2
    assert "run 'result.json': is a file; give the folder of a run" in capfd.readouterr().err
    make_run(here / "one")
    for option, value in {"threshold": ["0", "nan", "inf", "5", "-1"], "alpha": ["0", "nan", "0.5"]}.items():
        for given in value:
            assert run(["bench", "gate", "one", f"--{option}", given]) == 2
            assert f"--{option}: {given} should be " in capfd.readouterr().err


def test_a_place_that_is_none_is_refused(here: Path, capfd: Capture) -> None:
    make_run(here / "one")
    (here / "file").write_text("")
    (here / "baselines.json").mkdir()
    for options in ([], ["--save"]):
        for place, says in {
            "file": "file is neither a folder nor the file of a baseline, which ends in .json",
            "one/recipe.yaml": "one/recipe.yaml is neither a folder nor the file of a baseline",
            "": "'' should be a folder, or the file of one baseline",
            "s3://bucket/kept": "'s3://bucket/kept' should be a folder",
            **({"file/kept": "cannot be written: Not a directory"} if options else {}),
        }.items():
            assert run(["bench", "gate", "one", "--baselines", place, *options]) == 2
            assert says in capfd.readouterr().err
    for typo in ("baseline.json", "kept.json", "else/where"):
        assert run(["bench", "gate", "one", "--baselines", typo]) == 2
        err = capfd.readouterr().err
        assert f"there is no {'file' if 'json' in typo else 'folder'} {typo}; " in err
        assert ("did you mean baselines.json? Or, to begin one" in err) is (typo == "baseline.json")
    assert sorted(path.name for path in here.iterdir()) == ["baselines.json", "file", "one"]
    assert run(["bench", "gate", "one", "--baselines", "baselines.json", "--save"]) == 0
    assert run(["bench", "gate", "one", "--baselines", "kept/own.json", "--save"]) == 0
    assert run(["bench", "gate", str(make_run(here / "two")), "--baselines", "kept/own.json"]) == 0


def test_a_broken_file_beside_is_no_trouble_and_one_in_the_way_is_told(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", str(make_run(here / "one")), "--save"]) == 0
    (file,) = (here / "baselines").iterdir()
    for name in ("a", "z"):
        (here / "baselines" / f"{name}.json").write_text('{"version": 1, "key": {"train": [[]]}, "runs": []}')
    (here / "baselines" / "m.json").write_text("{")
    assert run(["bench", "gate", str(make_run(here / "two"))]) == 0
    rewrite_recipe(here / "two", "precision: auto", "precision: bf16")
    assert run(["bench", "gate", "two"]) == 2
    assert f"the nearest, {file.relative_to(here)}, differs: train.precision" in capfd.readouterr().err
    other = file.read_text().replace('"cores": null', '"cores": 64')
    file.write_text(other)
    assert run(["bench", "gate", "one", "--save"]) == 2
    assert "is of another kind of run: hardware.cores 64 there, None here" in capfd.readouterr().err
    file.write_text("{")
    assert run(["bench", "gate", "one", "--save"]) == 2
    assert "is no baseline, or a broken one (it is not JSON: " in capfd.readouterr().err


# Real runs


def test_a_dataset_that_has_become_slow_is_found_in_real_runs(
    here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    (here / "slow_rows.py").write_text(
        "import pathlib, time, torch\n"
        "class Rows:\n"
        "    def __init__(self): self.sleep_s = float(pathlib.Path('sleep_s').read_text())\n"
        "    def __len__(self): return 512\n"
        "    def __getitem__(self, i):\n"
        "        time.sleep(self.sleep_s)\n"
        "        return torch.ones(2), torch.ones(1)\n"
        "class Task:\n"
        "    def model(self): return torch.nn.Linear(2, 1)\n"
        "    def datasets(self): return {'train': Rows()}\n"
        "    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()\n"
    )
    recipe = {
        "task": "slow_rows:Task",
        "train": {"steps": 100, "global_batch": 8},
        "observe": {"every_steps": 5},
        "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
    }
    for name, sleep_s in {"one": 0.001, "two": 0.001, "slow": 0.008}.items():
        (here / "sleep_s").write_text(str(sleep_s))
        train(recipe, run_dir=here / name, progress="silent")
    # A wide threshold: a busy machine makes the rest of a step longer, but not the sleep.
    assert run(["bench", "gate", "one", "--save"]) == 0
    assert run(["bench", "gate", "two", "--threshold", "1.0"]) == 0, capfd.readouterr().out
    capfd.readouterr()
    assert run(["bench", "gate", "slow", "--threshold", "1.0"]) == 1
    assert "; data grew most, by " in capfd.readouterr().out
