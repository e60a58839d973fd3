"""Fixtures for runs of many workers."""

from typing import Any

import pytest

from tests.launch.watched import RECIPE, Run, losses_of


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `RECIPE` gives on two workers to which nothing happens, without Ray."""
    run = Run(tmp_path_factory.mktemp("undisturbed") / "run", *RECIPE, "--workers", "2", "--launcher", "local")
    return run.end() | {"losses": losses_of(run.folder)}
