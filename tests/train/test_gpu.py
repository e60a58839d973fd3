"""The promises that need a GPU to be seen; skipped where there is none."""

import gc
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.bench.plan_check import compare
from shoal.core.errors import RunError, UserError
from shoal.launch.api import train
from shoal.observe.ledger import read_ledger
from shoal.observe.runs import curves, read_events, read_metrics, read_workers
from shoal.parallel.host_sums import HostSums
from shoal.recipe.load import load_recipe
from shoal.train.forecast import forecast, memory_of_worker
from tests.bench.test_plan_check import GPT, write_tokens
from tests.small_recipes import NAMES, small
from tests.train.test_exact_resume import HARD, comparable, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", NAMES)
def test_resumed_is_the_same_as_never_stopped(name: str, here: Path) -> None:
    if name == "digits" and not _has_sklearn():
        pytest.skip("needs scikit-learn")
    own = {"cluster.gpus_per_worker": 1, "train.deterministic": True}
    overrides = small(name, here / "data", 16) | HARD[name] | own
    reference = run(overrides, name, here / "whole")
    assert run(overrides, name, here / "stopped", stop_at=5)["status"] == "interrupted"
    final = run(overrides, name, here / "stopped")
    assert final["resumed_from_step"] == 5
    assert final["weights_sha256"] == reference["weights_sha256"]
    assert comparable(here / "stopped") == comparable(here / "whole")


def _has_sklearn() -> bool:
    try:
        import sklearn  # noqa: F401
    except ImportError:
        return False
    return True


