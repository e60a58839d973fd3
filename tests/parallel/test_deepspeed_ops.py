"""What of DeepSpeed is compiled: told, waited for, ended with whoever wants it, and never waited for in vain."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.parallel import deepspeed_ops
from shoal.parallel.deepspeed_engine import environment, import_deepspeed
from shoal.parallel.deepspeed_ops import build, check_nvme, is_worked_in, missing_tools, remove_stale_lock
from tests.launch.processes import is_alive, wait_until_dead
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]

BUILDER = """
import os, subprocess, sys, time
from pathlib import Path
from shoal.parallel.deepspeed_ops import take_along

take_along(int(sys.argv[1]))
folder = Path(sys.argv[2])
(folder / "lock").touch()
try:
    compiler = subprocess.Popen(["sh", "-c", "sleep 300 & wait"], process_group=0, cwd=folder)
    (folder / "pids").write_text(f"{os.getpid()} {compiler.pid}")
    compiler.wait()
finally:
    (folder / "lock").unlink()
"""
"""As PyTorch and ninja do it: a lock, and a compiler in a group of its own."""

WORKER = """
import os, sys
from pathlib import Path
from shoal.parallel.deepspeed_ops import build

build([sys.executable, "-c", {builder!r}, str(os.getpid()), {folder!r}], print, [])
"""


def numbers_in(path: Path) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and len(numbers := path.read_text().split()) == 2:
            return [int(number) for number in numbers]
        time.sleep(0.02)
    raise AssertionError("nothing was built")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_is_being_built_goes_with_the_worker(tmp_path: Path, number: signal.Signals) -> None:
    code = WORKER.format(builder=BUILDER, folder=str(tmp_path))
    worker = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    builder, compiler = numbers_in(tmp_path / "pids")
    children = Path(f"/proc/{compiler}/task/{compiler}/children")
    while not (below := children.read_text().split()):
        time.sleep(0.02)
    assert is_alive(builder) and is_worked_in(tmp_path)
    worker.send_signal(number)
    worker.wait(timeout=20)
    wait_until_dead(builder, compiler, *map(int, below))
    assert not (tmp_path / "lock").exists() and not is_worked_in(tmp_path)


def test_a_build_is_told_once_and_what_it_said_where_it_fails(tmp_path: Path) -> None:
    told: list[str] = []
    libraries = [tmp_path / "some.so"]
    assert build([sys.executable, "-c", "print('fine')"], told.append, libraries) is None
    assert build([sys.executable, "-c", "print('bad'); raise SystemExit(1)"], told.append, libraries) == "bad\n"
    assert len(told) == 2 and told[0].startswith("building DeepSpeed's async_io on ")
    assert told[0].endswith("(once on a machine, some minutes)")


def test_a_look_that_there_is_nothing_to_build_is_not_told_unless_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    (tmp_path / "some.so").touch()
    assert build([sys.executable, "-c", "pass"], told.append, [tmp_path / "some.so"]) is None
    assert told == []
    monkeypatch.setattr(deepspeed_ops, "_SOON_S", 0.1)
    command = [sys.executable, "-c", "import time; time.sleep(0.5)"]
    assert build(command, told.append, [tmp_path / "some.so"]) is None
    assert len(told) == 1


def test_a_lock_that_nobody_builds_behind_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_ops, "_NOBODY_S", 0.3)
    told: list[str] = []
    assert remove_stale_lock(tmp_path, told.append) is None  # there is none
    (tmp_path / "lock").touch()
    began = time.monotonic()
    assert remove_stale_lock(tmp_path, told.append) is None
    assert not (tmp_path / "lock").exists() and told == []
    assert time.monotonic() - began > 0.3, "one that was just made may be of one who has not begun"


def test_a_lock_is_left_while_somebody_builds_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_ops, "_NOBODY_S", 0.3)
    told: list[str] = []
    (tmp_path / "lock").touch()
    compiler = subprocess.Popen(["sleep", "1.5"], cwd=tmp_path)
    began = time.monotonic()
    seen: list[bool] = []

    def tell(words: str) -> None:
        told.append(words)
        seen.append((tmp_path / "lock").exists())

    # It ends without removing its lock, as one that is killed does.
    waiting = threading.Thread(target=compiler.wait)
    waiting.start()
    assert remove_stale_lock(tmp_path, tell) is None
    waiting.join()
    assert time.monotonic() - began > 1.5 and not (tmp_path / "lock").exists()
    assert told == [f"waiting for another process that compiles in {tmp_path}"] and seen == [True]


def what_is_missing(process: Process, folder: Path, *there: str) -> list[str]:
    """Where programs are found nowhere else than in `folder`."""
    folder.mkdir()
    for name in there:
        (folder / name).write_text("#!/bin/sh\nexit 1\n")
        (folder / name).chmod(0o755)
    import_deepspeed(CPU)
    with environment(PATH=str(folder), CXX=""):
        return missing_tools()


def test_what_is_missing_to_compile_is_named_with_how_to_install_it(ranks: MakeRanks, tmp_path: Path) -> None:
    compiler, ninja = "a C++ compiler (Debian: apt-get install g++)", "ninja (pip install ninja)"
    assert ranks(1)(what_is_missing, tmp_path / "a") == [[compiler, ninja]]
    assert ranks(1)(what_is_missing, tmp_path / "b", "ninja") == [[compiler]]
    found = ranks(1)(what_is_missing, tmp_path / "c", "ninja", "c++")
    assert found == [["libaio (Debian: apt-get install libaio-dev)"]]


def one_worker_without_ninja(process: Process, folder: Path) -> str:
    deepspeed_ops._finds = lambda tool: tool != "ninja" or process.rank == 0
    deepspeed_ops._load, load = (lambda tell: None) if process.rank == 0 else deepspeed_ops._load, deepspeed_ops._load
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    try:
        check_nvme(folder / "disk", process)
    except UserError as error:
        return str(error)
    finally:
        deepspeed_ops._load = load
        del os.environ["TORCH_EXTENSIONS_DIR"]
    return ""


def test_what_one_machine_lacks_every_worker_tells_in_one_line(ranks: MakeRanks, tmp_path: Path) -> None:
    found = ranks(2)(one_worker_without_ninja, tmp_path)
    assert found[0] == found[1] and len(found[0].splitlines()) == 1
    assert found[0].startswith(
        "parallel.deepspeed: nvme needs DeepSpeed's async_io, which is compiled on each machine,"
    )
    assert found[0].endswith("lacks ninja (pip install ninja); install it, or offload to cpu")


def who_builds(process: Process, folder: Path, has_first: bool) -> list[tuple[str, float, float]]:
    """What this worker did while it held the lock."""
    did: list[tuple[str, float, float]] = []

    def load(tell: Any) -> None:
        began = time.monotonic()
        time.sleep(0.2)
        did.append((f"rank {process.rank}", began, time.monotonic()))

    saved, deepspeed_ops._load = deepspeed_ops._load, load
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    process = Process(process.rank, process.world_size, CPU, process.group, local_rank=process.rank)
    if not has_first and process.rank == 0:
        time.sleep(0.3)
    try:
        check_nvme(folder / "disk", process)
    finally:
        deepspeed_ops._load = saved
        del os.environ["TORCH_EXTENSIONS_DIR"]
    return did


@pytest.mark.parametrize("has_first", [True, False])
def test_workers_of_a_machine_take_turns_and_the_first_begins(
    ranks: MakeRanks, tmp_path: Path, has_first: bool
) -> None:
    (first,), (second,) = ranks(2)(who_builds, tmp_path, has_first)
    assert first[0] == "rank 0" and first[2] <= second[1]


def fail_to_compile(process: Process, folder: Path) -> str:
    said = "Error building extension 'async_io': [1/2] c++\na.cpp:1:10: fatal error: omp.h: No such file\nninja: stop\n"
    saved = deepspeed_ops.missing_tools, deepspeed_ops.build
    deepspeed_ops.missing_tools, deepspeed_ops.build = list, lambda *_: said
    try:
        with environment(TORCH_EXTENSIONS_DIR=str(folder / "extensions")):
            check_nvme(folder / "disk", process)
    except UserError as error:
        return str(error)
    finally:
        deepspeed_ops.missing_tools, deepspeed_ops.build = saved
    return ""


def test_a_failed_compilation_is_told_by_the_line_that_says_why(ranks: MakeRanks, tmp_path: Path) -> None:
    (told,) = ranks(1)(fail_to_compile, tmp_path)
    assert told.endswith("(a.cpp:1:10: fatal error: omp.h: No such file); look at the compiler, or offload to cpu")
    assert len(told.splitlines()) == 1


REAL = """
import sys, time
from pathlib import Path
import torch
from shoal.core.group import Meeting, joined
from shoal.core.process import Process
from shoal.parallel.deepspeed_ops import check_nvme

