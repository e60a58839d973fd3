"""The simulation of a step: events, what a strategy sends and when, and how long a network takes for it."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.bench.comm import SMALL_VIT, TINY_VIT
from shoal.bench.simulate import DEFAULT_STRATEGIES, Known, Settings, gpu_counts, predict, simulate
from shoal.bench.simulate_check import divided
from shoal.bench.simulate_events import COMPUTE, Task, run
from shoal.bench.simulate_given import from_words, traced_shape
from shoal.bench.simulate_network import FIGURES, NETWORKS, Collective, Members, Message, find_network
from shoal.bench.simulate_plan import STRATEGIES, Place, Rules, packing_s, tasks_of
from shoal.bench.simulate_recipes import SIMULATED, one_micro_batch, recipe_for, rules_of
from shoal.bench.simulate_work import ROOT, Phases, Shape, Weight, buckets, by_weights, from_record
from shoal.core.errors import UserError
from shoal.core.process import Process
from shoal.parallel.degrees import find_degrees
from shoal.parallel.sizes import Way
from shoal.parallel.traffic import sent
from shoal.recipe.load import check_tree, load_recipe
from shoal.train.build import build
from shoal.train.trace import Tracer
from tests.many import Ranks

MIB = 2**20


# Events.


def message(seconds: float, *after: int, wire: str = "network", busy: float = 0.0) -> Task:
    return Task("message", wire, seconds, after, busy)


def computing(seconds: float, *after: int) -> Task:
    return Task("computing", COMPUTE, seconds, after)


def test_a_message_is_hidden_behind_what_is_computed_meanwhile() -> None:
    line = run([computing(3), message(2, 0), computing(4), computing(1, 1)])
    assert line.starts == [0, 3, 3, 7] and line.ends == [3, 5, 7, 8]
    assert line.total_s == 8 and line.exposed_s == 0


def test_what_outlasts_the_computing_is_exposed() -> None:
    line = run([computing(1), message(5, 0), computing(2), computing(1, 1)])
    assert line.total_s == 7 and line.exposed_s == 3


def test_a_wire_takes_one_message_at_a_time_the_one_that_waits_longest_first() -> None:
    tasks = [computing(1), message(4, 0), computing(1), computing(1), message(1, 3), message(2, 2)]
    line = run(tasks)
    assert line.starts[1] == 1 and line.starts[5] == 5 and line.starts[4] == 7 and line.total_s == 8
    apart = run([*tasks[:5], message(2, 2, wire="another")])
    assert apart.starts[5] == 2 and apart.starts[4] == 5


@pytest.mark.parametrize(("busy", "message_ends", "total"), [(0.0, 2, 4), (0.5, 3, 5), (1.0, 4, 6)])
def test_what_takes_a_core_slows_down_what_is_computed_beside_it(
    busy: float, message_ends: float, total: float
) -> None:
    line = run([computing(4), message(2, busy=busy)])
    assert line.ends == pytest.approx([total, message_ends]) and line.exposed_s == 0
    alone = run([message(2, busy=busy)])
    assert alone.total_s == alone.exposed_s == 2


def test_nothing_and_what_takes_no_time() -> None:
    assert run([]).total_s == 0
    assert run([computing(0), message(0, 0), computing(0, 1)]).ends == [0, 0, 0]


TASKS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 9), st.sets(st.integers(0, 8), max_size=3)), min_size=1, max_size=9
).map(
    lambda rows: [
        Task("", COMPUTE if computes else "network", seconds, tuple(number for number in after if number < index))
        for index, (computes, seconds, after) in enumerate(rows)
    ]
)


@given(TASKS)
def test_a_step_takes_what_it_computes_and_what_it_waits_for(tasks: list[Task]) -> None:
    line = run(tasks)
    computed = sum(task.seconds for task in tasks if task.stream == COMPUTE)
    assert line.total_s == pytest.approx(computed + line.exposed_s)
    assert line.total_s <= sum(task.seconds for task in tasks) + 1e-9
    for number, task in enumerate(tasks):
        assert all(line.ends[before] <= line.starts[number] for before in task.after)
        assert line.ends[number] - line.starts[number] == pytest.approx(task.seconds)


# What is sent.


@dataclass
class Counted:
    """A network that takes a second a MiB, and remembers what it was asked."""

    waits: bool = False
    seconds_per_mib: float = 1.0
    asked: list[tuple[str, float, Members]] = field(default_factory=list)

    def message(self, collective: Collective, num_bytes: float, members: Members, dtype: str = "fp32") -> Message:
        self.asked.append((collective, num_bytes, members))
        return Message(self.seconds_per_mib * num_bytes / MIB)

    def sent(self, between: bool = False) -> float:
        """By one worker; or what of it goes to other machines."""
        total = 0.0
        for collective, num_bytes, members in self.asked:
            share = (members.size - 1) / members.size
            if between:
                share = (members.nodes - 1) / members.nodes / members.on_node
            total += (2 if collective == "all_reduce" else 1) * share * num_bytes
        return total


def two_blocks(block: int = 0, other: int = 1) -> Shape:
    """A weight of 1 MiB in each of two parts, and all time in them."""
    weights = (Weight(block, 512, 512), Weight(other, 512, 512))
    return Shape(weights, (0.0, 0.5, 0.5, 0.0), (0.0, 0.5, 0.5, 0.0), (1.0, 0.5))


def test_ddp_sends_buckets_while_it_computes_on() -> None:
    tasks = tasks_of("ddp", two_blocks(), Phases(1, 2, 0.5), Rules(bucket_mb=1), Place(2, 2), Counted())
    line = run(tasks)
    sends = [line.starts[number] for number, task in enumerate(tasks) if task.stream != COMPUTE]
    assert sends == [2, 3] and line.total_s == 4.5 and line.exposed_s == 1
    together = run(tasks_of("ddp", two_blocks(), Phases(1, 2, 0.5), Rules(bucket_mb=25), Place(2, 2), Counted()))
    assert together.total_s == 5.5 and together.exposed_s == 2
    halved = run(tasks_of("ddp_bf16", two_blocks(), Phases(1, 2, 0.5), Rules(bucket_mb=1), Place(2, 2), Counted()))
    assert halved.total_s == 4 and halved.exposed_s == 0.5


def test_ddp_sends_in_the_last_micro_batch_alone() -> None:
    rules = Rules(bucket_mb=1, micro_batches=4)
    line = run(tasks_of("ddp", two_blocks(), Phases(4, 8, 0.5), rules, Place(2, 2), Counted()))
    assert line.total_s == 13.5 and line.exposed_s == 1


def test_fsdp_gathers_a_block_ahead_where_the_network_goes_on_beside_computing() -> None:
    line = run(tasks_of("fsdp", two_blocks(), Phases(2, 4, 0), Rules(), Place(2, 2), Counted()))
    assert line.total_s == 9 and line.exposed_s == 3
    kept = run(tasks_of("fsdp", two_blocks(), Phases(2, 4, 0), Rules(gathers_again=False), Place(2, 2), Counted()))
    assert kept.total_s == 8 and kept.exposed_s == 2


def test_fsdp_waits_for_every_message_where_workers_wait() -> None:
    wires = Counted(waits=True)
    line = run(tasks_of("fsdp", two_blocks(), Phases(2, 4, 0), Rules(), Place(2, 2), wires))
    assert line.total_s == 12 and line.exposed_s == 6
    assert [name for name, _, _ in wires.asked] == ["all_gather"] * 3 + [
        "reduce_scatter",
        "all_gather",
        "reduce_scatter",
    ]


def test_fsdp_gathers_what_is_in_no_block_before_each_pass_and_sums_it_last() -> None:
    wires = Counted(waits=True)
    tasks = tasks_of("fsdp", two_blocks(ROOT, 0), Phases(2, 4, 1), Rules(clips=True), Place(2, 2), wires)
    names = [task.name for task in tasks if task.stream != COMPUTE]
    assert names == ["gather -1", "gather 0", "gather -1", "gather 0", "reduce 0", "reduce -1", "norm"]
    assert run(tasks).ends[-1] == pytest.approx(13 + 4 / MIB)


def test_fsdp_sums_after_every_micro_batch_or_after_the_last() -> None:
    for each, count in ((True, 6), (False, 2)):
        wires, rules = Counted(), Rules(micro_batches=3, reduces_each=each)
        run(tasks_of("fsdp", two_blocks(), Phases(2, 4, 0), rules, Place(2, 2), wires))
        assert [name for name, _, _ in wires.asked].count("reduce_scatter") == count
        assert [name for name, _, _ in wires.asked].count("all_gather") == 12


def test_hsdp_gathers_inside_of_a_machine_and_sums_shards_between_machines_meanwhile() -> None:
    wires = Counted()
    line = run(tasks_of("hsdp", two_blocks(), Phases(2, 4, 0), Rules(), Place(4, 2), wires))
    assert {(name, size / MIB, who.size, who.nodes) for name, size, who in wires.asked} == {
        ("all_gather", 1, 2, 1),
        ("reduce_scatter", 1, 2, 1),
        ("all_reduce", 0.5, 2, 2),
    }
    assert line.total_s == 9.5  # the sum of the first shards is hidden, that of the last is not
    of_one = Counted()
    run(tasks_of("hsdp", two_blocks(), Phases(2, 4, 0), Rules(), Place(2, 2), of_one))
    assert {name for name, _, _ in of_one.asked} == {"all_gather", "reduce_scatter"}


def test_powersgd_sends_small_factors_one_after_the_other() -> None:
    weights = (Weight(ROOT, 512, 1), Weight(ROOT, 512, 512), Weight(ROOT, 8, 8))
    shape = by_weights(weights)
    for waits, total in ((False, 5.0), (True, 5.0)):
        wires = Counted(waits, seconds_per_mib=0.0)
        line = run(tasks_of("ddp_powersgd", shape, Phases(1, 2, 2), Rules(powersgd_rank=4), Place(2, 2), wires))
        assert [size for _, size, _ in wires.asked] == [4 * (512 + 64), 4 * 2048, 4 * 2048] and line.total_s == total
    assert weights[1].low_rank(4) == (2048, 2048) and weights[2].low_rank(4) is weights[0].low_rank(4) is None


def test_powersgd_keeps_the_next_bucket_waiting_where_workers_wait() -> None:
    totals = []
    for waits in (False, True):
        wires = Counted(waits, seconds_per_mib=100.0)
        own = Phases(1, 2, 0.5)
        totals.append(run(tasks_of("ddp_powersgd", two_blocks(), own, Rules(bucket_mb=1), Place(2, 2), wires)).total_s)
    each = 100 * 2 * 4 * 2048 / MIB
    assert totals == pytest.approx([3.5 + each + max(0.0, each - 1), 3.5 + 2 * each])


def test_buffers_are_sent_before_anything_is_computed() -> None:
    shape = replace(two_blocks(), buffers=MIB)
    line = run(tasks_of("ddp", shape, Phases(1, 2, 0.5), Rules(bucket_mb=1), Place(2, 2), Counted()))
    assert line.total_s == 5.5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "ddp_bf16", "ddp_powersgd"])
def test_as_much_is_sent_as_shoal_plan_says(strategy: str) -> None:
    """Another piece of code, which computes the traffic of a step from a traced model."""
    loaded = load_recipe([SMALL_VIT], {"parallel.fsdp.shard_size": 4 if strategy == "hsdp" else None})
    recipe = recipe_for(loaded, strategy, 16, 4).recipe
    profile = Tracer(recipe, on_gpu=True).profile(1)
    name = recipe.parallel.strategy
    way = Way(recipe.parallel, name, find_degrees(recipe.parallel, name, 16), 1, 2, "fp32", on_gpu=True)
    wires, micro = Counted(), one_micro_batch(loaded).recipe
    run(tasks_of(strategy, traced_shape(micro, 1), Phases(1, 2, 0), rules_of(loaded), Place(16, 4), wires))
    # A plan takes it that every matrix is packed, and that what is in no matrix is not sent.
    assert wires.sent() == pytest.approx(sent(profile, way), rel=0.2 if strategy == "ddp_powersgd" else 0.001)


def test_hsdp_sends_more_than_ddp_and_less_than_fsdp_and_least_to_other_machines() -> None:
    shape, found = traced_shape(load_recipe([SMALL_VIT]).recipe, 2), {}
    for name in ("ddp", "hsdp", "fsdp"):
        found[name] = Counted()
        tasks_of(name, shape, Phases(1, 2, 0), Rules(), Place(64, 8), found[name])
    assert found["ddp"].sent() < found["hsdp"].sent() < found["fsdp"].sent()
    assert found["hsdp"].sent(between=True) <= found["ddp"].sent(between=True) < found["fsdp"].sent(between=True)


# The model.


def real_buckets(process: Process, tree: dict[str, Any]) -> list[int]:
    built = build(check_tree(tree).recipe, process)
    batches = built.batches(0, 2)
    for _ in range(2):
        built.unit.forward_backward(next(batches))
        built.unit.optimizer_step(0.01)
    unit: Any = built.unit
    told = unit.ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
    return [int(size) for size in told.split(",")]


@pytest.mark.parametrize("bucket_mb", [0.05, 0.1, 25.0])
def test_buckets_are_those_of_pytorch(ranks: Callable[[int], Ranks], bucket_mb: float) -> None:
    loaded = load_recipe([TINY_VIT], {"parallel.bucket_mb": bucket_mb, "cluster.gpus_per_worker": 0})
    real = ranks(2)(real_buckets, recipe_for(loaded, "ddp", 2).tree())[0]
    shape = traced_shape(loaded.recipe, 2)
    assert [4 * bucket.numel for bucket in buckets(shape, bucket_mb * MIB)] == real


def test_a_traced_model_divides_its_passes_by_arithmetic() -> None:
    shape = traced_shape(load_recipe([SMALL_VIT]).recipe, 2)
    assert shape.num_blocks == 8 and shape.numel == pytest.approx(6.4e6, rel=0.02)
    assert sum(shape.forward) == pytest.approx(1) and shape.forward == shape.backward
    assert len(set(shape.forward[1:-1])) == 1 and shape.forward[1] > 0.11
    assert shape.ready[0] == 1 and shape.ready[-1] < 0.02
    ends = [max(s for w, s in zip(shape.weights, shape.ready, strict=True) if w.block == b) for b in range(8)]
    assert ends == sorted(ends, reverse=True)
    assert shape.numel == sum(shape.numel_of(block) for block in range(ROOT, 8))


def test_a_model_whose_arithmetic_is_not_known_is_divided_by_its_weights() -> None:
    weights = (Weight(ROOT, 10, 1), Weight(0, 30, 1), Weight(1, 50, 1), Weight(ROOT, 10, 1))
    shape = by_weights(weights)
    assert shape.forward == (0.0, 0.3, 0.5, 0.2) and shape.ready == pytest.approx((1.0, 1.0, 0.7, 0.2))
    whole = by_weights((Weight(ROOT, 10, 1), Weight(ROOT, 30, 1)))
    assert whole.num_blocks == 0 and whole.ready == (1.0, 1.0)


def test_the_shape_that_was_measured() -> None:
    record = {
        "weights": [[ROOT, 4, 1], [0, 4, 1], [0, 4, 2], [1, 4, 1], [ROOT, 4, 1]],
        "ready": [0.98, 0.9, 0.8, 0.5, 0.1],
        "forward": [0.1, 0.4, 0.4, 0.1],
        "buffers": 8,
    }
    shape = from_record(record)
    assert shape.backward == pytest.approx((0.1, 0.4, 0.4, 0.1)) and shape.buffers == 8
    without_blocks = from_record({"weights": [[ROOT, 4, 1]], "ready": [1.0], "forward": [1.0, 0.0], "buffers": 0})
    assert without_blocks.backward == (1.0, 0.0)


# Networks.

EIGHT, MANY = Members(8, 8), Members(1024, 8)


def test_a_ring_takes_its_hops_and_its_bytes() -> None:
    network = NETWORKS["nvlink+ib"]
    inside = 8.4e-6 + 7 * 3.4e-6 + 1e9 * 7 / 8 / 370.8e9
    assert network.message("all_gather", 1e9, EIGHT).seconds == pytest.approx(inside)
    assert network.message("all_reduce", 1e9, EIGHT).seconds == pytest.approx(2 * inside - 8.4e-6)
    between = 8.4e-6 + 14 * 3.4e-6 + 14e-6 + 1e9 * 15 / 16 / 370.8e9
    assert network.message("reduce_scatter", 1e9, Members(16, 8)).seconds == pytest.approx(between)
    one_card = 8.4e-6 + 14e-6 + 1e9 / 2 / 48e9
    assert network.message("all_gather", 1e9, Members(2, 1, alike=8)).seconds == pytest.approx(one_card)


def test_groups_that_are_alike_share_the_card_of_their_machine() -> None:
    ethernet = NETWORKS["nvlink+100gbe"]
    one, eight = (ethernet.message("all_gather", 1e10, Members(2, 1, alike=alike)).seconds for alike in (1, 8))
    assert eight == pytest.approx(8 * one, rel=1e-3)
    infiniband = NETWORKS["nvlink+ib"]
    assert len({infiniband.message("all_gather", 1e10, Members(2, 1, alike=alike)) for alike in (1, 8)}) == 1


def test_small_sums_go_by_a_tree_and_large_ones_among_many_too() -> None:
    network = NETWORKS["nvlink+ib"]
    assert network.message("all_reduce", 4, MANY).seconds < 0.2 * network.message("all_gather", 4, MANY).seconds
    by_ring = 1e9 * 2 * 1023 / 1024 / 370.8e9
    assert network.message("all_reduce", 1e9, MANY).seconds < 1.2 * by_ring


COLLECTIVES = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"])


@given(COLLECTIVES, st.integers(0, 10**10), st.sampled_from(sorted(NETWORKS)), st.integers(0, 9))
def test_more_bytes_and_more_workers_never_take_less(collective: Any, size: int, name: str, power: int) -> None:
    network, few, more = NETWORKS[name], 2**power, 2 ** (power + 1)
    members, others = (Members(count, min(8, count)) for count in (few, more))
    assert (
        network.message(collective, size, members).seconds <= network.message(collective, size, others).seconds + 1e-12
    )
    assert network.message(collective, size, members).seconds <= network.message(collective, 2 * size, members).seconds
    assert network.message(collective, size, Members(1, 1)).seconds == 0


def test_a_network_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    file.write_text("base: nvlink+100gbe\nbetween_gb_per_s: 25\nbetween_of: gpu\n")
    found = find_network(str(file))
    assert (found.name, found.between_gb_per_s, found.between_of) == ("ours", 25, "gpu")
    assert found.between_us == NETWORKS["nvlink+100gbe"].between_us
    changed = find_network("nvlink+ib", {"between_us": 5.0, "inside_us": None})
    assert changed.between_us == 5 and changed.name == "nvlink+ib with changes"
    assert find_network("nvlink+ib", dict.fromkeys(FIGURES)) is NETWORKS["nvlink+ib"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"cannot be read: No such file"),
        ("[1", r"is no YAML"),
        ("- 1", r"should hold figures by name"),
        ("base: nvlink+1b", r"base: 'nvlink\+1b' is no network; .*did you mean nvlink\+ib"),
        ("base: [1]", r"base: \[1\] is no network"),
        ("between_gbs: 3", r"'between_gbs' is no figure; allowed: .*did you mean between_"),
        ("between_gb_per_s: 0", r"between_gb_per_s: 0 should be a number above 0"),
        ("between_us: -1", r"between_us: -1 should be a number of 0 or more"),
        ("between_us: fast", r"between_us: 'fast' should be a number"),
        ("between_us: true", r"between_us: True should be a number"),
        ("between_of: rack", r"between_of: 'rack' should be gpu or node"),
    ],
)
def test_a_file_that_is_wrong_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "ours.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=message):
        find_network(str(file))


# All of it.


def known(phases: Phases, shape: Shape | None = None) -> Known:
    shape = shape or traced_shape(load_recipe([SMALL_VIT]).recipe, 2)
    return Known(phases, dict.fromkeys(STRATEGIES, phases), shape, "given")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_network_that_costs_nothing_leaves_all_of_the_efficiency(strategy: str) -> None:
    chosen = Settings(network=NETWORKS["free"])
    found = [predict(strategy, known(Phases(0.1, 0.2, 0)), Rules(), gpus, chosen) for gpus in (1, 2, 8, 1024)]
    assert [each["efficiency"] for each in found] == pytest.approx([1.0] * 4)


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(STRATEGIES), st.sampled_from(["nvlink+ib", "nvlink+100gbe"]), st.floats(1e-3, 1), st.integers(1, 3)
)
def test_efficiency_falls_with_the_number_of_gpus(
    strategy: str, network: str, step_s: float, micro_batches: int
) -> None:
    chosen, what = Settings(network=NETWORKS[network]), known(Phases(step_s / 3, 2 * step_s / 3, 0), TRACED)
    rules = Rules(micro_batches=micro_batches)
    counts = [1, 2, 4, 8] if strategy == "hsdp" else gpu_counts(8, 1024)
    found = [predict(strategy, what, rules, gpus, chosen)["efficiency"] for gpus in counts]
    assert all(later <= sooner + 1e-9 for sooner, later in itertools.pairwise(found)) and 0 < found[-1] <= 1


TRACED = traced_shape(load_recipe([SMALL_VIT]).recipe, 2)


def test_on_a_slow_network_it_is_best_to_send_little() -> None:
    chosen, what = Settings(network=NETWORKS["nvlink+100gbe"]), known(Phases(0.005, 0.01, 0))
    rules = Rules(bucket_mb=3)
    found = {name: predict(name, what, rules, 64, chosen)["efficiency"] for name in DEFAULT_STRATEGIES}
    assert found["fsdp"] < found["ddp"] < found["ddp_bf16"] < found["ddp_powersgd"] and found["fsdp"] < found["hsdp"]


def test_the_optimizer_of_fsdp_updates_a_part() -> None:
    own, whole = Phases(1, 2, 5), Phases(1, 2, 4)
    assert divided("fsdp", own, whole, Place(8, 4)).optimizer_s == 1 + 4 / 8
    assert divided("hsdp", own, whole, Place(8, 4)).optimizer_s == 1 + 4 / 4
    assert divided("ddp", own, whole, Place(8, 4)) == own


def test_packing_takes_what_its_bytes_take_through_memory() -> None:
    assert packing_s("ddp_bf16", two_blocks(), 1.0) == pytest.approx(3 * 2 * MIB / 1e9)
    assert packing_s("ddp", two_blocks(), 1.0) == packing_s("ddp_powersgd", two_blocks(), math.inf) == 0


@pytest.mark.parametrize(
    ("per_node", "most", "counts"),
    [(8, 64, [1, 2, 4, 8, 16, 32, 64]), (8, 4, [1, 2, 4]), (6, 24, [1, 2, 4, 6, 12, 24]), (1, 3, [1, 2])],
)
def test_machines_are_full_but_for_the_only_one(per_node: int, most: int, counts: list[int]) -> None:
    assert gpu_counts(per_node, most) == counts


def test_recipes_keep_the_batch_of_a_worker() -> None:
    loaded = load_recipe(
        [SIMULATED],
        {"cluster.workers": 2, "train.global_batch": 16, "train.micro_batch": 4, "parallel.compress": "fp16"},
    )
    four = recipe_for(loaded, "hsdp", 4, 2).recipe
    assert four.train.global_batch == 32 and four.micro_batch(4) == 4 and four.parallel.compress == "none"
    assert four.parallel.strategy == "fsdp" and four.parallel.fsdp.shard_size == 2
    assert rules_of(loaded).micro_batches == 2 and one_micro_batch(loaded).recipe.train.global_batch == 4
    low = rules_of(load_recipe([SIMULATED], {"train.precision": "bf16", "train.clip_norm": 1.0}))
    assert (low.gathered, low.reduced, low.clips) == ("bf16", "fp32", True)


def test_a_given_step_is_simulated_without_being_run() -> None:
    chosen = Settings(given=from_words("30,60,10"), max_gpus=16, strategies=("fsdp", "ddp_powersgd"))
    found = simulate(load_recipe([SIMULATED]), chosen)
    assert found["step_ms"] == pytest.approx(100) and found["step"] == "given: 30,60,10 ms by phase"
    assert [row["gpus"] for row in found["rows"]] == [1, 2, 4, 8, 16]
    assert found["rows"][0]["fsdp"] == {"step_ms": pytest.approx(100), "efficiency": 1.0, "exposed_share": 0.0}
    assert found["own_ms"]["ddp_powersgd"] > found["own_ms"]["fsdp"] == pytest.approx(100)
    # Each of two updates half of the weights, which is worth more than what is sent so fast.
    assert found["rows"][1]["fsdp"]["step_ms"] == pytest.approx(95, abs=0.6)
