"""A trial takes over from another: as a whole or not at all, and without copying where there are links."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from shoal.checkpoint.folder import read_info
from shoal.checkpoint.read import verify
from shoal.core.errors import RunError
from shoal.launch.api import train
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from shoal.recipe.load import LoadedRecipe, load_recipe
from shoal.tune import adopt as adopt_module
from shoal.tune.adopt import adopt
from tests.tiny import TINY

STEP = "checkpoints/step-00000008"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that saved at steps 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("donor") / "0000"
    train(TINY, {"checkpoint.keep_last": 9}, run_dir=folder, progress="silent")
    return folder


@pytest.fixture
def donor(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "trials" / "0000")
    return tmp_path / "trials" / "0000"


@pytest.fixture
def recipe() -> LoadedRecipe:
    return load_recipe([TINY], {"optim.lr": 0.5})


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_heir_begins_with_the_donors_checkpoint_and_its_own_recipe(donor: Path, recipe: LoadedRecipe) -> None:
    heir = donor.with_name("0001-1")
    adopt(donor, 8, heir, recipe)
    assert [path.name for path in (heir / "checkpoints").iterdir()] == ["step-00000008"]
    verify(read_info(heir / STEP), 0, 1)
    for file in (donor / STEP).iterdir():
        assert (heir / STEP / file.name).stat().st_ino == file.stat().st_ino, "a link, which takes no room"
    assert yaml.safe_load((heir / "recipe.yaml").read_text())["optim"]["lr"] == 0.5
    assert lines(heir / "metrics.jsonl") == [r for r in lines(donor / "metrics.jsonl") if r["step"] <= 8]  # type: ignore[operator]
    (event,) = lines(heir / "events.jsonl")
    assert (event["event"], event["from"], event["step"]) == ("adopted", str(donor), 8)
    assert sorted(path.name for path in donor.parent.iterdir()) == ["0000", "0001-1"]
    summary = launch(prepare(resume=heir), Launch(SilentConsole()))
    assert (summary["status"], summary["resumed_from_step"], summary["step"]) == ("done", 8, 12)


def test_what_the_donor_deletes_the_heir_keeps(donor: Path, recipe: LoadedRecipe) -> None:
    adopt(donor, 8, donor.with_name("0001-1"), recipe)
    shutil.rmtree(donor)
    verify(read_info(donor.with_name("0001-1") / STEP), 0, 1)


def test_where_there_are_no_links_it_copies(donor: Path, recipe: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    heir = donor.with_name("0001-1")
    adopt(donor, 8, heir, recipe)
    verify(read_info(heir / STEP), 0, 1)
    for file in (donor / STEP).iterdir():
        assert (heir / STEP / file.name).read_bytes() == file.read_bytes()
        assert (heir / STEP / file.name).stat().st_ino != file.stat().st_ino


def test_it_is_done_once(donor: Path, recipe: LoadedRecipe) -> None:
    heir = donor.with_name("0001-1")
    adopt(donor, 8, heir, recipe)
    (heir / "metrics.jsonl").write_text("what it has done since\n")
    shutil.rmtree(donor)
    adopt(donor, 8, heir, recipe)
    assert (heir / "metrics.jsonl").read_text() == "what it has done since\n"


@pytest.mark.parametrize("harm", ["flip", "cut", "missing file", "missing"])
def test_a_donor_that_cannot_be_read_is_told_and_leaves_nothing(donor: Path, recipe: LoadedRecipe, harm: str) -> None:
    shard = donor / STEP / "shard-00000.safetensors"
    content = shard.read_bytes()
    if harm == "flip":
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif harm == "cut":
        shard.write_bytes(content[:-1])
    elif harm == "missing file":
        shard.unlink()
    else:
        shutil.rmtree(donor / STEP)
    with pytest.raises(RunError, match=r"^the checkpoint .*/0000/checkpoints/step-00000008 cannot be read"):
        adopt(donor, 8, donor.with_name("0001-1"), recipe)
    assert [path.name for path in donor.parent.iterdir()] == ["0000"]


def test_what_a_crash_left_is_removed(donor: Path, recipe: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    heir = donor.with_name("0001-1")
    (heir / "checkpoints").mkdir(parents=True)  # a start that took no step
    (heir / "events.jsonl").write_text("of before\n")

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(adopt_module, "fsync_directory", crash)
        with pytest.raises(KeyboardInterrupt):
            adopt(donor, 8, heir, recipe)
    assert not heir.exists(), "it is there as a whole or not at all"
    aside = donor.with_name(".adopting-0001-1")
    (aside / "checkpoints" / "step-00000004").mkdir()
    adopt(donor, 8, heir, recipe)
    assert not aside.exists() and [path.name for path in (heir / "checkpoints").iterdir()] == ["step-00000008"]
    assert len(lines(heir / "events.jsonl")) == 1


def test_what_is_left_of_another_takeover_is_made_anew(donor: Path, recipe: LoadedRecipe) -> None:
    """Of another step, for another recipe, or one that has trained since: the weights would not be the donor's."""
    heir = donor.with_name("0001-1")
    adopt(donor, 4, heir, recipe)
    adopt(donor, 8, heir, recipe)
    assert [path.name for path in (heir / "checkpoints").iterdir()] == ["step-00000008"]
    adopt(donor, 8, heir, load_recipe([TINY], {"optim.lr": 0.25}))
    assert yaml.safe_load((heir / "recipe.yaml").read_text())["optim"]["lr"] == 0.25
    with (heir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 1.0, "event": "start", "step": 8}) + "\n")
    (heir / "metrics.jsonl").write_text("")
    adopt(donor, 8, heir, load_recipe([TINY], {"optim.lr": 0.25}))
    assert [event["event"] for event in lines(heir / "events.jsonl")] == ["adopted"]


def test_a_full_disk_is_no_damaged_donor(donor: Path, recipe: LoadedRecipe, small_disk: Path) -> None:
    with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(RunError, match="cannot be written: No space left on device; make room") as caught:
        adopt(donor, 8, small_disk / "0001-1", recipe)
    assert not isinstance(caught.value, adopt_module.DamagedError)
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
