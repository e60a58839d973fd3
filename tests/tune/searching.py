"""Searches that take a moment, by the command in a process of its own or right here."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shoal.tune.api import tune
from tests.tiny import TINY, own_recipe, write_own_task

LR = {"optim.lr": "loguniform(1e-4, 1e-1)"}
QUICK: dict[str, Any] = TINY | {"train": {"epochs": 4, "global_batch": 16}, "evaluate": {}, "checkpoint": {}}


def search(folder: Path, space: dict[str, Any] = LR, recipe: Any = QUICK, **settings: Any) -> dict[str, Any]:
    """Search on a Ray of its own, silently; the summary."""
    return tune(recipe, space, search_dir=folder, progress="silent", **settings)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli.main", "tune", *words]


def start(
    *words: str, environment: dict[str, str] | None = None, folder: Path | None = None
) -> "subprocess.Popen[str]":
    """`shoal tune` in a process of its own, as leader of a group."""
    return subprocess.Popen(
        command(*words),
        env=dict(os.environ) | (environment or {}),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def summary_of(process: "subprocess.Popen[str]", timeout_s: float = 240.0) -> dict[str, Any]:
    """What it printed last, when it has ended well."""
    out, err = process.communicate(timeout=timeout_s)
    assert process.returncode == 0, err[-3000:]
    summary: dict[str, Any] = json.loads(out.splitlines()[-1])
    return summary


def journal(folder: Path) -> list[dict[str, Any]]:
    path = folder / "journal.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def worker_pids(folder: Path) -> list[int]:
    """Of all trials of a search, those that live."""
    found = []
    for path in (folder / "trials").glob("*/events.jsonl"):
        for line in path.read_text().split("\n")[:-1]:
            event = json.loads(line)
            if event["event"] == "workers":
                found += [worker["pid"] for worker in event["workers"]]
    return [pid for pid in found if Path(f"/proc/{pid}").exists()]


def what_came_of(summary: dict[str, Any]) -> dict[int, Any]:
    """trial -> all that must not depend on what happened to the workers on the way."""
    found = {}
    for record in summary["trials"]:
        own = json.loads((Path(record["run_dir"]) / "summary.json").read_text())
        kept = ("status", "config", "value", "step", "reason", "lineage")
        found[record["trial"]] = {key: record.get(key) for key in kept} | {"weights": own["weights_sha256"]}
    return found


def write_slow(folder: Path, steps: int, **sections: Any) -> None:
    """A recipe whose steps take 30 ms without any computing, slow.yaml, and a space for it, space.yaml."""
    write_own_task(folder, "slow", in_loss="import time; time.sleep(0.03 * model.training)")
    recipe = own_recipe("slow") | {
        "train": {"steps": steps, "global_batch": 8},
        "evaluate": {"every_steps": 6},
        **sections,
    }
    (folder / "slow.yaml").write_text(json.dumps(recipe | {"optim": {"name": "sgd", "lr": 0.01}}))
    (folder / "space.yaml").write_text("optim.lr: loguniform(1e-3, 1e-1)\n")
