"""`shoal plan` as it is typed: what it prints, and its exit status."""

import json
from pathlib import Path

import pytest
import torch

from shoal.cli.main import run
from shoal.parallel.sizes import PARTS
from shoal.train import forecast
from tests.tiny import own_recipe, write_own_task, write_tiny

Capture = pytest.CaptureFixture[str]
GPT = {
    "task": "language_modelling",
    "model": {"name": "gpt", "layers": 4, "heads": 4, "dim": 64},
    "data": {"name": "tokens", "dir": "nowhere", "context": 32, "vocab_size": 500},
    "train": {"steps": 1, "global_batch": 16},
}


def write_gpt(folder: Path) -> str:
    (folder / "gpt.yaml").write_text(json.dumps(GPT))
    return "gpt.yaml"


def test_a_table_of_strategies_and_what_auto_takes(here: Path, capfd: Capture) -> None:
    assert run(["plan", write_gpt(here), "--gpu-memory", "80GiB", "--workers", "4"]) == 0
    out, err = capfd.readouterr()
    first, second, header, *rows = out.splitlines()
    assert first.startswith("gpt: 234,") and "4 workers on GPUs with 80.00 GiB of memory each" in first
    assert second == "a step: 16 samples, bf16"
    assert header.split()[:7] == ["strategy", *PARTS, "total"]
    assert header.split()[7:] == ["in", "host", "micro-batch", "accumulation", "sent", "fits"]
    names = [" ".join(row.split("  ")[0].split()) for row in rows[:9]]
    assert names == [
        *("ddp", "fsdp", "tensor 2 x fsdp 2", "fsdp, offloaded", "zero-1", "zero-2", "zero-3"),
        *("pipeline 4, 1f1b", "tensor 4"),
    ]
    assert all(row.endswith("yes") for row in rows[:9])
    assert rows[9].startswith("auto: ddp, because the whole model fits on every worker: ") and not err
    assert [path.name for path in here.iterdir()] == ["gpt.yaml"], "nothing is written"


