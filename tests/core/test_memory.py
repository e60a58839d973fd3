"""What a process does with memory that it has freed."""

import subprocess
import sys

PROGRAM = """
import resource, sys, torch
from shoal.core.memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def steps(number):
    for _ in range(number):
        tensors = [torch.ones(4 << 20), torch.ones(12 << 20)]  # 16 and 48 MB
        del tensors
steps(10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
steps(5)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_step_takes_its_memory_from_the_step_before() -> None:
    assert _page_faults("kept") < 100
    assert _page_faults("as usual") > 10_000, "otherwise there is nothing to gain"
