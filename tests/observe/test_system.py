import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.observe.system import NAMES, SystemWatch


def test_what_this_process_uses() -> None:
    watch = SystemWatch()
    block = bytearray(os.urandom(1)) * 50_000_000
    deadline = time.perf_counter() + 0.4
    while time.perf_counter() < deadline:
        pass
    used = watch.ask()
    assert set(used) <= set(NAMES)
    assert 0.3 < used["cpu_cores"] < 1.7, "one core was kept busy"
    assert used["memory_bytes"] > len(block)
    assert 0 < used["host_memory_used"] < 1
    time.sleep(0.3)
    assert watch.ask()["cpu_cores"] < 0.5, "a rate is one since it was asked before"


def test_processes_that_read_for_a_worker_count_as_its_own() -> None:
    watch = SystemWatch()
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.8)
        assert watch.ask()["cpu_cores"] > 0.3
    finally:
        busy.kill()
        busy.wait()


def test_bytes_that_are_written(tmp_path: Path) -> None:
    watch = SystemWatch()
    if "disk_written_bytes_per_s" not in watch.ask():
        pytest.skip("this system does not tell what a process writes")
    with (tmp_path / "file").open("wb") as file:
        file.write(os.urandom(8_000_000))
        file.flush()
        os.fsync(file.fileno())
    assert watch.ask()["disk_written_bytes_per_s"] > 0


def test_a_gpu_that_is_not_there_is_no_trouble() -> None:
    used = SystemWatch(gpu=7).ask()
    assert "cpu_cores" in used
    assert not any(name.startswith("gpu_") for name in used)


@pytest.mark.alone
def test_asking_costs_little() -> None:
    watch = SystemWatch()
    began = time.perf_counter()
    for _ in range(50):
        watch.ask()
    assert (time.perf_counter() - began) / 50 < 0.005
