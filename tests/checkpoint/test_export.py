"""Weights on their way out of a checkpoint: the same bytes whoever wrote it, and never half of them."""

import itertools
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from shoal.checkpoint.export import Request, divide, export, shard_names
from shoal.checkpoint.folder import list_checkpoints
from shoal.core.errors import RunError, UserError
from shoal.core.process import Process
from shoal.core.weights import named_weights, weights_sha256
from shoal.models.gpt import Gpt
from tests.checkpoint.states import save_tensors
from tests.many import Ranks


def many_kinds() -> dict[str, torch.Tensor]:
    """Every kind of tensor that a model may have, one of them large enough to be divided between workers."""
    generator = torch.Generator().manual_seed(1)
    return {
        "model.a.weight": torch.randn(300, 128, generator=generator),
        "model.a.bias": torch.randn(300, generator=generator).bfloat16(),
        "model.steps": torch.tensor(7),
        "model.mask": torch.tensor([True, False, True]),
        "model.none": torch.empty(0, 4),
        "model.open": torch.tensor([1.0, float("-inf")]),
        "optim.a.weight.exp_avg": torch.randn(300, 128, generator=generator),
    }


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_weights_are_written_with_what_they_are(here: Path) -> None:
    tensors = many_kinds()
    done = export(save_tensors(here / "c", tensors), Request("my-run"))
    assert str(done.path) == "my-run-step-1.safetensors" and names_in(here) == [
        "c",
        "my-run-step-1.load.py",
        done.path.name,
    ]
    found = load_file(done.path)
    expected = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    assert weights_sha256(found) == weights_sha256(expected)
    assert (done.num_tensors, done.num_bytes) == (6, sum(t.numel() * t.element_size() for t in expected.values()))
    with safe_open(done.path, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata.pop("shoal") and metadata == {"format": "pt", "run": "my-run", "step": "1"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_numbers_are_converted_and_counters_are_not(here: Path, dtype: str) -> None:
    tensors = many_kinds()
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    found = load_file(export(save_tensors(here / "c", tensors), Request("r", dtype=dtype)).path)
    for name, tensor in found.items():
        own = tensors[f"model.{name}"]
        assert tensor.dtype == (kind if own.is_floating_point() else own.dtype)
        assert torch.equal(tensor, own.to(tensor.dtype))


def test_what_a_type_cannot_hold_is_refused_and_nothing_stays(here: Path) -> None:
    tensors = {"model.a": torch.ones(4), "model.z": torch.tensor([7e4])}
    info = save_tensors(here / "c", tensors)
    with pytest.raises(UserError, match=r"--dtype: z has values that torch.float16 cannot hold; use bf16"):
        export(info, Request("r", dtype="fp16"))
    with pytest.raises(UserError, match="--dtype"):
        export(info, Request("r", Path("folder"), dtype="fp16", max_shard_bytes=1))
    assert names_in(here) == ["c"]


def test_what_failed_leaves_the_earlier_export_alone(here: Path) -> None:
    info = save_tensors(here / "c", {"model.a": torch.tensor([7e4]), "model.b": torch.ones(3)})
    for output in (Path("x.safetensors"), Path("folder")):
        done = export(info, Request("r", output))
        before = {path: path.read_bytes() for path in [*done.files, done.loader]}
        with pytest.raises(UserError, match="--dtype"):
            export(info, Request("r", output, dtype="fp16", force=True))
        assert {path: path.read_bytes() for path in before} == before
    assert names_in(here) == ["c", "folder", "x.load.py", "x.safetensors"]


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    info = save_tensors(tmp_path / "c", {"model.a": torch.zeros(1 << 20)})
    code = (
        "import resource, signal, sys; from pathlib import Path\n"
        "from shoal.checkpoint.export import Request, export; from shoal.checkpoint.folder import read_info\n"
        "from shoal.core.errors import RunError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: export(read_info(Path(sys.argv[1])), Request('r', Path('x.safetensors')))\n"
        "except RunError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, info.path]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "export: could not be written: File too large; nothing was left behind\n"
    assert names_in(tmp_path) == ["c"]


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 60))
def test_shards_hold_every_name_once_and_are_as_full_as_they_may_be(sizes: list[int], most: int) -> None:
    by_name = {f"n{number}": size for number, size in enumerate(sizes)}
    shards = divide(by_name, most)
    assert [name for shard in shards for name in shard] == list(by_name)
    totals = [sum(by_name[name] for name in shard) for shard in shards]
    for shard, total in zip(shards, totals, strict=True):
        assert total <= most or len([name for name in shard if by_name[name]]) == 1
    for (_, after), total in zip(itertools.pairwise(shards), totals, strict=False):
        assert total + by_name[after[0]] > most


def test_shards_have_an_index_as_hugging_face_writes_it(here: Path) -> None:
    tensors = many_kinds()
    done = export(save_tensors(here / "c", tensors), Request("r", max_shard_bytes=10_000))
    files = shard_names(3)
    assert done.path == Path("r-step-1") and [file.name for file in done.files] == files
    assert files[0] == "model-00001-of-00003.safetensors"
    index = json.loads((done.path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": done.num_bytes}
    for file in files:
        assert sorted(load_file(done.path / file)) == sorted(k for k, v in index["weight_map"].items() if v == file)
    assert sorted(index["weight_map"]) == sorted(n.removeprefix("model.") for n in tensors if n.startswith("model."))


def test_a_folder_that_is_asked_for_holds_one_file_without_an_index(here: Path) -> None:
    export(save_tensors(here / "c", many_kinds()), Request("r", Path("out")))
    assert names_in(here / "out") == ["load.py", "model.safetensors"]


def saved_by(process: Process, folder: Path) -> None:
    save_tensors(folder, many_kinds(), process=process)


def test_the_number_of_workers_makes_no_difference(ranks: Callable[[int], Ranks], here: Path) -> None:
    ranks(2)(saved_by, here / "two")
    save_tensors(here / "one", many_kinds())
    written = []
    for workers, name in ((1, "one"), (2, "two")):
        (info,) = list_checkpoints(here / name)
        assert info.manifest.world_size == workers
        done = export(info, Request("r", Path(f"{name}.safetensors")))
        shards = export(info, Request("r", Path(f"{name}-shards"), max_shard_bytes=10_000))
        written.append([file.read_bytes() for file in [*done.files, *shards.files]])
    assert written[0] == written[1]


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 4000])
def test_tied_weights_are_there_once_and_load(here: Path, max_shard_bytes: int) -> None:
    model = gpt(seed=1)
    tensors = {f"model.{name}": tensor for name, tensor in named_weights(model).items()}
    assert "model.head.weight" not in tensors
    done = export(save_tensors(here / "c", tensors), Request("r", max_shard_bytes=max_shard_bytes))
    assert (len(done.files) > 1) == (max_shard_bytes == 4000)
    loader = runpy.run_path(str(done.loader))
    assert sorted(loader["weights"]()) == sorted(named_weights(model))
    other = loader["load_into"](gpt(seed=2))
    assert weights_sha256(named_weights(other)) == weights_sha256(named_weights(model))
    assert other.head.weight is other.token_embedding.weight


def test_the_loader_refuses_another_model_and_leaves_it_as_it_was(here: Path) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in named_weights(gpt(seed=1)).items()}
    loader = runpy.run_path(str(export(save_tensors(here / "c", tensors), Request("r")).loader))
    untied, deeper, smaller = gpt(seed=2, tie_weights=False), gpt(seed=2, layers=3), gpt(seed=2, layers=1)
    for model, says in (
        (untied, r"missing \['head.weight'\]"),
        (deeper, "blocks.2"),
        (smaller, "unexpected .*blocks.1"),
    ):
        before = weights_sha256(named_weights(model))
        with pytest.raises(KeyError, match=says):
            loader["load_into"](model)
        assert weights_sha256(named_weights(model)) == before


