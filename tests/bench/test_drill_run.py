"""The hands of a drill: whom they reach, and what they leave alone."""

import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.bench.drill_breaks import flip_a_bit
from shoal.bench.drill_run import OverError, held, last_step, on_this_machine
from shoal.core.errors import RunError, UserError


def test_a_process_that_is_no_worker_is_left_alone() -> None:
    other = subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1)
    with other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(RunError, match=f"process {other.pid} on this machine is no worker"):
            held({"rank": 1, "pid": other.pid}).__enter__()
        assert other.poll() is None
        other.communicate(b"\n")
        assert other.returncode == 0
    with pytest.raises(OverError, match="the process of worker 1 had ended"):
        held({"rank": 1, "pid": other.pid}).__enter__()


def test_workers_of_other_machines_are_out_of_reach() -> None:
    here, there = {"rank": 0, "host": socket.gethostname()}, {"rank": 1, "host": "elsewhere"}
    assert on_this_machine([there, here]) == [here]
    with pytest.raises(UserError, match=r"--address: the workers run on elsewhere, .* start the drill there"):
        on_this_machine([there])


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    before = bytes(range(256))
    places = set()
    for seed in range(20):
        (tmp_path / "file").write_bytes(before)
        flip_a_bit(tmp_path / "file", random.Random(seed))
        after = (tmp_path / "file").read_bytes()
        assert len(after) == len(before)
        assert sum((one ^ other).bit_count() for one, other in zip(before, after, strict=True)) == 1
        places.add(after)
    assert len(places) > 15


@pytest.mark.parametrize(
    ("text", "step"),
    [("", 0), ('{"step": 3}\n{"step": 4}\n', 4), ('{"step": 3}\n{"ste', 3), ('{"step": 3}\nnull\n', 3)],
)
def test_the_newest_step_is_that_of_the_last_whole_line(tmp_path: Path, text: str, step: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with (tmp_path / "metrics.jsonl").open("rb") as file:
        assert last_step(file) == step
