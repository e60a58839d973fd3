"""Redis's password on its way to Ray: `test_head_restart.py` shows that a real head has it in no argument list."""

import os
import sys
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.deploy.head import _OF_GCS, PASSWORD, start_head, without_password


def test_the_gcs_is_sent_to_its_environment() -> None:
    command = ["gcs_server", "--redis_port=6379", "--redis_password=pass.word"]
    assert without_password(command, "pass.word") == ["gcs_server", "--redis_port=6379", "--fromenv=redis_password"]


def test_commands_within_a_command_lose_it_too() -> None:
    command = [
        "raylet",
        "--python_worker_command=python worker.py --redis-password=pass.word --node=1",
        "--java_worker_command=java -Dray.redis.password=pass.word",
        "--cpp_worker_command=cpp --ray_redis_password=pass.word --x",
        "--redis-password=pass.words",
    ]
    found = without_password(command, "pass.word")
    assert found[1] == "--python_worker_command=python worker.py --redis-password= --node=1"
    assert found[2] == "--java_worker_command=java -Dray.redis.password="
    assert found[3] == "--cpp_worker_command=cpp --ray_redis_password= --x"
    assert found[4] == "--redis-password=pass.words", "which is another word"


@pytest.mark.parametrize("password", ["", "two words", "line\nfeed"])
def test_a_password_that_cannot_be_handed_on_is_refused(password: str) -> None:
    with pytest.raises(UserError, match=PASSWORD):
        start_head(["--head"], {PASSWORD: password})


def test_ray_is_started_with_it_and_only_the_gcs_finds_it_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services
    from ray.scripts import scripts

    started: list[tuple[str, list[str], str | None]] = []

    def start_process(command: list[str], process_type: str, **options: Any) -> None:
        started.append((process_type, command, os.environ.get(_OF_GCS)))

    def cli(words: list[str], **options: Any) -> None:
        password = words[words.index("--redis-password") + 1]
        services.start_ray_process(["gcs_server", f"--redis_password={password}"], "gcs_server")
        services.start_ray_process(["raylet", f"--worker=python --redis-password={password}"], "raylet")

    monkeypatch.setattr(services, "start_ray_process", start_process)
    monkeypatch.setattr(scripts, "cli", cli)
    monkeypatch.setenv(PASSWORD, "secret")
    start_head(["--head"], dict(os.environ))
    assert started == [
        ("gcs_server", ["gcs_server", "--fromenv=redis_password"], "secret"),
        ("raylet", ["raylet", "--worker=python --redis-password="], None),
    ]
    assert "secret" not in " ".join(sys.argv)
