"""A run as a whole: what is built, how it ends, and what is written down."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from shoal.core.errors import DivergedError, RunError, UserError
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.ledger import read_ledger
from shoal.observe.runs import curves, read_events, read_metrics
from shoal.observe.verdict import BOTTLENECKS
from shoal.parallel.unit import TrainUnit
from shoal.train.state import TrainState
from shoal.train.worker import _stop
from tests.small_recipes import small
from tests.train.test_exact_resume import StopsAt

TASKS = """
import random, numpy as np, torch
from torch import nn

SEEN = []

class Base:
    def model(self):
        return nn.Linear(3, 1)
    def datasets(self):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(37, 3, generator=g)
        y = x @ torch.tensor([[1.0], [-2.0], [0.5]])
        return {"train": list(zip(x, y)), "val": list(zip(x[:10], y[:10]))}
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).pow(2).mean()

class Metrics(Base):
    def metrics(self, model, batch):
        assert not model.training
        SEEN.append(len(batch[0]))
        error = (model(batch[0]) - batch[1]).abs()
        return {"mae": error.mean(), "worst": (error.max(), 1)}

class NoValidation(Base):
    def datasets(self):
        return {"train": super().datasets()["train"]}

class Empty(Base):
    def datasets(self):
        return {"train": []}

class NoTrain(Base):
    def datasets(self):
        return []

class NoItems(Base):
    def datasets(self):
        return {"train": iter([1])}

class WrongModel(Base):
    def model(self):
        return 3

class NoParameters(Base):
    def model(self):
        return nn.Identity()

class Frozen(Base):
    def model(self):
        return nn.Linear(3, 1).requires_grad_(False)

class Killed(Base):
    def datasets(self):
        class Items(list):
            def __getitem__(self, index):
                import os, signal
                if index == 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return list.__getitem__(self, index)
        return {"train": Items(super().datasets()["train"])}

class Lazy(Base):
    def model(self):
        return nn.LazyLinear(1)

class ExtraState(Base):
    def model(self):
        class Net(nn.Linear):
            def get_extra_state(self):
                return {"a": 1}
            def set_extra_state(self, state):
                pass
        return Net(3, 1)

class CountIsNumber(Base):
    count = 0

class MeanAndCount(Base):
    def count(self, batch):
        return 80

class CountDiffers(MeanAndCount):
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).pow(2).sum(), len(batch[0])

class NoItems0(Base):
    def count(self, batch):
        return 0

class NoGradient(Base):
    def loss(self, model, batch):
        return batch[0].mean()

class OddMetric(Base):
    def metrics(self, model, batch):
        return {"words": "good"}

class OddMetrics(Base):
    def metrics(self, model, batch):
        return [1]

class HalfMetric(Base):
    def metrics(self, model, batch):
        return {"big": torch.tensor(60000.0, dtype=torch.float16)}

class OneSample(Base):
    def model(self):
        return nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    def datasets(self):
        return {"train": super().datasets()["train"][:9]}

class Raises(Base):
    def loss(self, model, batch):
        raise KeyError("a bug in the task")

class LossOnly:
    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

def build(width, spec):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, spec.num_classes))

def data(size=40):
    x = torch.randn(size, 1, 8, 8)
    return {"train": list(zip(x, (x.mean((1, 2, 3)) > 0).long())), "val": list(zip(x, (x.mean((1, 2, 3)) > 0).long()))}
