"""`shoal train --init-from`: a new run that begins with weights of another."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from shoal.cli.main import run
from shoal.core.weights import weights_sha256
from shoal.observe.runs import read_events
from tests.tiny import own_recipe, tiny_run, write_own_task, write_tiny

Capture = pytest.CaptureFixture[str]
STILL = ["optim.lr=1e-30", "train.steps=1"]
"""One step that changes nothing: what is evaluated after it is what the run began with."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny_run(folder / "base")
    return folder / "base"


@pytest.fixture
def base(trained: Path, here: Path) -> dict[str, Any]:
    """The summary of a run `runs/base`, of which `base.safetensors` is an export."""
    shutil.copytree(trained, "runs/base")
    assert run(["checkpoints", "export", "base", "-o", "base.safetensors"]) == 0
    write_tiny(here)
    summary: dict[str, Any] = json.loads(Path("runs/base/summary.json").read_text())
    return summary


def train(capfd: Capture, *arguments: str) -> tuple[dict[str, Any], str]:
    """The summary and what was shown on stderr."""
    capfd.readouterr()
    assert run(["train", *arguments, "--json"]) == 0, capfd.readouterr().err
    out, err = capfd.readouterr()
    return json.loads(out), err


@pytest.mark.parametrize("source", ["base.safetensors", "base", "runs/base", "runs/base/checkpoints/step-00000012"])
def test_a_run_begins_where_the_other_ended(base: dict[str, Any], capfd: Capture, source: str) -> None:
    summary, err = train(capfd, "tiny.yaml", "--init-from", source, "train.seed=5", "data.seed=0", *STILL)
    assert summary["weights_sha256"] == base["weights_sha256"]
    for name in ("val_loss", "val_accuracy"):
        assert summary["metrics"][name] == base["metrics"][name]
    assert summary["step"] == 1 and summary["resumed_from_step"] is None
    assert f"{Path.cwd()}" in err and ": 4 of 4 tensors\n" in err
    (event,) = (e for e in read_events(Path(summary["run_dir"])) if e["event"] == "initial_weights")
    assert (event["loaded"], event["missing"], event["unexpected"], event["misfits"]) == (4, 0, 0, 0)


def test_what_does_not_fit_is_shown(base: dict[str, Any], capfd: Capture) -> None:
    _, err = train(capfd, "tiny.yaml", "--init-from", "base.safetensors", "model.hidden=[8, 5]", *STILL)
    assert "base.safetensors: 2 of 6 tensors\n" in err
    assert "  2 not there, kept as initialised: layers.6.weight, layers.6.bias\n" in err
    assert "  2 different there, kept as initialised: layers.3.weight [3, 8] instead of [5, 8]" in err


def test_two_workers_begin_with_the_same(base: dict[str, Any], capfd: Capture) -> None:
    arguments = ("--workers", "2", "--launcher", "local", "--init-from", "base.safetensors", *STILL)
    summary, err = train(capfd, "tiny.yaml", *arguments)
    assert summary["weights_sha256"] == base["weights_sha256"] and summary["world_size"] == 2
    assert err.count(": 4 of 4 tensors\n") == 1


def test_the_recipe_says_where_the_weights_are_and_a_resume_does_without(base: dict[str, Any], capfd: Capture) -> None:
    arguments = ("tiny.yaml", "--init-from", "base.safetensors", "--run-dir", "runs/tuned", "train.steps=6")
    summary, _ = train(capfd, *arguments)
    recipe = Path("runs/tuned/recipe.yaml").read_text()
    assert f"init_from: {Path.cwd() / 'base.safetensors'}" in recipe
    whole, _ = train(capfd, *arguments[:3], "--run-dir", "runs/whole", "train.steps=9")
    Path("base.safetensors").unlink()
    resumed, err = train(capfd, "--resume", "runs/tuned", "train.steps=9")
    assert resumed["resumed_from_step"] == 6 and summary["step"] == 6 and "weights from" not in err
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    again, _ = train(capfd, "--resume", "runs/tuned", "train.steps=12", "train.init_from=null")
    assert again["resumed_from_step"] == 9


