"""Weights that a run begins with: by name, from wherever they come, with an account of what did not fit."""

import json
import os
import pickle
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shoal.checkpoint.export import Request, export
from shoal.checkpoint.folder import read_info
from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.core.weights import named_weights, take_weights, weights_sha256
from shoal.models.gpt import Gpt
from shoal.train import initial
from shoal.train.initial import Initial, describe
from tests.checkpoint.states import save_tensors
from tests.many import CPU, Ranks

ALONE = Process(0, 1, CPU)


def gpt(seed: int, **settings: Any) -> Gpt:
    torch.manual_seed(seed)
    return Gpt(11, 8, **({"layers": 2, "heads": 2, "dim": 16} | settings))


def fill(model: nn.Module, where: str, process: Process) -> Initial:
    return initial.fill(describe(model), partial(take_weights, model), where, process)


def digest(model: nn.Module) -> str:
    return weights_sha256(named_weights(model))


def checkpoint_of(model: nn.Module, run: Path, step: int = 1) -> Path:
    run.mkdir(exist_ok=True)
    (run / "recipe.yaml").write_text("name: x\n")
    return save_tensors(run / "checkpoints", {f"model.{n}": t for n, t in named_weights(model).items()}, step).path


@pytest.fixture
def sources(here: Path) -> dict[str, str]:
    """Every form in which the weights of `gpt(seed=1)` may be given."""
    step = checkpoint_of(gpt(seed=1), here / "run")
    export(read_info(step), Request("r", Path("one.safetensors")))
    export(read_info(step), Request("r", Path("folder")))
    export(read_info(step), Request("r", Path("shards"), max_shard_bytes=3000))
    (here / "runs").mkdir()
    checkpoint_of(gpt(seed=1), here / "runs" / "named-1")
    return {
        "file": str(here / "one.safetensors"),
        "folder": "folder",
        "shards": "shards",
        "checkpoint": str(step),
        "run": str(here / "run"),
        "run by name": "named",
    }


@pytest.mark.parametrize("kind", ["file", "folder", "shards", "checkpoint", "run", "run by name"])
def test_weights_come_from_every_form(sources: dict[str, str], kind: str) -> None:
    model = gpt(seed=2)
    account = fill(model, sources[kind], ALONE)
    assert digest(model) == digest(gpt(seed=1)) and model.head.weight is model.token_embedding.weight
    assert account.loaded == len(named_weights(model))
    assert (account.missing, account.unexpected, account.misfits) == ([], [], [])
    assert account.words().endswith(f": {account.loaded} of {account.loaded} tensors")


def test_what_does_not_fit_is_told_by_name(here: Path) -> None:
    given = named_weights(gpt(seed=1, layers=3)) | {"norm.weight": torch.ones(16, dtype=torch.int8)}
    given["position_embedding.weight"] = torch.zeros(4, 16)
    save_file({name: t.clone() for name, t in given.items() if name != "norm.bias"}, "x.safetensors")
    model, fresh = gpt(seed=2), named_weights(gpt(seed=2))
    account = fill(model, "x.safetensors", ALONE)
    assert account.missing == ["norm.bias"]
    assert account.misfits == [
        "position_embedding.weight [4, 16] instead of [8, 16]",
        "norm.weight torch.int8 instead of torch.float32",
    ]
    assert len(account.unexpected) == 12 and all(name.startswith("blocks.2.") for name in account.unexpected)
    kept = ("norm.bias", "norm.weight", "position_embedding.weight")
    for name, tensor in named_weights(model).items():
        assert torch.equal(tensor, fresh[name] if name in kept else given[name])
    record = account.to_record()
    assert (record["loaded"], record["missing"], record["misfits"], record["unexpected"]) == (len(fresh) - 3, 1, 2, 12)
    assert record["missing_names"] == ["norm.bias"] and len(record["unexpected_names"]) == 10
    lines = record["words"].splitlines()
    assert lines[0] == f"weights from x.safetensors: {len(fresh) - 3} of {len(fresh)} tensors"
    assert lines[1] == "  1 not there, kept as initialised: norm.bias"
    assert lines[2].startswith("  2 different there, kept as initialised: position_embedding.weight [4, 16] instead")
    assert lines[3].startswith("  12 not in this model, ignored: blocks.2.") and lines[3].endswith(", ...")
    json.dumps(record)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_converted(here: Path, dtype: torch.dtype) -> None:
    given = {name: tensor.to(dtype) for name, tensor in named_weights(gpt(seed=1)).items()}
    save_file(given, "x.safetensors")
    model = gpt(seed=2)
    fill(model, "x.safetensors", ALONE)
    for name, tensor in named_weights(model).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, given[name].float())


def test_tied_weights_may_have_any_of_their_names(here: Path) -> None:
    given = {name: tensor.clone() for name, tensor in named_weights(gpt(seed=1)).items()}
    given["head.weight"] = given.pop("token_embedding.weight")
    save_file(given, "second.safetensors")
    save_file(given | {"token_embedding.weight": given["head.weight"].clone()}, "both.safetensors")
    save_file(given | {"token_embedding.weight": given["head.weight"] + 1}, "untied.safetensors")
    for name, unexpected in (("second", []), ("both", []), ("untied", ["head.weight"])):
        model = gpt(seed=2)
        account = fill(model, f"{name}.safetensors", ALONE)
        assert account.missing == [] and account.unexpected == unexpected
        assert (digest(model) == digest(gpt(seed=1))) == (name != "untied")


def test_an_untied_model_is_told_that_its_head_is_missing(here: Path) -> None:
    save_file({name: t.clone() for name, t in named_weights(gpt(seed=1)).items()}, "x.safetensors")
    assert fill(gpt(seed=2, tie_weights=False), "x.safetensors", ALONE).missing == ["head.weight"]


