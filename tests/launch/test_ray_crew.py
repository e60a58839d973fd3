"""Places on a real Ray, in a process of its own: what an actor is given, and one that cannot start."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

_SCRIPT = """
    import os, sys, time
    import ray
    from shoal.launch.policy import Size
    from shoal.launch.ray_crew import RayCrew

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)

    def crew_of(gpus, until):
        crew = RayCrew(Size(2, 2), {"CPU": 1.0, "GPU": gpus}, f"test-{os.getpid()}")
        deadline = time.monotonic() + 60
        while not until(crew) and time.monotonic() < deadline:
            time.sleep(0.05)
        return crew
"""
_DEVICES = """
    for gpus in (1.0, 0.0):
        crew = crew_of(gpus, lambda crew: len(crew.members()) == 2)
        print([member.call("device").result(30) for member in crew.members()])
        crew.close()
"""
_TROUBLE = """
    crew = crew_of(0.0, lambda crew: crew.members() or "could not start" in crew.waiting_for())
    print(crew.waiting_for())
"""
_SHORT = """
    crew = crew_of(0.0, lambda crew: len(crew.members()) == 2)
    print(crew.is_short())
    second = RayCrew(Size(1, 2), {"CPU": 1.0}, f"test-{os.getpid()}")
    print(second.is_short())  # it may just be starting
    time.sleep(4.5)
    print(second.members(), second.is_short())
    crew.close()
    while not second.members():
        time.sleep(0.05)
    print(second.is_short())
"""


def told(script: str, folder: Path) -> list[str]:
    environment = {**os.environ, "TMPDIR": str(folder), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    command = [sys.executable, "-c", textwrap.dedent(_SCRIPT + script)]
    # Ray keeps sockets in its own, whose paths may not be long.
    with tempfile.TemporaryDirectory(prefix="shoal-ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        environment["RAY_TMPDIR"] = ray_folder
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()


@pytest.mark.slow
def test_a_worker_takes_the_gpu_that_ray_has_given_it_or_none(tmp_path: Path) -> None:
    # Each sees its own GPU alone, so it is number 0 for the second worker of a machine as well.
    assert told(_DEVICES, tmp_path) == [str([{"gpus": 1, "gpu": 0}] * 2), str([{"gpus": 0, "gpu": 0}] * 2)]


@pytest.mark.slow
def test_why_a_place_cannot_start_is_told_with_what_is_waited_for(tmp_path: Path) -> None:
    nurseries = tmp_path / f"shoal-{os.getuid()}"
    nurseries.mkdir()
    nurseries.chmod(0o755)
    (line,) = told(_TROUBLE, tmp_path)
    assert line.startswith("2 more workers of 1 CPU each; ") and "could not start: PermissionError: " in line
    assert str(nurseries) in line


@pytest.mark.slow
def test_places_for_which_there_is_no_room_are_told_from_those_that_start(tmp_path: Path) -> None:
    assert told(_SHORT, tmp_path) == ["False", "False", "[] True", "False"]