def test_a_run_that_died_before_its_first_checkpoint_begins_with_the_weights_again(
    here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"weight": torch.tensor([[3.0, -7.0]]), "bias": torch.tensor([11.0])}
    save_file(given, "given.safetensors")
    monkeypatch.syspath_prepend(here)
    write_own_task(here, "dies_early", "if step == 2 and os.environ.get('DIE'): raise RuntimeError('as asked')")
    Path("own.yaml").write_text(json.dumps(own_recipe("dies_early") | {"checkpoint": {"every_steps": 4}}))
    arguments = ["own.yaml", "--init-from", "given.safetensors", "--run-dir", "runs/own", "optim.lr=1e-30"]
    monkeypatch.setenv("DIE", "1")
    assert run(["train", *arguments]) == 1
    monkeypatch.delenv("DIE")
    assert not list(Path("runs/own").glob("checkpoints/step-*"))
    Path("given.safetensors").rename("away.safetensors")
    assert run(["train", "--resume", "runs/own"]) == 2
    assert "train.init_from: " in capfd.readouterr().err
    Path("away.safetensors").rename("given.safetensors")
    summary, err = train(capfd, "--resume", "runs/own")
    assert summary["step"] == 8 and "given.safetensors: 2 of 2 tensors" in err
    assert summary["weights_sha256"] == weights_sha256(given)


def test_one_that_only_the_store_has_is_a_checkpoint_to_go_on_from(
    base: dict[str, Any], here: Path, capfd: Capture
) -> None:
    upload = f"checkpoint.upload_to=file://{here}/store"
    arguments = ("--init-from", "base.safetensors", "--run-dir", "runs/tuned", "train.steps=6", upload)
    train(capfd, "tiny.yaml", *arguments)
    Path("base.safetensors").unlink()
    shutil.rmtree("runs/tuned/checkpoints")
    for name in ("events.jsonl", "summary.json"):
        Path("runs/tuned", name).unlink()
    resumed, err = train(capfd, "--resume", "runs/tuned", "train.steps=9")
    assert resumed["resumed_from_step"] == 6 and "weights from" not in err


def bad_names(here: Path) -> None:
    save_file({"other": torch.ones(3)}, "other.safetensors")


def a_pickle(here: Path) -> None:
    torch.save({"x": torch.ones(3)}, "model.pt")


def two_runs(here: Path) -> None:
    for name in ("twin-1", "twin-2"):
        shutil.copytree("runs/base", f"runs/{name}")


WRONG: list[tuple[str, str, Callable[[Path], None] | None]] = [
    ("tiny.yaml --init-from nope.safetensors", "--init-from: nope.safetensors is neither a file nor a folder", None),
    ("tiny.yaml --init-from twin", "2 begin so, give more of the name: twin-1, twin-2", two_runs),
    ("tiny.yaml train.init_from=nope.safetensors", "train.init_from: nope.safetensors is neither", None),
    ("tiny.yaml train.init_from=3", "train.init_from: should be text", None),
    ("tiny.yaml train.init_from=''", "train.init_from", None),
    ("tiny.yaml --init-from other.safetensors", "train.init_from: none of the 1 names in ", bad_names),
    ("tiny.yaml --init-from model.pt", "model.pt may be a pickle", a_pickle),
    ("tiny.yaml --init-from tiny.yaml", "tiny.yaml cannot be read", None),
    ("--resume base --init-from base.safetensors", "--init-from: a resumed run has its weights from its own", None),
]


@pytest.mark.parametrize(("arguments", "says", "prepare"), WRONG, ids=[arguments for arguments, _, _ in WRONG])
def test_wrong_input_is_told_before_anything_is_written(
    base: dict[str, Any], here: Path, capfd: Capture, arguments: str, says: str, prepare: Any
) -> None:
    if prepare is not None:
        prepare(here)
    before = sorted(here.rglob("*"))
    capfd.readouterr()
    assert run(["train", *arguments.split()]) == 2
    out, err = capfd.readouterr()
    assert says in err and "Traceback" not in err and out == ""
    assert sorted(here.rglob("*")) == before


def test_workers_elsewhere_may_see_what_is_not_here(here: Path, capfd: Capture) -> None:
    write_tiny(here)
    assert run(["train", "tiny.yaml", "--init-from", "there/x.safetensors", "--address", "1.2.3.4:5", "--dry-run"]) == 0
    assert f"init_from: {here}/there/x.safetensors\n" in capfd.readouterr().out


def test_a_path_may_hold_anything(base: dict[str, Any], here: Path, capfd: Capture) -> None:
    odd = "a: [b]#'é\" = {x}.safetensors"
    Path("base.safetensors").rename(odd)
    summary, _ = train(capfd, "tiny.yaml", "--init-from", odd, *STILL)
    assert summary["weights_sha256"] == base["weights_sha256"]
