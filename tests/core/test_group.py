"""What workers tell each other: real processes, joined as a launcher joins them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shoal.core.group import Group, Meeting, joined
from shoal.core.process import Process
from tests.many import CPU, Ranks

MakeRanks = Callable[[int], Ranks]
UNEQUAL: list[Any] = [
    None,
    "",
    "Fluß \N{SNOWMAN} \N{GRINNING FACE}",
    {"a": [1, 2.5, None, {"b": "x" * 100_000}]},
    [],
    1e300,
    True,
]


def gathered(process: Process, values: list[Any]) -> list[Any]:
    """Every value once from every rank, each rank with another one at a time."""
    return [process.group.gather(values[(place + process.rank) % len(values)]) for place in range(len(values))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_everybody_gets_everybodys_value_whatever_its_length(ranks: MakeRanks, world_size: int) -> None:
    expected = [[UNEQUAL[(place + rank) % len(UNEQUAL)] for rank in range(world_size)] for place in range(len(UNEQUAL))]
    assert ranks(world_size)(gathered, UNEQUAL) == [expected] * world_size


def from_first(process: Process) -> Any:
    return process.group.from_first({"rank": process.rank, "text": "é" * (process.rank + 1)})


def test_what_the_first_says_counts(ranks: MakeRanks) -> None:
    assert ranks(3)(from_first) == [{"rank": 0, "text": "é"}] * 3


def summed_and_largest(process: Process) -> Any:
    group, rank = process.group, process.rank
    waiting = group.start_sum(rank, 2**53 if rank == 0 else -(2**53))
    largest = group.start_max(-1.0 * rank, float("inf") if rank == 2 else 0)
    return group.sum(1, 0.5 * rank), largest(), waiting()


def test_sums_and_maxima_are_the_same_for_all_and_may_overlap(ranks: MakeRanks) -> None:
    assert ranks(3)(summed_and_largest) == [([3, 1.5], [0, float("inf")], [3, -(2**53)])] * 3


def not_json(process: Process) -> str:
    with pytest.raises(TypeError):
        process.group.gather(object())
    return str(process.group.from_first("still together"))


def test_what_json_cannot_hold_is_refused_before_anything_is_sent(ranks: MakeRanks) -> None:
    assert ranks(2)(not_json) == ["still together"] * 2


def listening(process: Process) -> list[str]:
    """The addresses and ports that this process listens at, as the kernel tells."""
    process.group.sum(1)
    targets = []
    for file in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(file.readlink()))
        except FileNotFoundError:  # the one that listed them
            continue
    own = {match[1] for target in targets if (match := re.match(r"socket:\[(\d+)\]", target))}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in own:  # 0A: listening
                found.append(fields[1])
    return found


def test_nothing_listens_beyond_loopback_while_workers_are_joined(ranks: MakeRanks) -> None:
    first, second = ranks(2)(listening)
    assert first, "the store listens"
    assert all(address.split(":")[0] == "0100007F" for address in first + second), (first, second)


def test_a_group_of_one_needs_nobody() -> None:
    group = Group()
    assert (group.rank, group.world_size) == (0, 1)
    value = object()
    assert group.gather(value) == [value] and group.from_first(value) is value
    assert group.sum(1.5, 2) == [1.5, 2] and group.start_max(3)() == [3]


def test_one_worker_can_join_a_group_of_its_own_without_a_port() -> None:
    with joined(Meeting(0, 1, "", 0, timeout_s=10.0), CPU) as group:
        assert dist.is_initialized() and (group.rank, group.world_size) == (0, 1)
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1]
    assert not dist.is_initialized()


def test_the_group_is_left_when_something_fails_inside() -> None:
    with pytest.raises(KeyError), joined(Meeting(0, 1, "", 0, timeout_s=10.0), CPU):
        raise KeyError("x")
    assert not dist.is_initialized()