def test_cpu_and_gpu_give_nearly_the_same_losses(here: Path) -> None:
    losses = []
    for gpus in (0, 1):
        fields = small("shakespeare", here / "data", 10) | {"cluster.gpus_per_worker": gpus}
        run(fields, "shakespeare", here / f"run{gpus}")
        losses.append([value for _, value in curves(here / f"run{gpus}")["train_loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


def test_a_gpu_is_taken_by_default_and_named(here: Path) -> None:
    run(small("synthetic_mlp", here / "data", 2), "synthetic_mlp", here / "run")
    (worker,) = next(event for event in read_events(here / "run") if event["event"] == "workers")["workers"]
    assert worker["device"] == "cuda:0" and worker["device_name"] == torch.cuda.get_device_name()


def test_out_of_memory_is_told_with_a_remedy(here: Path) -> None:
    fields = small("synthetic_mlp", here / "data", 2) | {"model.hidden": [60_000], "cluster.gpu_memory_fraction": 0.001}
    gc.collect()
    torch.cuda.empty_cache()  # what tests before this one have left would do
    with pytest.raises(RunError, match=r"out of memory .* train\.micro_batch below 16"):
        run(fields, "synthetic_mlp", here / "run")


def test_allocator_settings_are_taken_or_refused(here: Path) -> None:
    script = (
        "import sys; from shoal.launch.api import train\n"
        "overrides = {'train.steps': 2, 'data.samples': 100, 'cluster.gpu_allocator': sys.argv[1]}\n"
        "train('synthetic_mlp', overrides, progress='silent')\n"
    )
    good = [sys.executable, "-c", script, "expandable_segments:True,max_split_size_mb:256"]
    subprocess.run(good, cwd=here, check=True)
    with pytest.raises(UserError, match=r"cluster\.gpu_allocator: PyTorch refuses"):
        run({"cluster.gpu_allocator": "no_such_setting:1", "train.steps": 1}, "synthetic_mlp", here / "bad")


def test_compiled_trains_to_nearly_the_same_losses(here: Path) -> None:
    losses = []
    for compiled in (False, True):
        fields = small("gpt2", here / "data", 8) | {"train.compile": compiled, "train.precision": "bf16"}
        run(fields, "gpt2", here / f"run{compiled}")
        losses.append([value for _, value in curves(here / f"run{compiled}")["train_loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.parametrize("fsdp", [{}, {"cpu_offload": True}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fsdp_on_one_gpu_trains_what_single_trains(here: Path, precision: str, fsdp: dict[str, bool]) -> None:
    losses = []
    for parallel in ({"strategy": "single"}, {"strategy": "fsdp", "fsdp": fsdp}):
        fields = small("shakespeare", here / "data", 10) | {"train.precision": precision, "train.clip_norm": 1.0}
        fields |= {"parallel": parallel, "cluster.gpus_per_worker": 1, "train.activation_checkpointing": True}
        fields |= {"train.micro_batch": 2}  # four of a step
        run(fields, "shakespeare", here / parallel["strategy"])
        losses.append([value for _, value in curves(here / parallel["strategy"])["train_loss"]])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5 if precision == "fp32" else 5e-3)


def test_fsdp_resumed_on_a_gpu_is_the_same_as_never_stopped(here: Path) -> None:
    own = {"cluster.gpus_per_worker": 1, "train.deterministic": True, "parallel": {"strategy": "fsdp"}}
    overrides = small("shakespeare", here / "data", 16) | HARD["shakespeare"] | own
    reference = run(overrides, "shakespeare", here / "whole")
    assert run(overrides, "shakespeare", here / "stopped", stop_at=5)["status"] == "interrupted"
    assert run(overrides, "shakespeare", here / "stopped")["weights_sha256"] == reference["weights_sha256"]


def test_what_is_offloaded_was_foreseen_on_both_sides(here: Path) -> None:
    model = {"name": "gpt", "layers": 12, "heads": 8, "dim": 1024}
    write_tokens(here, 8000)
    in_host = []
    for micro_batch in (2, 8):
        fields = {"model": model, "train.micro_batch": micro_batch, "cluster.gpus_per_worker": 1}
        loaded = load_recipe([GPT], fields | {"parallel.strategy": "fsdp", "parallel.fsdp.cpu_offload": True})
        found = compare(loaded, forecast(loaded.recipe, *memory_of_worker(loaded.recipe)).own)
        assert found["agrees"], found["parts"]
        assert found["parts"]["weights"]["measured_bytes"] == found["parts"]["optimizer"]["measured_bytes"] == 0
        in_host.append(found["parts"]["in host"]["measured_bytes"])
    of_several, of_one = in_host
    assert of_one > 16 * 150e6, "of each weight: itself, gradient and two moments"
    assert of_several - of_one > 4 * 150e6, "gradients of a micro-batch beside the sum of those before"


def test_offloaded_gradients_of_a_gpu_are_put_aside_and_add_up_to_the_same(here: Path) -> None:
    fields = small("shakespeare", here / "data", 4) | {"train.micro_batch": 2, "cluster.gpus_per_worker": 1}
    fields |= {"parallel": {"strategy": "fsdp", "fsdp": {"cpu_offload": True}}, "train.deterministic": True}
    hashes = [run(fields, "shakespeare", here / "own")["weights_sha256"]]
    with pytest.MonkeyPatch.context() as patch:
        times: list[int] = []
        patch.setattr(HostSums, "_put_aside", lambda sums: times.append(len(sums._parameters)))
        hashes.append(run(fields, "shakespeare", here / "of_fsdp")["weights_sha256"])
        assert times and min(times) > 0
    assert hashes[0] == hashes[1], "FSDP2 adds them up where nobody takes them away"


def test_the_largest_micro_batch_that_fits_is_found(here: Path) -> None:
    """In so little memory that a whole step does not fit; what is foreseen is tried, and kept to afterwards."""
    fields = small("shakespeare", here / "data", 4) | {
        "model.dim": 256,
        "model.heads": 4,
        "model.layers": 4,
        "data.context": 256,
        "train.global_batch": 256,
        "train.micro_batch": "auto",
        "cluster.gpus_per_worker": 1,
        "cluster.gpu_memory_fraction": 0.01,
    }
    run(fields, "shakespeare", here / "run")
    (event,) = [event for event in read_events(here / "run") if event["event"] == "settled"]
    assert 1 <= event["micro_batch"] < 256


OWN_TASK = """
import time
import torch
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __init__(self, width, each_s):
        self.width, self.each_s = width, each_s
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(self.each_s)
        return torch.full((self.width,), index / 100_000)

class Task:
    def __init__(self, width, layers, each_s=0.0):
        self.width, self.layers, self.each_s = width, layers, each_s
    def model(self):
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.layers)))
    def datasets(self):
        if not self.each_s:
            return {"train": torch.utils.data.TensorDataset(torch.rand(4096, self.width))}
        return {"train": Samples(self.width, self.each_s)}
    def loss(self, model, batch):
        return model(batch[0] if isinstance(batch, (list, tuple)) else batch).square().mean()
"""


@pytest.mark.parametrize(
    ("bottleneck", "args", "batch"),
    [
        ("compute", {"width": 8192, "layers": 8}, 512),
        ("launch", {"width": 16, "layers": 200}, 4),
        ("input", {"width": 1024, "layers": 4, "each_s": 0.001}, 16),
    ],
)
def test_what_holds_a_gpu_up_is_named_and_its_phases_add_up(
    here: Path, monkeypatch: pytest.MonkeyPatch, bottleneck: str, args: dict[str, object], batch: int
) -> None:
    (here / "on_gpu.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(str(here))
    recipe = {
        "task": {"name": "on_gpu:Task", "args": args},
        "data": {"workers": 0},
        "optim": {"name": "sgd", "lr": 1e-6},
        "train": {"steps": 200, "global_batch": batch, "precision": "tf32"},
        "observe": {"every_steps": 20, "workers_every_s": 0.2},
        "checkpoint": {"every_steps": 1000},
    }
    summary = train(recipe, progress="silent", run_dir=here / "run")
    assert summary["bottleneck"] == bottleneck, (summary["verdict"], summary["seconds"])
    reports = read_metrics(here / "run")
    for first, second in itertools.pairwise(reports[1:]):  # the first steps build kernels
        assert sum(second["seconds"].values()) == pytest.approx(second["time"] - first["time"], rel=0.02, abs=2e-3)
    assert {"forward", "backward", "optimizer"} <= set(reports[-1]["seconds"])
    system = read_workers(here / "run")[-1]["system"]
    assert system["gpu_memory_bytes"][0] > 1e8 and 0 <= system["gpu_busy"][0] <= 1 and system["gpu_power_w"][0] > 10
    ledger = read_ledger(here / "run")
    assert abs(ledger.unaccounted_s) <= 0.01 * ledger.worker_s