"""


@pytest.fixture
def own(here: Path, monkeypatch: pytest.MonkeyPatch):
    (here / "own_tasks.py").write_text(TASKS)
    sys.modules.pop("own_tasks", None)

    def recipe(name: str, **fields):
        return {"task": f"own_tasks:{name}", "train": {"steps": 12, "global_batch": 8}, "optim": {"lr": 0.05}, **fields}

    return recipe


def test_a_task_of_ones_own_trains_and_reports_its_metrics(train_here, own):
    summary = train_here(own("Metrics"), overrides={"train.steps": 200})
    assert summary["status"] == "done"
    assert summary["metrics"].keys() == {"train_loss", "val_mae", "val_worst", "val_loss"}
    assert summary["metrics"]["val_loss"] < 0.01
    import own_tasks

    assert sum(own_tasks.SEEN) % 10 == 0 and set(own_tasks.SEEN) == {8, 2}, "every sample once an evaluation"


def test_metrics_are_weighted_by_what_they_count(train_here, own):
    """val_mae is a mean over 10 samples in batches of 8 and 2: not the mean of two means."""
    one = train_here(own("Metrics"), overrides={"evaluate.batch": 10})
    other = train_here(own("Metrics"), overrides={"evaluate.batch": 3})
    assert one["metrics"]["val_mae"] == pytest.approx(other["metrics"]["val_mae"], rel=1e-6)
    assert one["metrics"]["val_loss"] == pytest.approx(other["metrics"]["val_loss"], rel=1e-6)


def test_without_validation_data_there_is_no_evaluation(train_here, own):
    assert train_here(own("NoValidation"))["metrics"].keys() == {"train_loss"}


def test_a_loss_alone_goes_with_shipped_data_and_model(train_here, own):
    summary = train_here(own("LossOnly", data="digits", model={"name": "mlp", "hidden": [8]}))
    assert "val_loss" in summary["metrics"]


def test_own_model_and_own_data_go_with_a_shipped_task(train_here, own):
    model = {"name": "own_tasks:build", "args": {"width": 5}}
    summary = train_here({"task": "image_classification", "model": model, "data": "digits", "train": {"steps": 3}})
    assert "val_accuracy" in summary["metrics"]
    data = {"name": "own_tasks:data", "args": {"size": 16}}
    with pytest.raises(UserError):  # nothing says how many classes this data has
        train_here({"task": "image_classification", "model": "mlp", "data": data, "train": {"steps": 3}})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Empty", "data: the train dataset is empty"),
        ("NoTrain", "should return {'train': ..., 'val': ...}"),
        ("NoItems", "has no __len__"),
        ("WrongModel", r"model\(\) of own_tasks:WrongModel returned int"),
    ],
)
def test_a_task_that_is_wrong_is_told_before_anything_is_written(train_here, own, here, name, words):
    with pytest.raises(UserError, match=words):
        train_here(own(name))
    assert not (here / "runs").exists()


@pytest.mark.parametrize("field", ["early_stop.metric", "checkpoint.metric"])
def test_watching_a_metric_needs_validation_data(train_here, own, field):
    with pytest.raises(UserError, match="needs a validation dataset"):
        train_here(own("NoValidation"), overrides={field: "val_loss"})


def test_an_error_in_the_users_code_is_raised_as_it_is_and_written_down(train_here, own, here):
    with pytest.raises(KeyError, match="a bug in the task"):
        train_here(own("Raises"), run_dir="r")
    assert json.loads((here / "r" / "summary.json").read_text())["status"] == "failed"
    failed = next(event for event in read_events(here / "r") if event["event"] == "failed")
    assert failed["error"] == "KeyError" and failed["step"] == 0


def test_early_stopping_ends_the_run_and_says_so(train_here, own, here):
    fields = {"early_stop.patience": 2, "early_stop.min_delta": 1e9, "evaluate.every_steps": 2}
    summary = train_here(own("Metrics"), overrides=fields, run_dir="r")
    assert (summary["status"], summary["ended_by"], summary["step"]) == ("done", "early_stop", 6)
    assert any(event["event"] == "early_stop" for event in read_events(here / "r"))


def test_diverging_is_told_with_a_remedy_and_no_checkpoint_of_it_is_kept(train_here, own, here):
    with pytest.raises(DivergedError, match=r"train loss became (inf|nan) .* lower optim\.lr \(now 1e\+10\)"):
        train_here(own("Base"), overrides={"optim.name": "sgd", "optim.lr": 1e10, "train.steps": 100}, run_dir="r")
    assert not list((here / "r").glob("checkpoints/step-*"))


def test_accumulation_gives_the_same_losses_as_the_whole_batch(train_here, here):
    losses = {}
    for micro in (32, 8, 4):
        train_here(
            "synthetic_mlp",
            overrides=small("synthetic_mlp", here / "d", 12)
            | {"train.global_batch": 32, "train.micro_batch": micro, "evaluate.every_steps": 100},
            run_dir=f"r{micro}",
        )
        losses[micro] = [value for _, value in curves(here / f"r{micro}")["train_loss"]]
    assert losses[8] == pytest.approx(losses[32], rel=1e-5)
    assert losses[4] == pytest.approx(losses[32], rel=1e-5)


def test_reports_tell_the_mean_loss_since_the_last_one(train_here, here):
    fine = small("synthetic_mlp", here / "d", 12) | {"evaluate.every_steps": 100}
    train_here("synthetic_mlp", overrides=fine, run_dir="fine")
    train_here("synthetic_mlp", overrides=fine | {"observe.every_steps": 6}, run_dir="coarse")
    each = [value for _, value in curves(here / "fine")["train_loss"]]
    coarse = dict(curves(here / "coarse")["train_loss"])
    assert coarse[1] == pytest.approx(each[0])
    assert coarse[6] == pytest.approx(sum(each[1:6]) / 5, rel=1e-5)
    assert coarse[12] == pytest.approx(sum(each[6:]) / 6, rel=1e-5)


def test_the_short_last_batch_of_an_epoch_is_weighted_by_its_samples(train_here, here):
    """300 samples in batches of 128: 128, 128, 44. The window's loss is a mean over samples, not over batches."""
    base = small("synthetic_mlp", here / "d", 3) | {"train.global_batch": 128, "optim.lr": 1e-12, "data.samples": 300}
    train_here("synthetic_mlp", overrides=base | {"observe.every_steps": 1}, run_dir="r")
    train_here(
        "synthetic_mlp",
        overrides=base | {"observe.every_steps": 1, "train.global_batch": 300, "train.steps": 1},
        run_dir="w",
    )
    parts = [value for _, value in curves(here / "r")["train_loss"]]
    whole = curves(here / "w")["train_loss"][0][1]
    assert (parts[0] * 128 + parts[1] * 128 + parts[2] * 44) / 300 == pytest.approx(whole, rel=1e-5)


