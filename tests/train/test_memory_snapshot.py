"""What held a GPU's memory is written down when there is no more of it."""

import gc
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.errors import RunError
from shoal.launch.api import train
from shoal.train.memory_snapshot import describe, memory_history, snapshot_on_oom

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CPU = torch.device("cpu")


def block(size: int, state: str = "active_allocated", stack: tuple[str, ...] = ()) -> dict[str, Any]:
    frames = [{"filename": file, "line": 7, "name": "f"} for file in stack]
    return {"size": size, "requested_size": size - 1, "state": state, "frames": frames}


def test_the_biggest_come_first_and_those_of_one_place_are_one() -> None:
    own = ("/x/torch/nn/functional.py", "/my/model.py", "/x/shoal/train/loop.py")
    segments = [
        {"total_size": 4096, "blocks": [block(1024, stack=own), block(512, "inactive"), block(1024, stack=own)]},
        {"total_size": 8192, "blocks": [block(1500), block(2048, "inactive"), block(256, "active_pending_free")]},
    ]
    found = describe(segments)
    assert found["allocated_bytes"] == 1024 + 1024 + 1500 + 256 and found["reserved_bytes"] == 12288
    assert found["largest_free_block_bytes"] == 2048 and found["with_stacks"] is True
    assert [(entry["bytes"], entry["count"]) for entry in found["biggest"]] == [(1023, 2), (1499, 1), (255, 1)]
    assert found["biggest"][0]["stack"] == ["/my/model.py:7 f", "/x/shoal/train/loop.py:7 f"]
    assert found["biggest"][0]["total_bytes"] == 2046


def test_without_history_or_anything_there_is_less_to_say() -> None:
    found = describe([{"total_size": 10, "blocks": [{"size": 6, "state": "active_allocated"}]}])
    assert found["with_stacks"] is False
    assert found["biggest"] == [{"total_bytes": 6, "bytes": 6, "count": 1, "stack": []}]
    assert describe([])["biggest"] == [] and describe([])["largest_free_block_bytes"] == 0


def test_frames_of_pytorch_alone_are_better_than_none() -> None:
    (entry,) = describe([{"total_size": 10, "blocks": [block(6, stack=("/x/torch/optim/adam.py",))]}])["biggest"]
    assert entry["stack"] == ["/x/torch/optim/adam.py:7 f"]


def test_on_a_cpu_nothing_is_done(tmp_path: Path) -> None:
    with memory_history(CPU, is_kept=True):
        assert snapshot_on_oom(torch.OutOfMemoryError("full"), tmp_path, 0, CPU) is None
    assert list(tmp_path.iterdir()) == []


def fill_memory(device: torch.device) -> torch.OutOfMemoryError:
    """A real error, with what was allocated still alive."""
    kept = []
    try:
        while True:
            kept.append(torch.empty(64 << 20, dtype=torch.uint8, device=device))
    except torch.OutOfMemoryError as error:
        return error


@needs_gpu
@pytest.mark.parametrize("with_history", [True, False])
def test_a_real_out_of_memory_is_written_down(with_history: bool, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((1 << 30) / total, device)  # 1 GiB, so that it takes no time
    try:
        with memory_history(device, is_kept=with_history):
            error = fill_memory(device)
            path = snapshot_on_oom(error, tmp_path, 3, device)
            del error
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        torch.cuda.empty_cache()
    assert path == tmp_path / "profile" / "rank-00003.memory.json"
    found = json.loads(path.read_text())
    assert found["rank"] == 3 and found["device"] == torch.cuda.get_device_name(device)
    assert 8 * (64 << 20) <= found["allocated_bytes"] <= found["reserved_bytes"] <= 1 << 30
    assert found["device_bytes"] > found["device_free_bytes"] > 0
    biggest = found["biggest"][0]
    assert biggest["bytes"] == 64 << 20 and biggest["count"] >= 8
    assert found["with_stacks"] is with_history
    if with_history:
        assert re.search(r"test_memory_snapshot\.py:\d+ fill_memory$", biggest["stack"][0])
    with path.with_name("rank-00003.memory.pickle").open("rb") as file:
        snapshot = pickle.load(file)
    assert {"segments", "device_traces"} <= set(snapshot)
    traced = [event["action"] for events in snapshot["device_traces"] for event in events]
    assert ("oom" in traced) is with_history


@needs_gpu
def test_before_there_is_a_folder_and_where_it_cannot_be_written_there_is_none(tmp_path: Path) -> None:
    device, error = torch.device("cuda", 0), torch.OutOfMemoryError("full")
    assert snapshot_on_oom(error, tmp_path / "none", 0, device) is None and not (tmp_path / "none").exists()
    assert snapshot_on_oom(RuntimeError("another"), tmp_path, 0, device) is None
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "profile").write_text("in the way")
    assert snapshot_on_oom(error, tmp_path, 0, device) is None


@needs_gpu
@pytest.mark.parametrize("profile", [None, {"after": 1}], ids=["plain", "profiled"])
def test_a_run_that_does_not_fit_says_where_to_look(profile: dict[str, int] | None, here: Path) -> None:
    gc.collect()  # what the test before has left
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    recipe = {
        "task": "image_classification",
        "model": {"name": "mlp", "hidden": [8192, 8192, 8192]},
        "data": {"name": "synthetic", "samples": 65536, "val_samples": 8, "shape": [1, 4, 4], "classes": 2},
        "train": {"steps": 5, "global_batch": 65536},
        "cluster": {"gpus_per_worker": 1, "gpu_memory_fraction": (3 << 30) / total},
        "observe": {"profile": profile},
    }
    with pytest.raises(RunError, match=r"out of memory .* what held the memory is in .*rank-00000\.memory\.json"):
        train(recipe, run_dir=here / "one", progress="silent")
    found = json.loads((here / "one/profile/rank-00000.memory.json").read_text())
    assert found["allocated_bytes"] > 1 << 30 and found["with_stacks"] is (profile is not None)
    if profile is not None:
        assert any("shoal/models/mlp.py" in line for entry in found["biggest"] for line in entry["stack"])
    assert (here / "one/profile/rank-00000.memory.pickle").stat().st_size > 0