device = torch.device("cpu")
with joined(Meeting(rank=0, world_size=1, host="", port=0, timeout_s=600), device) as group:
    process = Process(0, 1, device, group, tell=lambda words: print(words, file=sys.__stdout__, flush=True))
    began = time.monotonic()
    check_nvme(Path(sys.argv[1]), process)
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_killed_build_leaves_nothing_that_the_next_one_waits_for(tmp_path: Path) -> None:
    """The real one, in a folder of its own: killed in the middle, then to the end, then with nothing to do."""
    if not all(map(shutil.which, ("c++", "ninja"))):
        pytest.skip("nothing can be compiled here")
    folder = tmp_path / "extensions"
    surroundings = os.environ | {"TORCH_EXTENSIONS_DIR": str(folder)}
    command = [sys.executable, "-c", textwrap.dedent(REAL), str(tmp_path / "disk")]
    first = subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not is_worked_in(folder / "pin_memory") and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    first.kill()
    said, _ = first.communicate()
    assert said.startswith("building DeepSpeed's async_io on ") and said.count("\n") == 1
    deadline = time.monotonic() + 5
    while is_worked_in(folder / "pin_memory") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_worked_in(folder / "pin_memory"), "compilers have outlived the worker"
    (folder / "pin_memory" / "lock").touch()  # as one leaves it whose builder was killed too
    second = subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, text=True, timeout=2000)
    assert second.returncode == 0 and second.stdout.count("building DeepSpeed's async_io on ") == 1
    third = subprocess.run(command, env=surroundings, stdout=subprocess.PIPE, text=True, timeout=300)
    assert third.returncode == 0 and "building" not in third.stdout
    assert float(third.stdout.split()[-2]) < 30