def test_checkpoints_are_kept_by_the_policy(train_here, here):
    fields = {"checkpoint.every_steps": 2, "checkpoint.keep_last": 1, "checkpoint.keep_best": 1}
    fields |= {"checkpoint.metric": "val_accuracy", "checkpoint.mode": "min", "evaluate.every_steps": 2}
    train_here("synthetic_mlp", overrides=small("synthetic_mlp", here / "d", 10) | fields, run_dir="r")
    accuracy = dict(curves(here / "r")["val_accuracy"])
    worst = min(accuracy, key=lambda step: (accuracy[step], step))
    kept = {int(path.name.removeprefix("step-")) for path in (here / "r" / "checkpoints").iterdir()}
    assert kept == {worst, 10}


def test_the_same_recipe_gives_the_same_weights_and_another_seed_others(train_here, here):
    fields = small("digits", here / "d", 6)
    first = train_here("digits", overrides=fields)["weights_sha256"]
    torch.rand(17)
    assert train_here("digits", overrides=fields)["weights_sha256"] == first
    assert train_here("digits", overrides=fields | {"train.seed": 1})["weights_sha256"] != first


def test_loader_workers_do_not_change_the_result(train_here, here):
    fields = small("imagenet", here / "d", 6)
    assert (
        train_here("imagenet", overrides=fields)["weights_sha256"]
        == train_here("imagenet", overrides=fields | {"data.workers": 2})["weights_sha256"]
    )


def test_rates_are_of_what_was_trained_since_the_start(here):
    """Tokens of steps before a stop are in the loss of the next report, and not in its rate."""
    fields = {"cluster.threads_per_worker": 1, "cluster.gpus_per_worker": 0}
    fields |= small("shakespeare", here / "d", 12) | {"observe.every_steps": 8}
    console = StopsAt(5)
    stopped = launch(prepare(["shakespeare"], fields, run_dir=here / "r"), Launch(console, console.stop))
    assert stopped["step"] == 5
    final = launch(prepare(resume=here / "r"), Launch(StopsAt(99)))
    reports = [record for record in read_metrics(here / "r") if "samples_per_s" in record["metrics"]]
    assert [record["step"] for record in reports][-2:] == [8, 12]
    for rates in (stopped, final, *(record["metrics"] for record in reports)):
        assert rates["tokens_per_s"] == pytest.approx(16 * rates["samples_per_s"], rel=0.01)