def test_more_in_the_hosts_memory_than_there_is_is_told(
    here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine with two GPUs, and hardly more memory than two workers take without a model."""
    monkeypatch.setattr(forecast, "memory_of_worker", lambda recipe, of_gpu=None: (80 << 30, True))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(forecast, "machine_memory", lambda: (4 << 30) + 1000)
    words = [write_gpt(here), "parallel.strategy=fsdp", "parallel.fsdp.cpu_offload=true", "--json"]
    assert run(["plan", *words, "--workers", "4"]) == 0
    out, err = capfd.readouterr()
    note = next(note for note in json.loads(out)["notes"] if note.startswith("in host"))
    assert note in err.splitlines() and note.endswith("and this machine has 4.00 GiB")
    assert "fsdp, offloaded keeps 1.9 MiB" in note and "beside the 2.00 GiB that a worker takes" in note
    assert run(["plan", *words, "--workers", "2", "--check"]) == 2
    assert "error: --check: fsdp, offloaded keeps " in capfd.readouterr().err
    monkeypatch.setattr(forecast, "machine_memory", lambda: 5 << 30)
    assert run(["plan", *words, "--workers", "4"]) == 0, "two of them are here"
    assert "in host:" not in capfd.readouterr().err


def test_with_json_the_last_line_on_stdout_is_all_of_it(here: Path, capfd: Capture) -> None:
    words = [write_gpt(here), "--gpu-memory", "40MB", "--workers", "2", "train.precision=bf16", "--json"]
    assert run(["plan", *words, "parallel.strategy=pipeline"]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert found["device"] == "gpu" and found["device_memory_bytes"] == 40 * 10**6 and found["workers"] == 2
    own = found["strategies"][0]
    assert own["name"] == "pipeline" and own["is_own"] and own["accumulation"] * own["micro_batch"] == 16
    assert own["fits"] is False, "what kernels keep is more"
    assert found["usable_bytes"] == 36 * 10**6 and found["auto"]["fits"] is False
    assert found["auto"]["micro_batch"] == 1 and found["auto"]["parallel"]["strategy"] == "fsdp"
    assert found["auto"]["why"].startswith("nothing fits into the 34 MiB that a worker can use")
    assert "pipeline 2, 1f1b (recipe)" in err and found["parameters"] > 0


def test_this_machines_memory_is_taken_where_none_is_given(here: Path, capfd: Capture) -> None:
    assert run(["plan", str(write_tiny(here)), "train.compile=true"]) == 0
    out, _ = capfd.readouterr()
    assert "1 worker on CPUs with " in out and "auto: single, because the whole model fits on one worker" in out
    assert out.splitlines()[-1].startswith("train.compile: figures are those without it")


def test_a_part_of_a_gpu_is_planned_for(here: Path, capfd: Capture) -> None:
    assert run(["plan", write_gpt(here), "--gpu-memory", "80GiB", "cluster.gpu_memory_fraction=0.25"]) == 0
    assert "1 worker on GPUs with 20.00 GiB of memory each" in capfd.readouterr().out


def test_a_model_of_ones_own_without_blocks_is_planned_and_what_auto_does_with_it_is_told(
    here: Path, capfd: Capture
) -> None:
    write_own_task(here, "task_to_plan")
    (here / "own.yaml").write_text(json.dumps(own_recipe("task_to_plan")))
    assert run(["plan", "own.yaml", "--workers", "4", "--gpu-memory", "8GB"]) == 0
    out, _ = capfd.readouterr()
    assert "pipeline 4, 1f1b: not possible: parallel.strategy: pipeline needs a model that says how it is cut" in out
    unseen = "auto: ddp, because a run does not look at a model of your own before it builds it"
    assert f"{unseen}; the whole model fits on every worker: " in out and "better:" not in out
    assert run(["plan", "own.yaml", "--workers", "4", "--gpu-memory", "8GB", "parallel.strategy=fsdp"]) == 0
    assert unseen not in capfd.readouterr().out
    assert run(["plan", "own.yaml", "--workers", "4", "--gpu-memory", "64MiB"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert unseen in lines
    assert any(line.startswith("better: parallel.strategy=fsdp") and "because nothing fits" in line for line in lines)


def test_what_auto_takes_can_be_written_into_a_recipe(here: Path, capfd: Capture) -> None:
    words = [write_gpt(here), "--workers", "4", "--gpu-memory", "66MiB", "--json"]
    assert run(["plan", *words]) == 0
    out, err = capfd.readouterr()
    found = json.loads(out.splitlines()[-1])["auto"]
    assert found["name"] != "ddp"
    start = "the same in words of a recipe: "
    (written,) = (line.removeprefix(start) for line in err.splitlines() if line.startswith(start))
    assert run(["plan", *words, *written.split()]) == 0
    again = json.loads(capfd.readouterr().out.splitlines()[-1])
    (own,) = (row for row in again["strategies"] if row["is_own"])
    assert own["parallel"] == found["parallel"] and own["micro_batch"] == found["micro_batch"]


def test_workers_that_come_and_go_are_planned_for_when_all_are_there(here: Path, capfd: Capture) -> None:
    assert run(["plan", write_gpt(here), "--workers", "2:4", "--gpu-memory", "8GB"]) == 0
    assert (
        capfd.readouterr()
        .out.splitlines()[-1]
        .startswith("cluster.min_workers: figures are for 4 workers; with 2 each holds more")
    )


def test_what_auto_cannot_take_is_told_beside_what_the_recipe_asks_for(here: Path, capfd: Capture) -> None:
    words = ["--workers", "3", "--gpu-memory", "8GB", "parallel.strategy=pipeline"]
    assert run(["plan", write_gpt(here), *words]) == 0
    out, _ = capfd.readouterr()
    assert "pipeline 3, 1f1b (recipe)" in out and out.splitlines()[-1].startswith(
        "auto: not possible: train.global_batch: 16"
    )


def test_a_check_of_what_does_not_fit_here_starts_nothing(
    here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "machine_memory", lambda: 1000)
    assert run(["plan", str(write_tiny(here)), "--check"]) == 2
    assert (
        "error: --check: single does not fit on this machine, where a worker can use 0.0 MiB" in capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory", "9" * 400 + "GiB"], "--gpu-memory: '9999999999999999999999999999999999999999...' is not a"),
        (
            ["--workers", "4096", "--check", "train.global_batch=4096"],
            "--check: takes steps here, and 4096 workers are more than",
        ),
        (["--gpu-memory", "lots"], "--gpu-memory: 'lots' is not a size; give one such as 80GiB, 24GB or 512MiB"),
        (["--gpu-memory", "80"], "--gpu-memory: '80' is not a size"),
        (["--gpu-memory", "8GB", "--workers", "3"], "train.global_batch: 16 is not divisible by cluster.workers 3"),
        (["--workers", "none"], "--workers: 'none' should be a whole number above 0"),
        (["--gpu-memory", "8GB", "data.name=text", "data.download=false"], "data."),
    ],
)
def test_wrong_input_is_refused(words: list[str], message: str, here: Path, capfd: Capture) -> None:
    assert run(["plan", write_gpt(here), *words]) == 2
    out, err = capfd.readouterr()
    assert not out and f"error: {message}" in err and "Traceback" not in err


def test_a_check_puts_measured_beside_predicted(here: Path, capfd: Capture) -> None:
    assert run(["plan", str(write_tiny(here)), "--check", "--json"]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    check = json.loads(line)["check"]
    assert check["agrees"] and check["strategy"] == "single" and set(check["parts"]) == {
        "weights", "optimizer", "all else", "peak",
    }  # fmt: skip
    weights = check["parts"]["weights"]
    assert weights["predicted_bytes"] == weights["measured_bytes"] == 4 * (16 * 8 + 8 + 8 * 3 + 3)
    assert "check: a few steps of single on this machine's CPU\n" in err
    assert "measured: most memory of a worker's own" in err
    assert err.splitlines()[-1] == "check: as foreseen, within 10%, or 16 MiB where that is more"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_check_on_the_cpu_says_so_beside_figures_for_gpus(here: Path, capfd: Capture) -> None:
    assert run(["plan", str(write_tiny(here)), "--gpu-memory", "80GiB", "--check"]) == 0
    assert "on this machine's CPU; what stands above is for GPUs\n" in capfd.readouterr().err


def test_a_check_of_a_run_that_fails_says_why(here: Path, capfd: Capture) -> None:
    (here / "breaks.py").write_text("def build():\n    return {'train': [(0, 0)] * 8, 'val': None}\n")
    file = write_tiny(here, data={"name": "breaks:build"}, model={"name": "mlp"})
    assert run(["plan", str(file)]) == 2
    assert "error: model.name: mlp needs images" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_check_on_a_gpu_needs_one_here(here: Path, capfd: Capture) -> None:
    assert run(["plan", write_gpt(here), "--gpu", "--gpu-memory", "80GiB", "--check"]) == 2
    assert "error: --check: takes steps here, and there is no GPU here; leave it out" in capfd.readouterr().err
