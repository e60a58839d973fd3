"""`shoal plan` as it is typed: what it prints, and its exit status."""

import json
from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.parallel.sizes import PARTS
from tests.tiny import write_tiny

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
    assert second == "a step: 16 samples, fp32"
    assert header.split()[:7] == ["strategy", *PARTS, "total"]
    assert header.split()[7:] == ["in", "host", "micro-batch", "accumulation", "sent", "fits"]
    names = [" ".join(row.split("  ")[0].split()) for row in rows[:9]]
    assert names == [
        "ddp", "fsdp", "tensor x fsdp", "fsdp, offloaded", "zero-1", "zero-2", "zero-3", "pipeline", "tensor",
    ]  # fmt: skip
    assert all(row.endswith("yes") for row in rows[:9])
    assert rows[9].startswith("auto: ddp, because the whole model fits on every worker: ") and not err
    assert [path.name for path in here.iterdir()] == ["gpt.yaml"], "nothing is written"


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
    assert found["auto"]["why"].startswith("nothing fits into the 34 MiB that a worker can use")
    assert "pipeline (recipe)" in err and found["parameters"] > 0


def test_this_machines_memory_is_taken_where_none_is_given(here: Path, capfd: Capture) -> None:
    assert run(["plan", str(write_tiny(here)), "train.compile=true"]) == 0
    out, _ = capfd.readouterr()
    assert "1 worker on CPUs with " in out and "auto: single, because the whole model fits on one worker" in out
    assert out.splitlines()[-1].startswith("train.compile: figures are those without it")


@pytest.mark.parametrize(
    ("words", "message"),
    [
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
    assert "check" in err and "measured: most memory of a worker's own" in err


def test_a_check_of_a_run_that_fails_says_why(here: Path, capfd: Capture) -> None:
    (here / "breaks.py").write_text("def build():\n    return {'train': [(0, 0)] * 8, 'val': None}\n")
    file = write_tiny(here, data={"name": "breaks:build"}, model={"name": "mlp"})
    assert run(["plan", str(file)]) == 2
    assert "error: model.name: mlp needs images" in capfd.readouterr().err
