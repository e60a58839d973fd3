"""A real `shoal train` with a compiled model, and the run resumed: what was compiled is not compiled again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.core.compile_cache import VARIABLE
from shoal.observe.runs import read_events
from tests.tiny import write_tiny


def train(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The summary and what was shown, of a process whose user has a cache of its own."""
    variables = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-m", "shoal.cli.main", "train", *arguments, "--json"]
    ended = subprocess.run(
        command,
        cwd=folder,
        env=variables | {"XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stderr
    summary: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return summary, ended.stderr


TWO_WORKERS = pytest.param(["--launcher", "torchrun", "--workers", "2"], marks=pytest.mark.slow)
ON_RAY = pytest.param(["--launcher", "ray", "--workers", "2"], marks=pytest.mark.slow)


@pytest.mark.parametrize("launched", [["--launcher", "local"], TWO_WORKERS, ON_RAY])
def test_a_resumed_run_uses_what_was_compiled(launched: list[str], here: Path) -> None:
    recipe = write_tiny(here)
    words = [str(recipe), "train.compile=true", "train.steps=6", "--run-dir", "run", *launched]
    first, shown = train(here, *words)
    assert "compiling the model" in shown and "compiled for training in" in shown and "none of 2 pieces" in shown
    before = [event for event in read_events(here / "run") if event["event"] == "compiled"]
    assert before[0]["misses"] == 2 and before[0]["hits"] == 0
    assert Path(before[0]["cache"]).is_relative_to(here / "cache" / "shoal" / "compile")

    second, shown = train(here, "--resume", "run", "train.steps=12")
    assert second["resumed_from_step"] == 6 and second["step"] == 12
    after = [event for event in read_events(here / "run") if event["event"] == "compiled"][len(before) :]
    assert [event["for"] for event in after] == ["training", "evaluation"]
    for event in after:
        assert event["hits"] > 0 and event["misses"] == 0 and event["from_cache"], event
    assert after[0]["hits"] == 2 and "all of 2 pieces of code from the cache" in shown
    assert after[0]["seconds"] < 0.6 * before[0]["seconds"], (before, after)
    assert second["seconds"]["compile"] < 0.6 * first["seconds"]["compile"]
