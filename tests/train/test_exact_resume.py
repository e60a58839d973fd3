"""Stopped after any step and resumed, a run ends with the very weights, metrics and reports of one never stopped."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.runs import read_events, read_metrics
from tests.small_recipes import NAMES, small

STEPS = 24
HARD: dict[str, dict[str, Any]] = {
    # What makes a resume hard, spread over the recipes so that each thing is met by several.
    "digits": {"train.micro_batch": 16, "optim.schedule": "linear", "train.clip_norm": 0.5},
    "mnist": {"train.precision": "fp16", "data.augment": True, "train.clip_norm": 1.0},
    "fashion_mnist": {"train.precision": "bf16", "train.micro_batch": 8, "data.workers": 1},
    "cifar10": {"train.micro_batch": 8},
    "cifar10_vit": {"train.activation_checkpointing": True, "train.precision": "fp16"},
    "imagenet": {"data.workers": 2, "train.micro_batch": 4, "train.activation_checkpointing": True},
    "agnews": {"train.micro_batch": 8, "task.label_smoothing": 0.1, "train.precision": "bf16"},
    "shakespeare": {"model.dropout": 0.2, "train.precision": "fp16", "train.micro_batch": 4},
    "gpt2": {"model.dropout": 0.1, "optim.schedule": "step", "optim.step_every": 7},
    "synthetic_mlp": {"model.dropout": 0.3, "optim.name": "sgd", "optim.momentum": 0.9, "train.micro_batch": 4},
}


class StopsAt(SilentConsole):
    """An interruption after a given step."""

    def __init__(self, step: int) -> None:
        self.at = step
        self.step = 0

    def tick(self, step: int) -> None:
        self.step = step

    def stop(self) -> str | None:
        return "SIGTERM" if self.step >= self.at else None


def run(
    overrides: dict[str, Any], name: str, run_dir: Path, stop_at: int | None = None, pause_at: float | None = None
) -> dict[str, Any]:
    prepared = prepare(resume=run_dir) if run_dir.exists() else prepare([name], overrides, run_dir=run_dir)
    console = StopsAt(stop_at if stop_at is not None else 10**9)
    return launch(prepared, Launch(console, console.stop, pause_at=pause_at))


def comparable(run_dir: Path) -> list[dict[str, Any]]:
    """The reports of a run, without what time decides."""
    reports = []
    for record in read_metrics(run_dir):
        metrics = {name: value for name, value in record["metrics"].items() if not name.endswith("_per_s")}
        reports.append({"step": record["step"], "epoch": record["epoch"], "metrics": metrics})
    return reports


SLOW = {"fashion_mnist": pytest.mark.slow, "imagenet": pytest.mark.slow}
"""Their models are those of mnist and cifar10, or nearly."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in NAMES])
def test_resumed_is_the_same_as_never_stopped(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.mktemp(name)
    single = {"cluster.threads_per_worker": 1, "cluster.gpus_per_worker": 0}
    overrides = small(name, base / "data", STEPS) | HARD[name] | single
    reference = run(overrides, name, base / "whole")
    assert reference["status"] == "done" and reference["step"] == STEPS

    # Drawn anew in every run of the tests; a failure prints the stops to repeat.
    @settings(max_examples=3, suppress_health_check=list(HealthCheck))
    @given(stops=st.lists(st.integers(1, STEPS - 1), min_size=1, max_size=3, unique=True).map(sorted))
    def resumes_exactly(stops: list[int]) -> None:
        folder = base / "stopped"
        shutil.rmtree(folder, ignore_errors=True)
        for stop in stops:
            interrupted = run(overrides, name, folder, stop)
            assert interrupted["status"] == "interrupted" and interrupted["step"] == stop
        final = run(overrides, name, folder)
        assert final["resumed_from_step"] == stops[-1]
        assert final["weights_sha256"] == reference["weights_sha256"]
        assert final["metrics"] == reference["metrics"]
        assert comparable(folder) == comparable(base / "whole")

    resumes_exactly()


@pytest.mark.parametrize(
    ("fields", "pauses", "steps"),
    [({}, [5, 6, 13], [5, 6, 13]), ({"train.steps": None, "train.epochs": 3}, [0.5, 1, 2.2], [4, 7, 16])],
    ids=["steps", "epochs"],
)
def test_a_run_that_pauses_is_evaluated_saved_and_ends_as_if_it_had_not(
    here: Path, fields: dict[str, Any], pauses: list[float], steps: list[int]
) -> None:
    overrides = small("synthetic_mlp", here / "data", 20) | HARD["synthetic_mlp"] | {"optim.schedule": "cosine"}
    overrides |= {"data.samples": 56, "train.global_batch": 8, "evaluate.every_steps": 9, "checkpoint.every_steps": 50}
    overrides |= {"cluster.threads_per_worker": 1, "cluster.gpus_per_worker": 0} | fields
    reference = run(overrides, "synthetic_mlp", here / "whole")
    for pause_at, step in zip(pauses, steps, strict=True):
        paused = run(overrides, "synthetic_mlp", here / "paused", pause_at=pause_at)
        assert (paused["status"], paused["ended_by"], paused["step"]) == ("interrupted", "pause", step)
        evaluated = [record["step"] for record in read_metrics(here / "paused") if "val_loss" in record["metrics"]]
        assert evaluated[-1] == step and "val_loss" in paused["metrics"]
        assert max(path.name for path in (here / "paused" / "checkpoints").iterdir()) == f"step-{step:08d}"
        # There already, or further: it ends at once, where it is.
        again = run(overrides, "synthetic_mlp", here / "paused", pause_at=min(pauses))
        assert (again["status"], again["ended_by"], again["step"]) == ("interrupted", "pause", step)
    final = run(overrides, "synthetic_mlp", here / "paused", pause_at=99)  # beyond the end, which is no pause
    assert (final["status"], final["ended_by"], final["resumed_from_step"]) == ("done", "done", steps[-1])
    assert final["weights_sha256"] == reference["weights_sha256"]
    assert final["metrics"] == reference["metrics"]
    others = [record for record in comparable(here / "paused") if record["step"] not in steps]
    assert others == [record for record in comparable(here / "whole") if record["step"] not in steps]


def test_an_interruption_in_the_middle_of_an_evaluation_repeats_it(here: Path) -> None:
    overrides = small("synthetic_mlp", here / "data", 10) | {"evaluate.batch": 5, "evaluate.every_steps": 4}
    overrides |= {"checkpoint.keep_best": 1, "checkpoint.metric": "val_loss", "checkpoint.every_steps": 100}
    reference = run(overrides, "synthetic_mlp", here / "whole")

    class StopsInEvaluation(StopsAt):
        asked = 0

        def stop(self) -> str | None:
            self.asked += self.step == 4
            return "SIGINT" if self.asked > 3 else None  # a few batches into the evaluation after step 4

    prepared = prepare(["synthetic_mlp"], overrides, run_dir=here / "stopped")
    console = StopsInEvaluation(4)
    interrupted = launch(prepared, Launch(console, console.stop))
    assert interrupted["step"] == 4 and "val_loss" not in interrupted["metrics"]
    final = run(overrides, "synthetic_mlp", here / "stopped")
    assert final["weights_sha256"] == reference["weights_sha256"]
    assert comparable(here / "stopped") == comparable(here / "whole")


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint_and_loses_nothing(here: Path) -> None:
    overrides = small("digits", here / "data", 20)
    reference = run(overrides, "digits", here / "whole")

    class Dies(SilentConsole):
        def tick(self, step: int) -> None:
            if step == 14:
                raise SystemExit("as if killed")

    with pytest.raises(SystemExit):
        launch(prepare(["digits"], overrides, run_dir=here / "killed"), Launch(Dies()))
    final = run(overrides, "digits", here / "killed")
    assert final["resumed_from_step"] == 9
    assert final["weights_sha256"] == reference["weights_sha256"]
    assert comparable(here / "killed") == comparable(here / "whole")
    events = [event["event"] for event in read_events(here / "killed")]
    assert events.count("start") == 2 and "failed" in events and "resume" in events


def test_a_corrupt_newest_checkpoint_is_set_aside_and_the_one_before_used(here: Path) -> None:
    overrides = small("digits", here / "data", 20)
    reference = run(overrides, "digits", here / "whole")
    run(overrides, "digits", here / "broken", stop_at=13)
    newest = here / "broken" / "checkpoints" / "step-00000013" / "shard-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    final = run(overrides, "digits", here / "broken")
    assert final["resumed_from_step"] == 9
    assert final["weights_sha256"] == reference["weights_sha256"]
    rejected = [event for event in read_events(here / "broken") if event["event"] == "checkpoint_rejected"]
    assert rejected[0]["step"] == 13 and "hash" in rejected[0]["reason"]
    assert Path(rejected[0]["path"]).is_dir()


def test_resuming_costs_the_same_at_any_step(here: Path) -> None:
    """Nothing of the epoch is read again: a dataset that counts its reads sees the remaining steps alone."""
    (here / "counting.py").write_text(
        "import torch\n"
        "READS = []\n"
        "class Data(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 100_000\n"
        "    def __getitem__(self, i):\n"
        "        READS.append(i)\n"
        "        return torch.tensor([float(i % 7)]), torch.tensor([float(i % 3)])\n"
        "class Task:\n"
        "    def model(self): return torch.nn.Linear(1, 1)\n"
        "    def datasets(self): return {'train': Data()}\n"
        "    def loss(self, model, batch): return (model(batch[0]) - batch[1]).pow(2).mean()\n"
    )
    recipe = {"task": "counting:Task", "train": {"steps": 12_000, "global_batch": 8}, "optim": {"lr": 1e-3}}
    console = StopsAt(1)
    launch(prepare([recipe], {"checkpoint.every_steps": 100_000}, run_dir=here / "run"), Launch(console, console.stop))
    import counting  # type: ignore[import-not-found]

    state = here / "run" / "checkpoints" / "step-00000001"
    _pretend_step(state, 11_990)
    counting.READS.clear()
    final = run({}, "", here / "run")
    assert final["resumed_from_step"] == 11_990 and final["step"] == 12_000
    assert len(counting.READS) == 80, "ten steps of eight samples were left, and no more may be read"


def _pretend_step(checkpoint: Path, step: int) -> None:
    """Rewrite a checkpoint as if it were of a later step, with a manifest that fits."""
    import json
    from dataclasses import replace

    from shoal.checkpoint.folder import read_info
    from shoal.checkpoint.shard import write_file

    manifest = read_info(checkpoint).manifest
    values = json.loads((checkpoint / "state.json").read_text())
    values["train"]["step"] = values["train"]["reported_step"] = step
    (checkpoint / "state.json").unlink()
    facts = write_file(checkpoint / "state.json", [json.dumps(values).encode()], lambda: True)
    manifest = replace(manifest, step=step, files={**manifest.files, "state.json": facts})
    (checkpoint / "manifest.json").write_bytes(manifest.to_bytes())
    checkpoint.rename(checkpoint.with_name(f"step-{step:08d}"))


ZOO = """
import torch
from torch import nn

class Base:
    def datasets(self):
        g = torch.Generator().manual_seed(0)
        x = torch.randn(50, 3, 6, 6, generator=g)
        return {"train": list(zip(x, x.mean((1, 2, 3)).unsqueeze(1))), "val": list(zip(x[:10], x[:10, 0, 0, :1]))}
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).pow(2).mean()

class ChannelsLast(Base):
    def model(self):
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 1))
        return net.to(memory_format=torch.channels_last)

class Transposed(Base):
    def model(self):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 108).t() / 10)
                self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
                self.register_buffer("view", self.mask[:2])
            def forward(self, x):
                return (x.flatten(1) @ self.weight).sum(1, keepdim=True)
        return Net()

class FrozenNorm(Base):
    def model(self):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 1))
        net[1].eval()
        return net

class StartsInEvaluation(FrozenNorm):
    def model(self):
        return super().model().eval()

class RandomCollate(Base):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(108, 1))
    def datasets(self):
        class Items(list):
            def collate(self, items):
                batch = torch.utils.data.default_collate(items)
                return batch[0] + 0.1 * torch.randn_like(batch[0]), batch[1]
        parts = super().datasets()
        return {"train": Items(parts["train"]), "val": parts["val"]}
"""


@pytest.mark.parametrize("optim", ["adam", "sgd"])
@pytest.mark.parametrize(
    "name",
    [
        *("ChannelsLast", "Transposed", "FrozenNorm", "StartsInEvaluation"),
        pytest.param("RandomCollate", marks=pytest.mark.slow),
    ],
)
def test_models_and_datasets_of_every_kind_resume_exactly(name: str, optim: str, here: Path) -> None:
    import sys

    (here / "zoo.py").write_text(ZOO)
    sys.modules.pop("zoo", None)
    recipe = {
        "task": f"zoo:{name}",
        "data": {"workers": 1 if name == "RandomCollate" else 0},
        "train": {"steps": 14, "global_batch": 8},
        "optim": {"name": optim, "lr": 0.02} | ({"momentum": 0.9} if optim == "sgd" else {}),
        "evaluate": {"every_steps": 3},
        "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
    }
    whole = launch(prepare([recipe], run_dir=here / "whole"), Launch(SilentConsole()))
    console = StopsAt(7)
    launch(prepare([recipe], run_dir=here / "stopped"), Launch(console, console.stop))
    final = run({}, "", here / "stopped")
    assert final["resumed_from_step"] == 7
    assert final["weights_sha256"] == whole["weights_sha256"]
    assert final["metrics"] == whole["metrics"]
    without = {**recipe, "evaluate": {"every_steps": 100}}
    fewer = launch(prepare([without], run_dir=here / "fewer"), Launch(SilentConsole()))
    assert fewer["weights_sha256"] == whole["weights_sha256"], "evaluating must not change what is learned"


def test_a_kill_while_a_step_is_saved_again_loses_nothing(here: Path) -> None:
    """A step whose evaluation came after its checkpoint is saved once more; a kill in between keeps the first."""
    from shoal.checkpoint.folder import clear_leftovers, list_checkpoints

    overrides = small("digits", here / "data", 20)
    run(overrides, "digits", here / "r", stop_at=13)
    folder = here / "r" / "checkpoints"
    (folder / "step-00000013").rename(folder / ".replaced-step-00000013")  # as it stands between the two renames
    shutil.copytree(folder / ".replaced-step-00000013", folder / ".writing-step-00000013-1")
    clear_leftovers(folder)
    assert [info.step for info in list_checkpoints(folder)][-1] == 13
    assert run(overrides, "digits", here / "r")["resumed_from_step"] == 13


def test_without_a_readable_checkpoint_nothing_is_thrown_away(here: Path) -> None:
    from shoal.core.errors import UserError

    overrides = small("digits", here / "data", 20)
    run(overrides, "digits", here / "r", stop_at=13)
    metrics = (here / "r" / "metrics.jsonl").read_text()
    folder = here / "r" / "checkpoints"
    for path in folder.glob("step-*/state.json"):
        path.write_text("{}")
    names = sorted(path.name for path in folder.iterdir())
    with pytest.raises(UserError, match=r"--resume: none of the checkpoints in .* can be read"):
        run(overrides, "digits", here / "r")
    assert sorted(path.name for path in folder.iterdir()) == names
    shutil.rmtree(folder)
    with pytest.raises(UserError, match=r"--resume: the checkpoints that this run had are gone"):
        run(overrides, "digits", here / "r")
    assert (here / "r" / "metrics.jsonl").read_text() == metrics