def gpt(seed: int, **settings: Any) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(11, 8, **({"layers": 2, "heads": 2, "dim": 16} | settings))


def test_no_more_than_a_tensor_at_a_time_is_in_memory(tmp_path: Path, without_coverage: dict[str, str]) -> None:
    """256 MB in tensors of 16 MB: the process must not grow by more than a few of them."""
    info = save_tensors(
        tmp_path / "c", {f"model.{number}": torch.full((1 << 22,), float(number)) for number in range(16)}
    )
    code = (
        "import re, sys; from pathlib import Path\n"
        "from shoal.checkpoint.export import Request, export; from shoal.checkpoint.folder import read_info\n"
        # Not getrusage: its peak is also that of the process that started this one.
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) * 1024\n"
        "info, before = read_info(Path(sys.argv[1])), peak()\n"
        "export(info, Request('r', Path('x.safetensors'), dtype='bf16'))\n"
        "print(peak() - before)\n"
    )
    command = [sys.executable, "-c", code, info.path]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True, env=without_coverage
    )
    assert int(done.stdout) < 96e6


@pytest.mark.parametrize(
    ("prepare", "output", "force", "says"),
    [
        ("x.safetensors", "x.safetensors", False, "-o: x.safetensors exists; choose another with -o"),
        ("x.load.py", "x.safetensors", False, "-o: x.load.py exists"),
        ("x/", "x", False, "-o: x exists"),
        ("x/notes.txt", "x", True, "-o: x holds more than an export"),
        ("x", "x", True, "-o: x holds more than an export"),
        ("x.safetensors/", "x.safetensors", True, "is a folder, which --force does not replace"),
        ("x.load.py/", "x.safetensors", True, "is a folder, which --force does not replace"),
        ("y/", "z/x.safetensors", False, "-o: the folder z does not exist; make it first"),
    ],
)
def test_what_is_there_is_not_overwritten(here: Path, prepare: str, output: str, force: bool, says: str) -> None:
    path = here / prepare
    if prepare.endswith("/"):
        path.mkdir()
    else:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    info = save_tensors(here / "c", {"model.a": torch.ones(3)})
    before = sorted(here.rglob("*"))
    with pytest.raises(UserError) as error:
        export(info, Request("r", Path(output), force=force))
    assert says in str(error.value) and sorted(here.rglob("*")) == before


def test_force_replaces_an_earlier_export(here: Path) -> None:
    first, second = (save_tensors(here / "c", {"model.a": torch.full((3,), float(step))}, step) for step in (1, 2))
    for output, shard in ((Path("x.safetensors"), 10**9), (Path("out"), 10**9)):
        export(first, Request("r", output, shard))
        done = export(second, Request("r", output, shard, force=True))
        assert load_file(done.files[0])["a"].tolist() == [2.0] * 3
    assert names_in(here) == ["c", "out", "x.load.py", "x.safetensors"]


def test_one_file_cannot_hold_several_shards(here: Path) -> None:
    info = save_tensors(here / "c", {"model.a": torch.ones(3), "model.b": torch.ones(3)})
    with pytest.raises(UserError, match=r"-o: x.safetensors is one file.*raise that, or give a folder"):
        export(info, Request("r", Path("x.safetensors"), max_shard_bytes=12))


def test_a_checkpoint_that_vanishes_is_told(here: Path) -> None:
    info = save_tensors(here / "c", {"model.a": torch.ones(3)})
    info.path.rename(here / "elsewhere")
    with pytest.raises((UserError, RunError), match="gone"):
        export(info, Request("r"))
    assert names_in(here) == ["c", "elsewhere"]