def test_seconds_add_up_and_rates_are_told(train_here, here):
    summary = train_here("shakespeare", overrides=small("shakespeare", here / "d", 8), run_dir="r")
    assert summary["tokens_per_s"] == pytest.approx(16 * summary["samples_per_s"], rel=0.01)
    assert 0 < summary["goodput"] < 1
    assert summary["time_to_first_step_s"] > 0
    records = read_metrics(here / "r")
    for phase in ("forward", "backward", "optimizer"):
        inside = sum(record["seconds"].get(phase, 0) for record in records)
        assert inside == pytest.approx(summary["seconds"][phase], rel=0.05, abs=2e-3)  # which it rounds
    assert summary["bottleneck"] in BOTTLENECKS and summary["verdict"].startswith(summary["bottleneck"])
    assert summary["ledger"]["worker_s"] == pytest.approx(sum(summary["seconds"].values()), rel=0.02, abs=0.05)
    assert summary["ledger"] == read_ledger(Path(summary["run_dir"])).to_record(), "the same to whoever asks later"


def test_a_price_turns_seconds_into_money(train_here, here):
    fields = small("digits", here / "d", 8) | {"cluster.price_per_hour": 3600.0}
    ledger = train_here("digits", overrides=fields, run_dir="r")["ledger"]
    assert ledger["cost"]["total"] == pytest.approx(ledger["worker_s"], rel=0.01, abs=0.01)
    assert ledger["cost"]["useful"] == pytest.approx(ledger["seconds"]["useful"], abs=0.01)


def test_steps_may_be_timed_as_a_whole(train_here, here):
    fields = small("digits", here / "d", 8) | {"observe.phases": False, "observe.workers_every_s": 0.001}
    summary = train_here("digits", overrides=fields, run_dir="r")
    assert "forward_backward" in summary["seconds"] and "forward" not in summary["seconds"]
    assert (here / "r" / "workers.jsonl").read_text() == ""


def test_deterministic_can_be_asked_for_on_a_cpu(train_here, here):
    summary = train_here("digits", overrides=small("digits", here / "d", 2) | {"train.deterministic": True})
    assert summary["status"] == "done" and not torch.are_deterministic_algorithms_enabled()


def test_a_second_process_is_refused_before_it_touches_a_checkpoint(train_here, here):
    """A corrupt checkpoint of a run that is being trained is that run's business."""
    from shoal.observe.run_folder import RunFolder

    train_here("digits", overrides=small("digits", here / "d", 4), run_dir="r")
    (here / "r" / "checkpoints" / "step-00000004" / "state.json").write_text("{}")
    before = sorted(path.name for path in (here / "r" / "checkpoints").iterdir())
    busy = RunFolder(here / "r")
    busy.lock()
    try:
        with pytest.raises(UserError, match="is being trained by another process"):
            train_here(resume="r", overrides={"train.steps": 9})
    finally:
        busy.close()
    assert sorted(path.name for path in (here / "r" / "checkpoints").iterdir()) == before


def test_a_disk_that_stays_full_fails_the_run_only_at_its_end_and_in_words(here, without_coverage):
    script = (
        "import resource, sys\n"
        "from shoal.cli.main import run\n"
        "import shoal.launch.local, shoal.data.digits\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
        "sys.exit(run(['train', 'digits', 'train.steps=400', 'observe.every_steps=1', 'cluster.threads_per_worker=1',\n"
        "              'evaluate.every_steps=1000', 'checkpoint.every_steps=1000', 'checkpoint.give_up_after_s=2',\n"
        "              '--run-dir', 'r', '--json']))\n"
    )
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, cwd=here, env=without_coverage, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "step 400 could not be saved (File too large); it is tried again" in result.stderr
    assert "error: the checkpoint of step 400 could not be written to r/checkpoints: File too large" in result.stderr
    assert "Traceback" not in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["status"] == "failed"


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_corrupt_image_ends_the_run_in_words_and_the_process_too(here, workers):
    from tests.fake_data import write_image_folder

    write_image_folder(here / "d", ("cat", "dog"), 8, 40)
    victim = next((here / "d" / "train" / "cat").iterdir())
    victim.write_bytes(victim.read_bytes()[:60])
    words = f"train imagenet data.dir=d data.size=32 data.workers={workers} model.width=4 train.global_batch=8 --json"
    command = [sys.executable, "-m", "shoal.cli.main", *words.split(), "train.precision=fp32", "--run-dir", "r"]
    result = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1, result.stderr
    assert victim.name in result.stderr and "Traceback" not in result.stderr
    assert json.loads((here / "r" / "summary.json").read_text())["status"] == "failed"


