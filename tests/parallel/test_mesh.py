"""The block of workers: neighbours are those who talk most, and everybody has one place in it."""

import dataclasses

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.parallel.mesh import COPIES, SHARDS, STAGES, TENSOR, build_mesh, on_whole_mesh
from shoal.parallel.section import ParallelSection
from tests.many import CPU

ACROSS = {"tensor": {"size": 2, "across": "fsdp"}}


def place(process: Process, strategy: str, section: dict, nodes: tuple[str, ...] = ()) -> dict:
    if nodes:
        process = dataclasses.replace(process, node=nodes[process.rank])
    mesh = build_mesh(ParallelSection(strategy=strategy, **section), strategy, process)
    parts = {}
    for side in (STAGES, COPIES, SHARDS, TENSOR):
        part = mesh.part(side)
        if part is not None:
            parts[side] = part.mesh.tolist()
    data = mesh.part(COPIES, SHARDS)
    return {
        "sides": dict(zip(mesh.whole.mesh_dim_names, mesh.whole.mesh.shape, strict=True)),
        "at": (mesh.stage, mesh.data_rank, mesh.tensor_rank),
        "parts": parts,
        "data": None if data is None else data.mesh.tolist(),
    }


@pytest.mark.parametrize(
    ("strategy", "section", "sides", "at", "last"),
    [
        ("ddp", {}, {"copies": 4}, [(0, n, 0) for n in range(4)], {"copies": [0, 1, 2, 3]}),
        ("fsdp", {}, {"shards": 4}, [(0, n, 0) for n in range(4)], {"shards": [0, 1, 2, 3]}),
        (
            "fsdp",
            {"fsdp": {"shard_size": 2}},
            {"copies": 2, "shards": 2},
            [(0, n, 0) for n in range(4)],
            {"copies": [1, 3], "shards": [2, 3]},
        ),
        (  # each worker a copy: the copies must not be taken for shards
            "fsdp",
            {"fsdp": {"shard_size": 1}},
            {"copies": 4, "shards": 1},
            [(0, n, 0) for n in range(4)],
            {"copies": [0, 1, 2, 3], "shards": [3]},
        ),
        ("deepspeed", {}, {"shards": 4}, [(0, n, 0) for n in range(4)], {"shards": [0, 1, 2, 3]}),
        (
            "pipeline",
            {},
            {"stages": 4, "copies": 1},
            [(n, 0, 0) for n in range(4)],
            {"stages": [0, 1, 2, 3], "copies": [3]},
        ),
        (
            "pipeline",
            {"pipeline": {"stages": 2}},
            {"stages": 2, "copies": 2},
            [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)],
            {"stages": [1, 3], "copies": [2, 3]},
        ),
        ("tensor", {}, {"tensor": 4}, [(0, 0, n) for n in range(4)], {"tensor": [0, 1, 2, 3]}),
        (
            "tensor",
            {"tensor": {"size": 2}},
            {"copies": 2, "tensor": 2},
            [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)],
            {"copies": [1, 3], "tensor": [2, 3]},
        ),
        (
            "tensor",
            ACROSS,
            {"shards": 2, "tensor": 2},
            [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)],
            {"shards": [1, 3], "tensor": [2, 3]},
        ),
        (
            "tensor",
            {**ACROSS, "fsdp": {"shard_size": 1}},
            {"copies": 2, "shards": 1, "tensor": 2},
            [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)],
            {"copies": [1, 3], "shards": [3], "tensor": [2, 3]},
        ),
    ],
    ids=str,
)
def test_everybody_has_a_place(ranks, strategy, section, sides, at, last):
    found = ranks(4)(place, strategy, section)
    assert [worker["sides"] for worker in found] == [sides] * 4
    assert list(found[0]["sides"]) == list(sides), "from the outermost to the innermost"
    assert [worker["at"] for worker in found] == at
    assert found[3]["parts"] == last


def test_the_workers_of_one_machine_divide_a_copy(ranks):
    by_machine = {"fsdp": {"shard_size": "node"}}
    for nodes, sides in (
        (("a", "a", "b", "b"), {"copies": 2, "shards": 2}),
        (("a", "a", "a", "a"), {"shards": 4}),
        (("", "", "", ""), {"shards": 4}),
        (("a", "b", "c", "d"), {"copies": 4, "shards": 1}),
    ):
        assert [worker["sides"] for worker in ranks(4)(place, "fsdp", by_machine, nodes)] == [sides] * 4
    found = ranks(4)(place, "fsdp", by_machine, ("a", "a", "b", "b"))
    assert found[2]["data"] == [[0, 1], [2, 3]] and found[2]["parts"]["shards"] == [2, 3]


def refused(process: Process, section: dict, nodes: tuple[str, ...]) -> str:
    with pytest.raises(UserError) as caught:
        place(process, "fsdp", section, nodes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "counts"),
    [(("a", "a", "a", "b"), "3, 1"), (("a", "b", "a", "b"), "2, 2"), (("a", "b", "b", "c"), "1, 2, 1")],
    ids="".join,
)
def test_machines_that_differ_are_refused_on_every_worker_where_they_count(ranks, nodes, counts):
    found = ranks(4)(refused, {"fsdp": {"shard_size": "node"}}, nodes)
    assert len(set(found)) == 1
    assert found[0].startswith("parallel.fsdp.shard_size: node needs as many workers on each machine")
    assert found[0].endswith(f"there are {counts}; set a number, or null for one copy of the model over all of them")
    assert ranks(4)(place, "fsdp", {"fsdp": {"shard_size": 2}}, nodes)[0]["sides"] == {"copies": 2, "shards": 2}


def test_what_does_not_divide_is_a_users_error():
    with pytest.raises(UserError, match=r"^parallel\.fsdp\.shard_size: 3 does not divide the 4 workers"):
        build_mesh(ParallelSection(fsdp={"shard_size": 3}), "fsdp", Process(0, 4, CPU))


def widened(process: Process) -> list:
    mesh = build_mesh(ParallelSection(**ACROSS), "tensor", process)
    whole = torch.arange(35.0).reshape(5, 7)
    shards, tensor = mesh.part(SHARDS), mesh.part(TENSOR)
    found = []
    for side, placement in ((shards, Shard(0)), (tensor, Shard(1)), (tensor, Replicate())):
        part = DTensor.from_local(whole, side, [Replicate()], run_check=False).redistribute(placements=[placement])
        wide = on_whole_mesh(part, mesh)
        same = torch.equal(wide.to_local(), part.to_local()) and on_whole_mesh(wide, mesh) is wide
        found.append((wide.placements, same, torch.equal(wide.full_tensor(), whole), tuple(wide.shape)))
    plain = on_whole_mesh(whole, mesh)
    found.append((plain.placements, plain.to_local().data_ptr() == whole.data_ptr(), True, tuple(plain.shape)))
    return found


def test_a_tensor_of_some_sides_is_the_same_along_the_others(ranks):
    for worker in ranks(4)(widened):
        assert [placements for placements, *_ in worker] == [
            (Shard(0), Replicate()),
            (Replicate(), Shard(1)),
            (Replicate(), Replicate()),
            (Replicate(), Replicate()),
        ]
        assert all(same and whole and shape == (5, 7) for _, same, whole, shape in worker)
