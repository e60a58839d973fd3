"""The gate lets noise pass, finds what is slower, and says which phase of the step it is."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.bench.baselines import MOST_RUNS, Timing, file_name, find_baseline, key_of, read_baseline, write_baseline
from shoal.bench.gate import in_words, judge, read_timing, step_windows, table
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
    """By 4%: a tenth of the pairs of runs is more than 10% apart; with eight runs known, few are taken for slower."""
    assert share("regression", 8, between=0.04, noise=0.01) <= 0.08
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
    assert step_windows([*rows, *reports((80, {"forward": 4.0}))], []) == [{"forward": 0.2}, {"forward": 0.4}]


def read(folder: Path) -> tuple[Timing, dict[str, Any]]:
    whole, events = read_run(folder), read_events(folder)
    return read_timing(whole, events), key_of(whole, events)


def test_a_runs_folder_is_read(tmp_path: Path) -> None:
    timing, key = read(make_run(tmp_path / "one"))
    assert timing.step_s == pytest.approx([0.1] * len(timing.step_s)) and len(timing.step_s) > 20
    assert timing.phases_s["backward"] == pytest.approx(0.05) and timing.run == "one"
    assert key["world_size"] == 2 and key["micro_batch"] == 32 and key["strategy"] == "ddp"
    assert key["train"]["precision"] == "fp32" and key["hardware"]["device"] == "cpu"
    assert file_name(key).startswith("simple_cnn-digits-cpu-x2-")
    own = key | {"model": None, "data": None, "task": {"name": "my_task:Task", "args": ""}}
    assert file_name(own).startswith("my_task_task-cpu-x2-")


def rewrite_recipe(folder: Path, before: str, after: str) -> None:
    file = folder / "recipe.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("precision: fp32", "precision: bf16", False),
        ("global_batch: 64", "global_batch: 128", False),
        ("compile: false", "compile: true", False),
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


def kept(folder: Path, *runs: Timing) -> Path:
    baseline = find_baseline(folder, read(make_run(folder.parent / "of-this-kind"))[1])
    write_baseline(baseline, runs)
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
        ("", "cannot be read as a baseline"),
        ("[]", "cannot be read as a baseline"),
        ('{"version": 1, "key": {}}', "cannot be read as a baseline"),
        ('{"version": 1, "key": {}, "runs": [{"run": "a", "time": 0, "step_s": [], "phases_s": {}}]}', "step times"),
        ('{"version": 99, "key": {}, "runs": []}', "is of version 99, and this Shoal reads 1"),
    ],
)
def test_a_baseline_that_is_broken_is_told(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_baseline(path)


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
    assert "has no other run to compare with; to begin with this one, add --save" in err
    assert not (here / "baselines").exists()
    for number, name in enumerate(names[:3]):
        assert run(["bench", "gate", str(name), "--save"]) == 0
        out, err = capfd.readouterr()
        assert "saved in baselines/simple_cnn-digits-cpu-x2-" in out + err
        assert ("no baseline: this is the first run of its kind" in out) is (number == 0)
        assert ("only assumed" in out) is (number in (1, 2))
    (file,) = (here / "baselines").iterdir()
    before = file.read_text()
    assert run(["bench", "gate", str(names[3])]) == 0
    assert "ok: a step takes what it did, within 5%" in capfd.readouterr().out

    slow = slowed(here / "slow", 2.0, "data")
    assert run(["bench", "gate", str(slow), "--save"]) == 1
    out, err = capfd.readouterr()
    assert re.search(r"regression: a step takes longer by more than 5% and beyond chance \(\+(19|20)\.\d%", out)
    assert re.search(r"; data grew most, by (19\.\d|20|20\.\d) ms a step \(20(\.\d)? -> (39\.\d|40|40\.\d)\)", out)
    assert "not saved; to take this for the new normal, remove baselines/" in out + err
    assert file.read_text() == before
    assert run(["bench", "gate", str(slow), "--threshold", "0.5"]) == 0

    fast = slowed(here / "fast", 0.5, "backward")
    assert run(["bench", "gate", str(fast), "--save"]) == 0
    out, err = capfd.readouterr()
    assert "faster: a step takes less" in out and "instead of the 3 slower ones" in out + err
    assert [kept.run for kept in read_baseline(file).runs] == ["fast"]


def test_with_json_the_result_is_the_one_line_on_stdout(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", str(slowed(here / "one", 1.0, "data")), "--save", "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["verdict"] == "no baseline"
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
    assert run(["bench", "gate", str(one), "--save"]) == 0
    (file,) = (here / "baselines").iterdir()
    assert len(read_baseline(file).runs) == 1


def test_the_nearest_other_kind_is_named(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", str(make_run(here / "one")), "--save", "--baselines", "kept"]) == 0
    rewrite_recipe(make_run(here / "two"), "precision: fp32", "precision: bf16")
    capfd.readouterr()
    assert run(["bench", "gate", "two", "--baselines", "kept"]) == 2
    err = capfd.readouterr().err
    assert "the nearest, kept/simple_cnn-" in err and "differs: train.precision fp32 there, bf16 here" in err
    (file,) = (here / "kept").iterdir()
    assert run(["bench", "gate", "two", "--baselines", str(file)]) == 2
    assert "is of another kind of run: train.precision fp32 there, bf16 here" in capfd.readouterr().err


def test_wrong_input_is_told(here: Path, capfd: Capture) -> None:
    assert run(["bench", "gate", "nowhere"]) == 2
    assert "run 'nowhere': not found" in capfd.readouterr().err
    assert run(["bench", "gate", str(make_run(here / "on", ended=None))]) == 2
    assert "only a run that is done can be judged" in capfd.readouterr().err
    (here / "file").write_text("")
    assert run(["bench", "gate", str(make_run(here / "one")), "--baselines", "file", "--save"]) == 2
    assert "--baselines: file/simple_cnn-" in capfd.readouterr().err
    assert run(["bench", "gate", "one", "--threshold", "0"]) == 2


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
