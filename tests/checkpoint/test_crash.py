"""Whatever dies while saving, and wherever: there is a newest checkpoint, it is whole, and nothing piles up."""

import json
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.folder import clear_leftovers, list_checkpoints, read_info
from shoal.checkpoint.store import fetch, list_remote
from shoal.core.remote import Access, Remote
from tests.checkpoint.states import check, read, save

Order = Callable[..., dict[str, Any]]
KILLS = 200
PHASES = {
    "staging": "stage.Stage.take",
    "shard writes": "shard.write_file",
    "hashing": "shard.write_file",
    "checking": "shard.check_finite",
    "manifest": "manifest.Manifest.to_bytes",
    "rename": "folder.commit",
    "upload": "remote.Remote.put",
    "manifest upload": "upload.Uploader._commit",
    "retention": "folder.delete_checkpoint",
    "clearing up": "folder.clear_leftovers",
}


@pytest.fixture
def crashing(without_coverage: dict[str, str]) -> Iterator[Order]:
    """Give the process of `crashing.py` an order; its answer."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.checkpoint.crashing"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=without_coverage,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdin is not None and process.stdout is not None
    orders, answers = process.stdin, process.stdout

    def give(*words: object) -> dict[str, Any]:
        print(*words, file=orders, flush=True)
        found: dict[str, Any] = json.loads(answers.readline())
        return found

    try:
        yield give
    finally:
        orders.close()
        process.wait(timeout=30)
        answers.close()


class Scene:
    """A run's folder and a store, as they are after a crash."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "run" / "checkpoints"
        self.store = root / "store"
        self.fetched = root / "fetched"
        self.newest = 0
        self.remote = Remote(f"file://{self.store}/run/checkpoints", Access("checkpoint.upload_to"))
        save(self.folder, 1)

    def check(self) -> None:
        clear_leftovers(self.folder)
        found = list_checkpoints(self.folder)
        assert found and found[-1].step >= self.newest, "what was committed stays"
        self.newest = found[-1].step
        for info in found:
            check(read(info), info.step)
        names = [path.name for path in self.folder.iterdir()]
        # The last, the best, one that is uploaded, two that may be next, and one that came before others could go.
        assert len(names) == len(found) <= 6, f"nothing is left that grows: {names}"

    def check_store(self) -> None:
        for there in list_remote(self.remote):
            fetch(self.remote, there, self.fetched)
            check(read(read_info(self.fetched / there.path.name)), there.step)
            shutil.rmtree(self.fetched)
        assert len(self.remote.names("")) <= 5, self.remote.names("")


def test_killed_at_any_line_of_a_save_the_newest_checkpoint_is_whole(tmp_path: Path, crashing: Order) -> None:
    scene, draw = Scene(tmp_path), random.Random(20)
    counted: Counter[str] = Counter(json.loads(crashing("count", scene.folder, scene.store)["lines"]))
    for phase, function in PHASES.items():
        assert counted[function], f"{phase} is not where it was"
    scene.check()
    killed: Counter[str] = Counter()
    targets = [*PHASES.values()] + [draw.choice(sorted(counted)) for _ in range(KILLS * 2)]
    for function in targets:
        if killed.total() == KILLS:
            break
        done = crashing("kill", scene.folder, scene.store, function, draw.randint(1, counted[function]))
        assert done["killed"] or done["status"] == 0
        killed[function] += done["killed"]
        scene.check()
        if killed.total() % 10 == 0:
            scene.check_store()
    assert killed.total() == KILLS
    # How many lines a function runs depends on how busy the machine is: some of the numbers drawn may not have come.
    for function in [function for function in PHASES.values() if not killed[function]]:
        assert crashing("kill", scene.folder, scene.store, function, 1)["killed"]
        scene.check()
    assert crashing("count", scene.folder, scene.store)["status"] == 0
    scene.check()
    scene.check_store()
    assert list_remote(scene.remote)[-1].step == scene.newest, "and in the end the store has the newest too"


def test_killed_at_any_moment_the_newest_checkpoint_is_whole(tmp_path: Path, crashing: Order) -> None:
    scene, draw = Scene(tmp_path), random.Random(21)
    for _ in range(40):
        crashing("time", scene.folder, scene.store, f"{draw.uniform(0.0, 0.15):.4f}")
        scene.check()
    scene.check_store()