def test_other_data_on_resume_is_refused(train_here, here):
    train_here("imagenet", overrides=small("imagenet", here / "d", 4), run_dir="r")
    next((here / "d" / "train" / "cat").iterdir()).unlink()
    with pytest.raises(UserError, match=r"data: there are 35 training samples now and there were 36"):
        train_here(resume="r", overrides={"train.steps": 9})


def test_fields_that_may_not_change_are_compared_as_they_were_and_not_as_they_are_written(
    train_here, here, monkeypatch
):
    monkeypatch.setenv("SHOAL_TEST_BATCH", "16")
    fields = small("synthetic_mlp", here / "d", 4) | {"train.global_batch": "${env:SHOAL_TEST_BATCH}"}
    train_here("synthetic_mlp", overrides=fields, run_dir="r")
    monkeypatch.setenv("SHOAL_TEST_BATCH", "8")
    with pytest.raises(UserError, match=r"train\.global_batch: is not what it was when step 4 was saved"):
        train_here(resume="r", overrides={"train.steps": 9})


def test_datasets_of_a_task_can_be_read_by_worker_processes(train_here, own):
    alone = train_here(own("Base"))
    helped = train_here(own("Base", data={"workers": 1}))
    assert helped["weights_sha256"] == alone["weights_sha256"]


def test_sections_that_a_task_makes_idle_are_told_of(train_here, own, here):
    train_here(own("Base", data="digits", model="resnet18"), run_dir="r")
    warnings = [event["message"] for event in read_events(here / "r") if event["event"] == "warning"]
    assert [words.split(" is not used")[0] for words in warnings] == ["data: digits", "model: resnet18"]


@pytest.mark.parametrize("name", ["NoParameters", "Frozen"])
def test_a_model_that_cannot_learn_is_refused(train_here, own, here, name):
    with pytest.raises(UserError, match="model: has no parameter that trains"):
        train_here(own(name))
    assert not (here / "runs").exists()


def test_a_loader_process_that_is_killed_ends_the_run_in_words(train_here, own, here):
    with pytest.raises(RunError, match=r"a process that reads data died .* lower data\.workers"):
        train_here(own("Killed", data={"workers": 1}), run_dir="r")
    assert json.loads((here / "r" / "summary.json").read_text())["status"] == "failed"


def test_a_signal_during_the_last_evaluation_leaves_it_for_the_resumed_run(here):
    fields = small("synthetic_mlp", here / "d", 5) | {"evaluate.every_steps": 100}
    console = StopsAt(5)
    summary = launch(prepare(["synthetic_mlp"], fields, run_dir=here / "r"), Launch(console, console.stop))
    assert (summary["status"], summary["step"]) == ("interrupted", 5) and "val_loss" not in summary["metrics"]
    final = launch(prepare(resume=here / "r"), Launch(StopsAt(99)))
    assert final["status"] == "done" and "val_loss" in final["metrics"]


def test_a_signal_after_the_last_evaluation_does_not_make_a_finished_run_unfinished(here):
    class AfterTheEnd(StopsAt):
        def report(self, report):
            self.step = 99 if report.step == 5 and "val_loss" in report.metrics else 0

    console = AfterTheEnd(5)
    fields = small("synthetic_mlp", here / "d", 5)
    summary = launch(prepare(["synthetic_mlp"], fields, run_dir=here / "r"), Launch(console, console.stop))
    assert summary["status"] == "done"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Lazy", "model: has lazy modules"),
        ("ExtraState", r"model: _extra_state is extra state"),
        ("CountIsNumber", "count of CountIsNumber should be a method"),
    ],
)
def test_what_would_fail_at_the_first_save_fails_before_the_first_step(train_here, own, here, name, words):
    with pytest.raises(UserError, match=words):
        train_here(own(name))
    assert not (here / "runs").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MeanAndCount", r"task.loss returned a mean, but the task has count"),
        ("CountDiffers", "task.count says 80 items and task.loss counts 8"),
        ("NoItems0", "task.count found nothing to learn from"),
        ("NoGradient", "task.loss does not depend on a parameter that trains"),
        ("OddMetric", "task.metrics: words should be a number"),
        ("OddMetrics", "task.metrics returned list"),
        ("OneSample", "batch norm cannot train on a single sample"),
    ],
)
def test_what_comes_up_in_the_middle_is_told_in_words(train_here, own, name, words):
    with pytest.raises(RunError, match=words):
        train_here(own(name), overrides={"evaluate.every_steps": 2})


