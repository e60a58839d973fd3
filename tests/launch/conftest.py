"""Fixtures for runs of many workers."""

from typing import Any

import pytest

from tests.launch.watched import RECIPE, Run, losses_of


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `RECIPE` gives on two workers to which nothing happens, without Ray."""
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run", *RECIPE, "--workers", "2", "--launcher", "local")
    return run.end() | {"losses": losses_of(run.folder)}


@pytest.fixture(scope="session")
def undisturbed_digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`digits` on two workers to which nothing happens, and how it was changed."""
    overrides = {
        "train.steps": 60,
        "checkpoint.every_steps": 10,
        "cluster.gpus_per_worker": 0,
        "cluster.threads_per_worker": 1,
    }
    words = [f"{name}={value}" for name, value in overrides.items()]
    run = Run(tmp_path_factory.mktemp("digits") / "run", "digits", *words, "--workers", "2", "--launcher", "local")
    return run.end() | {"overrides": overrides}
