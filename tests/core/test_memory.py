"""What a process does with memory that it has freed."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys, torch
from pathlib import Path
from shoal.core.memory import keep_freed_memory
if sys.argv[1] == "asked":
    print("kept" if keep_freed_memory() else "left alone")
address = torch.ones(7 << 20).data_ptr()  # 28 MB
(heap,) = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
first, last = (int(end, 16) for end in heap.split()[0].split("-"))
print("on the heap" if first <= address < last else "from the kernel")
"""


@pytest.mark.parametrize(
    ("asked", "variables", "told"),
    [
        ("asked", {}, ["kept", "on the heap"]),
        ("asked", {"MALLOC_ARENA_MAX": "2"}, ["left alone", "from the kernel"]),  # settings of the user's own stand
        ("not asked", {}, ["from the kernel"]),
    ],
)
def test_large_tensors_come_from_memory_that_is_kept(asked: str, variables: dict[str, str], told: list[str]) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=plain | variables)
    assert done.stdout.splitlines() == told
