"""Runs whose checkpoints go to a store that fails, is slow, or is all that is left."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.folder import list_checkpoints, read_info
from shoal.checkpoint.read import verify
from shoal.checkpoint.store import fetch, list_remote
from shoal.core.errors import RunError, UserError
from shoal.core.remote import Access, Remote
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.runs import read_events
from tests.small_recipes import small
from tests.store import Proxy

STEPS = 24


class Away(SilentConsole):
    """From the first step on the store is not to be reached."""

    def __init__(self, s3: Proxy) -> None:
        self.s3 = s3

    def tick(self, step: int) -> None:
        self.s3.draw = lambda: "reset"


def run(folder: Path, data: Path, console: SilentConsole | None = None, **fields: Any) -> dict[str, Any]:
    overrides = small("digits", data, STEPS) | {
        "checkpoint.every_steps": 4,
        "checkpoint.upload_timeout_s": 0.5,
        "cluster.threads_per_worker": 1,
        "cluster.gpus_per_worker": 0,
    }
    return launch(prepare(["digits"], overrides | fields, run_dir=folder), Launch(console or SilentConsole()))


def resume(folder: Path, **fields: Any) -> dict[str, Any]:
    return launch(prepare(overrides=fields, resume=folder), Launch(SilentConsole()))


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(folder) if event["event"] == name]


S3 = {"checkpoint.upload_to": "s3://bucket/runs"}


def test_with_a_store_that_fails_in_every_way_nothing_is_lost(s3: Proxy, tmp_path: Path) -> None:
    reference = run(tmp_path / "whole", tmp_path / "data")
    draw = random.Random(3)
    kinds = ["ok"] * 14 + ["error", "late error", "reset", "half", "silence", "slow"]
    s3.draw = lambda: draw.choice(kinds)
    found = run(tmp_path / "run", tmp_path / "data", **S3)
    assert found["weights_sha256"] == reference["weights_sha256"] and found["status"] == "done"
    assert sum(s3.done[kind] for kind in set(kinds) - {"ok"}) > 3, "it did fail"
    s3.draw = lambda: "ok"
    remote = Remote("s3://bucket/runs/run/checkpoints", Access("checkpoint.upload_to"))
    there = list_remote(remote)
    assert there[-1].step == STEPS and events(tmp_path / "run", "upload")[-1]["step"] == STEPS
    fetch(remote, there[-1], tmp_path / "scratch")
    verify(read_info(tmp_path / "scratch" / there[-1].path.name))


@pytest.mark.slow
def test_a_store_that_is_away_stops_the_run_only_after_so_many_failures_and_it_can_go_on(
    s3: Proxy, tmp_path: Path
) -> None:
    fields = S3 | {"checkpoint.max_failures": 1, "train.steps": 4000, "checkpoint.give_up_after_s": 0.2}
    with pytest.raises(RunError, match=r"^1 uploads of checkpoints failed in a row, .*; stopped at step \d+, which"):
        run(tmp_path / "run", tmp_path / "data", Away(s3), **fields)
    (stopped,) = events(tmp_path / "run", "failed")
    assert stopped["step"] < 4000
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].step == stopped["step"], "saved here all the same"
    assert events(tmp_path / "run", "upload_failed")
    s3.draw = lambda: "ok"
    again = resume(tmp_path / "run", **{"train.steps": stopped["step"] + 4})
    assert again["status"] == "done" and again["resumed_from_step"] == stopped["step"]
    assert events(tmp_path / "run", "upload")[-1]["step"] == again["step"]


@pytest.mark.slow
def test_what_was_not_uploaded_at_the_end_is_when_the_run_goes_on(s3: Proxy, tmp_path: Path) -> None:
    fields = S3 | {"checkpoint.give_up_after_s": 0.1, "checkpoint.every_steps": STEPS}
    found = run(tmp_path / "run", tmp_path / "data", Away(s3), **fields)
    assert found["status"] == "done" and not events(tmp_path / "run", "upload"), "a warning, and no more"
    s3.draw = lambda: "ok"
    resume(tmp_path / "run", **{"train.steps": STEPS + 1, "checkpoint.every_steps": 1000})
    assert events(tmp_path / "run", "upload")[0]["step"] == STEPS


def test_a_store_that_is_away_from_the_beginning_is_told_before_anything_starts(s3: Proxy, tmp_path: Path) -> None:
    s3.draw = lambda: "reset"
    with pytest.raises(UserError, match=r"^checkpoint\.upload_to: nothing can be written to s3://bucket/runs/run/.*"):
        run(tmp_path / "run", tmp_path / "data", **S3)
    assert not (tmp_path / "run").exists()


def test_a_run_whose_disk_is_gone_goes_on_from_the_store(s3: Proxy, tmp_path: Path) -> None:
    reference = run(tmp_path / "whole", tmp_path / "data", **{"train.steps": STEPS + 8})
    run(tmp_path / "run", tmp_path / "data", **S3)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = resume(tmp_path / "run", **{"train.steps": STEPS + 8})
    assert again["resumed_from_step"] == STEPS and again["step"] == STEPS + 8
    assert events(tmp_path / "run", "fetched")[0]["from"] == f"s3://bucket/runs/run/checkpoints/step-{STEPS:08d}"
    assert reference["step"] == again["step"]
