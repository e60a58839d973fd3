"""A machine is gone with its disk, and the run goes on from the store."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from tests.small_recipes import small
from tests.train.test_exact_resume import StopsAt


def begin(here: Path, run_dir: str, stop_at: int | None = None, **fields: Any) -> dict[str, Any]:
    fixed = {"cluster.threads_per_worker": 1, "cluster.gpus_per_worker": 0, "checkpoint.every_steps": 5}
    prepared = prepare(["digits"], small("digits", here / "data", 20) | fixed | fields, run_dir=run_dir)
    console = StopsAt(stop_at) if stop_at else SilentConsole()
    return launch(prepared, Launch(console, console.stop) if isinstance(console, StopsAt) else Launch(console))


def test_a_run_goes_on_where_nothing_is_left_of_it_but_the_store(here: Path) -> None:
    whole = begin(here, "runs/whole")
    store = f"file://{here}/store"
    begin(here, "runs/mine", stop_at=12, **{"checkpoint.upload_to": store})
    shutil.rmtree("runs/mine")
    (here / "store").rename(here / "moved")
    again = launch(prepare(resume=f"file://{here}/moved/mine/"), Launch(SilentConsole()))
    assert again["run_dir"] == "runs/mine" and again["resumed_from_step"] == 12
    assert again["weights_sha256"] == whole["weights_sha256"]
    assert (here / "moved" / "mine" / "checkpoints" / "step-00000020" / "manifest.json").is_file()
    prepared = prepare(resume=f"file://{here}/moved/mine")
    assert prepared.finished is not None, "and now that there is a folder, it is that run"


def test_a_recipe_in_the_store_that_has_changed_is_not_used(here: Path) -> None:
    begin(here, "runs/mine", stop_at=12, **{"checkpoint.upload_to": f"file://{here}/store"})
    shutil.rmtree("runs")
    folder = here / "store" / "mine" / "checkpoints"
    newest, before = folder / "step-00000012" / "recipe.yaml", folder / "step-00000010" / "recipe.yaml"
    newest.write_bytes(newest.read_bytes().replace(b"seed: 0", b"seed: 7"))
    prepared = prepare(resume=f"file://{here}/store/mine")
    assert prepared.loaded.recipe.train.seed == 0 and before.read_text() == Path("runs/mine/recipe.yaml").read_text()
    shutil.rmtree("runs")
    before.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="there is no checkpoint whose recipe is whole in"):
        prepare(resume=f"file://{here}/store/mine")
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("file:///nowhere/at/all", "there is no checkpoint in file:///nowhere/at/all/checkpoints"),
        ("s3://bucket", "s3://bucket names no run; give the folder of the run"),
        ("odd://bucket/run", "odd:// is not a kind of storage"),
    ],
)
def test_an_address_without_a_run_is_told_and_nothing_is_written(here: Path, address: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        prepare(resume=address)
    assert list(here.iterdir()) == []