def test_a_model_of_hugging_face_loads_from_its_own_folder(here: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=8)
    torch.manual_seed(1)
    theirs = transformers.GPT2LMHeadModel(config)
    for name, size in (("one", "1GB"), ("shards", "10KB")):
        theirs.save_pretrained(name, max_shard_size=size)
        assert (len(list(Path(name).glob("*.safetensors"))) > 1) == (name == "shards")
        torch.manual_seed(2)
        model = transformers.GPT2LMHeadModel(config)
        account = fill(model, name, ALONE)
        assert digest(model) == digest(theirs) and account.missing == account.unexpected == []


def test_a_run_gives_its_newest_whole_checkpoint(here: Path) -> None:
    for step in (1, 2, 3):
        path = checkpoint_of(gpt(seed=step), here / "run", step)
    (path / "state.json").write_text("{}")
    model = gpt(seed=9)
    account = fill(model, "run", ALONE)
    assert digest(model) == digest(gpt(seed=2)) and account.path.endswith("step-00000002")
    assert "step 3 is corrupt, so not that one: state.json" in account.words()
    with pytest.raises(UserError, match=r"train.init_from: .*step-00000003 is corrupt.* whole is step 2"):
        fill(model, str(path), ALONE)


class Bomb:
    """Leaves a trace when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("exploded"),)


def wrong_sources(here: Path) -> list[tuple[str, str]]:
    """Paths, and what is said of them."""
    (here / "bomb.pt").write_bytes(pickle.dumps(Bomb()))
    (here / "bomb").write_bytes(pickle.dumps(Bomb()))
    (here / "pickles").mkdir()
    (here / "pickles" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    (here / "empty").mkdir()
    (here / "no-checkpoint").mkdir()
    (here / "no-checkpoint" / "recipe.yaml").write_text("name: x\n")
    save_file({"other": torch.ones(3)}, "other.safetensors")
    save_file({"norm.weight": torch.ones(3)}, "shape.safetensors")
    whole = (here / "other.safetensors").read_bytes()
    (here / "cut.safetensors").write_bytes(whole[:-1])
    (here / "several").mkdir()
    for name in ("a", "b"):
        (here / "several" / f"{name}.safetensors").write_bytes(whole)
    for folder, files in {
        "index": "gone.safetensors",
        "away": "../other.safetensors",
        "list": ["x"],
        "lacks": "y",
    }.items():
        (here / folder).mkdir()
        weight_map = {"nowhere": files}
        (here / folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (here / "lacks" / "y").write_bytes(whole)
    (here / "not-json").mkdir()
    (here / "not-json" / "model.safetensors.index.json").write_text("{")
    return [
        ("nope.safetensors", "neither a file nor a folder, nor a run"),
        ("bomb.pt", "bomb.pt may be a pickle, which can run code when it is read; where you trust it, convert it"),
        ("bomb", "bomb cannot be read"),
        ("pickles", "pytorch_model.bin may be a pickle"),
        ("empty", "empty holds no .safetensors file; give an export, a checkpoint or a run"),
        ("no-checkpoint", "no-checkpoint is a run without a checkpoint that is whole; give another"),
        (
            "other.safetensors",
            "none of the 1 names in other.safetensors (other, ...) is one of this model's (blocks.0.",
        ),
        ("shape.safetensors", "fits this model: norm.weight [3] instead of [16]"),
        ("cut.safetensors", "cut.safetensors cannot be read"),
        ("several", "several holds 2 .safetensors files and no index; give one of them"),
        ("index", "index cannot be read"),
        ("away", "is not an index of .safetensors files: '../other.safetensors' is not a file beside it"),
        ("list", "is not an index of .safetensors files"),
        ("lacks", "lacks cannot be read"),
        ("not-json", "is not an index of .safetensors files"),
    ]


def test_what_cannot_be_used_is_refused_in_words(here: Path) -> None:
    for where, says in wrong_sources(here):
        model = gpt(seed=1)
        before = digest(model)
        with pytest.raises(UserError) as error:
            fill(model, where, ALONE)
        assert str(error.value).startswith("train.init_from: ") and says in str(error.value), where
        assert digest(model) == before
    assert not (here / "exploded").exists()


def filled(process: Process, where: str) -> tuple[str, int]:
    model = gpt(seed=10 + process.rank)
    account = fill(model, where, process)
    return digest(model), account.loaded


def seen_by_first_alone(process: Process) -> str:
    """A path that leads to a file on one worker, and on the other to nothing, as without shared storage."""
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
        save_file({name: t.clone() for name, t in named_weights(gpt(seed=1)).items()}, file.name)
        descriptor = os.open(file.name, os.O_RDONLY)
    if process.is_first:
        os.dup2(descriptor, 777)
    try:
        fill(gpt(seed=2), "/proc/self/fd/777", process)
    except UserError as error:
        return str(error)
    finally:
        os.close(descriptor)
    return "filled"


def test_every_worker_reads_by_itself_and_all_hear_of_a_failure(ranks: Callable[[int], Ranks], here: Path) -> None:
    save_file({name: t.clone() for name, t in named_weights(gpt(seed=1)).items()}, "x.safetensors")
    whole = (digest(gpt(seed=1)), len(named_weights(gpt(seed=1))))
    assert ranks(2)(filled, str(here / "x.safetensors")) == [whole, whole]
    told = ranks(2)(seen_by_first_alone)
    assert told[0] == told[1] and told[0].startswith("train.init_from: /proc/self/fd/777 is not on ")