def test_half_precision_metrics_do_not_overflow(train_here, own):
    assert train_here(own("HalfMetric"), overrides={"evaluate.batch": 10})["metrics"]["val_big"] == 60000.0


def test_a_folder_that_another_run_took_meanwhile_is_left_alone(train_here, own, here):
    prepared = prepare([own("Base")], run_dir=here / "r")
    first = launch(prepare([own("Base")], {"train.seed": 7}, run_dir=here / "r"), Launch(StopsAt(99)))
    with pytest.raises(UserError, match="another run has started in"):
        launch(prepared, Launch(StopsAt(99)))
    assert json.loads((here / "r" / "summary.json").read_text())["weights_sha256"] == first["weights_sha256"]


def test_rates_are_right_after_an_evaluation(train_here, here):
    """Each report's rate covers the steps since the last report, whether or not an evaluation came in between."""
    fields = small("shakespeare", here / "d", 40) | {"observe.every_steps": 10, "evaluate.every_steps": 7}
    summary = train_here("shakespeare", overrides=fields, run_dir="r")
    rates = dict(curves(here / "r")["samples_per_s"])
    seconds = sum((1 if step == 1 else 9 if step == 10 else 10) * 8 / rate for step, rate in rates.items())
    assert 40 * 8 / seconds == pytest.approx(summary["samples_per_s"], rel=0.05)


def test_one_run_at_a_time_in_a_process(train_here, own, here):
    import threading

    class Second(StopsAt):
        error = None

        def tick(self, step):
            if step == 2:
                with pytest.raises(UserError, match="a run is going on in this process"):
                    launch(prepare([own("Base")], run_dir=here / "second"), Launch(StopsAt(99)))
                self.error = "refused"

    console = Second(99)
    thread = threading.Thread(target=launch, args=(prepare([own("Base")], run_dir=here / "first"), Launch(console)))
    thread.start()
    thread.join()
    assert console.error == "refused" and not (here / "second").exists()
    assert train_here(own("Base"))["status"] == "done", "and afterwards another may start"


def test_sizes_that_are_seldom_meant_are_told_of(train_here, own, here):
    train_here(own("Base"), overrides={"optim.warmup_steps": 50, "train.global_batch": 64}, run_dir="r")
    warnings = [event["message"] for event in read_events(here / "r") if event["event"] == "warning"]
    assert [words.split(":")[0] for words in warnings] == ["optim.warmup_steps", "train.global_batch"]


def test_a_resume_that_asks_for_less_than_is_done_is_refused_and_changes_nothing(here):
    fields = small("synthetic_mlp", here / "d", 20)
    console = StopsAt(13)
    launch(prepare(["synthetic_mlp"], fields, run_dir=here / "r"), Launch(console, console.stop))
    before = (here / "r" / "recipe.yaml").read_text()
    with pytest.raises(UserError, match=r"train: the run is at step 13 already, beyond the 5 steps asked for"):
        launch(prepare(overrides={"train.steps": 5}, resume=here / "r"), Launch(StopsAt(99)))
    assert (here / "r" / "recipe.yaml").read_text() == before
    exactly = launch(prepare(overrides={"train.steps": 13}, resume=here / "r"), Launch(StopsAt(99)))
    assert (exactly["status"], exactly["step"]) == ("done", 13) and "val_loss" in exactly["metrics"]


@pytest.mark.parametrize(("whole_every", "asked"), [(1, [0, 1, 2, 3, 4]), (4, [0, 4])])
def test_every_step_is_a_sign_of_life_also_where_workers_do_not_ask_each_other(
    whole_every: int, asked: list[int]
) -> None:
    state, alive, agreed = TrainState(), [], []
    unit = cast(TrainUnit, SimpleNamespace(whole_every=whole_every))
    stop = _stop(lambda: alive.append(state.step), lambda: agreed.append(state.step), unit, state)
    for state.step in range(5):
        stop()
    assert alive == [0, 1, 2, 3, 4] and agreed == asked
