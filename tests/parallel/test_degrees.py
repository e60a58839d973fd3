"""Workers are divided as a recipe says; what does not divide is told with the nearest that does."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.degrees import Degrees, DegreesError, by_node, find_degrees, in_words
from shoal.parallel.section import ParallelSection


@pytest.mark.parametrize(
    ("strategy", "section", "workers", "expected"),
    [
        ("single", {}, 1, Degrees(1)),
        ("ddp", {}, 6, Degrees(6)),
        ("auto", {}, 6, Degrees(6)),
        ("fsdp", {}, 6, Degrees(1, shards=6)),
        ("fsdp", {"fsdp": {"shard_size": 2}}, 6, Degrees(3, shards=2)),
        ("fsdp", {"fsdp": {"shard_size": 1}}, 6, Degrees(6, shards=1)),
        ("fsdp", {"fsdp": {"shard_size": 6}}, 6, Degrees(1, shards=6)),
        ("deepspeed", {"fsdp": {"shard_size": 4}}, 6, Degrees(1, shards=6)),
        ("pipeline", {}, 6, Degrees(1, stages=6)),
        ("pipeline", {"pipeline": {"stages": 3}}, 6, Degrees(2, stages=3)),
        ("tensor", {}, 6, Degrees(1, tensor=6)),
        ("tensor", {"tensor": {"size": 2}}, 6, Degrees(3, tensor=2)),
        ("tensor", {"tensor": {"size": 2}, "fsdp": {"shard_size": 5}}, 6, Degrees(3, tensor=2)),
        ("tensor", {"tensor": {"size": 2, "across": "fsdp"}}, 6, Degrees(1, shards=3, tensor=2)),
        (
            "tensor",
            {"tensor": {"size": 2, "across": "fsdp"}, "fsdp": {"shard_size": 2}},
            8,
            Degrees(2, shards=2, tensor=2),
        ),
    ],
    ids=str,
)
def test_how_workers_are_divided(strategy, section, workers, expected):
    found = find_degrees(ParallelSection(strategy=strategy, **section), strategy, workers)
    assert found == expected
    assert found.copies * found.shards * found.stages * found.tensor == workers
    assert found.data == workers // (found.stages * found.tensor)


def test_a_node_is_as_large_as_it_is_and_as_all_where_that_is_not_known():
    by_machine = ParallelSection(fsdp={"shard_size": "node"})
    assert find_degrees(by_machine, "fsdp", 8) == Degrees(1, shards=8)
    assert find_degrees(by_machine, "fsdp", 8, node_workers=4) == Degrees(2, shards=4)
    assert find_degrees(by_machine, "fsdp", 8, node_workers=1) == Degrees(8, shards=1)
    shared = ParallelSection(fsdp={"shard_size": "node"}, tensor={"size": 2, "across": "fsdp"})
    assert find_degrees(shared, "tensor", 8) == Degrees(1, shards=4, tensor=2)
    assert find_degrees(shared, "tensor", 8, node_workers=4) == Degrees(2, shards=2, tensor=2)
    assert find_degrees(shared, "tensor", 8, node_workers=2) == Degrees(4, shards=1, tensor=2)
    for node_workers in (3, 1):
        with pytest.raises(DegreesError, match=f"node needs whole groups .* {node_workers} workers are no groups of 2"):
            find_degrees(shared, "tensor", 6, node_workers)
    assert find_degrees(ParallelSection(fsdp={"shard_size": 2}), "fsdp", 8, node_workers=4) == Degrees(4, shards=2)


def test_machines_count_only_where_the_recipe_says_so():
    across = {"tensor": {"across": "fsdp"}}
    asked = [
        (strategy, shard_size, bool(more))
        for strategy, shard_size, more in itertools.product(
            ("ddp", "fsdp", "deepspeed", "pipeline", "tensor"), ("node", 2, None), ({}, across)
        )
        if by_node(ParallelSection(fsdp={"shard_size": shard_size}, **more), strategy)
    ]
    assert asked == [("fsdp", "node", False), ("fsdp", "node", True), ("tensor", "node", True)]


@pytest.mark.parametrize(
    ("strategy", "section", "workers", "field", "words"),
    [
        ("pipeline", {"pipeline": {"stages": 4}}, 6, ("pipeline", "stages"), "4 does not divide the 6 workers .*: 3$"),
        ("tensor", {"tensor": {"size": 5}}, 8, ("tensor", "size"), "5 does not divide the 8 workers .*: 4$"),
        (
            "fsdp",
            {"fsdp": {"shard_size": 3}},
            4,
            ("fsdp", "shard_size"),
            "3 does not divide the 4 workers .*: 2 and 4$",
        ),
        ("fsdp", {"fsdp": {"shard_size": 9}}, 4, ("fsdp", "shard_size"), "9 does not divide the 4 workers .*: 4$"),
        (
            "tensor",
            {"tensor": {"size": 2, "across": "fsdp"}, "fsdp": {"shard_size": 4}},
            12,
            ("fsdp", "shard_size"),
            "4 does not divide the 6 groups of 2 workers into equal groups; nearest that does: 3$",
        ),
    ],
)
def test_what_does_not_divide_is_told_with_the_nearest_that_does(strategy, section, workers, field, words):
    with pytest.raises(DegreesError, match=words) as caught:
        find_degrees(ParallelSection(**section), strategy, workers)
    assert caught.value.field == field


@given(size=st.integers(1, 40), workers=st.integers(1, 40))
def test_the_nearest_that_is_told_works(size, workers):
    try:
        found = find_degrees(ParallelSection(pipeline={"stages": size}), "pipeline", workers)
    except DegreesError as error:
        assert workers % size
        best = int(str(error).rpartition(" ")[2])
        assert find_degrees(ParallelSection(pipeline={"stages": best}), "pipeline", workers).stages == best
        nearer = [n for n in range(1, workers + 1) if workers % n == 0 and abs(n - size) < abs(best - size)]
        assert nearer == []
    else:
        assert (found.stages, found.copies) == (size, workers // size)


@pytest.mark.parametrize(
    ("section", "workers", "words"),
    [
        ({"strategy": "ddp"}, 4, "ddp"),
        ({"strategy": "fsdp"}, 4, "fsdp"),
        ({"strategy": "fsdp", "fsdp": {"shard_size": 2, "cpu_offload": True}}, 6, "fsdp 2 x ddp 3, offloaded"),
        ({"strategy": "deepspeed", "deepspeed": {"stage": 1}}, 4, "zero-1"),
        ({"strategy": "deepspeed", "deepspeed": {"stage": 3, "offload_params": "cpu"}}, 4, "zero-3, offloaded"),
        ({"strategy": "pipeline"}, 4, "pipeline 4, 1f1b"),
        ({"strategy": "pipeline", "pipeline": {"stages": 2, "schedule": "gpipe"}}, 4, "pipeline 2 x ddp 2, gpipe"),
        ({"strategy": "tensor"}, 4, "tensor 4"),
        ({"strategy": "tensor", "tensor": {"size": 2}}, 4, "tensor 2 x ddp 2"),
        ({"strategy": "tensor", "tensor": {"size": 2, "across": "fsdp"}}, 6, "tensor 2 x fsdp 3"),
    ],
)
def test_a_strategy_is_told_with_its_sizes(section, workers, words):
    found = ParallelSection(**section)
    assert in_words(found, found.strategy, find_degrees(found, found.strategy, workers)) == words
