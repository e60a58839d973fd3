"""Memory and traffic as arithmetic, on a model small enough to add up by hand."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.parallel.degrees import find_degrees
from shoal.parallel.memory import needed
from shoal.parallel.memory_deepspeed import deepspeed_moments
from shoal.parallel.section import ParallelSection
from shoal.parallel.sizes import LOSS, ROOT, Memory, Phase, Piece, Profile, Way, Weight
from shoal.parallel.traffic import sent

MB = 1 << 20
BLOCK, REST, NUM_BLOCKS = 40 * MB, 100 * MB, 4
KEPT, WORK = 10 * MB, 6 * MB
"""What a block leaves for its backward pass, and what a pass needs for a moment."""


def profile(kept: int = KEPT) -> Profile:
    blocks = [_piece(f"blocks.{n}", BLOCK) for n in range(NUM_BLOCKS)]
    rest = _piece("", REST, buffers=MB)
    phases, alive = [Phase(ROOT, False, MB, 0, MB, MB)], MB
    for number in range(NUM_BLOCKS):
        phases.append(Phase(number, False, alive + kept + WORK, 0, alive + kept + WORK, alive + kept))
        alive += kept
    phases.append(Phase(LOSS, False, alive + WORK, 0, alive + WORK, alive))
    phases.append(Phase(LOSS, True, alive + WORK, 0, alive + WORK, alive))
    for number in reversed(range(NUM_BLOCKS)):
        peak = alive + WORK
        phases.append(Phase(number, True, peak + BLOCK, BLOCK, peak + BLOCK, alive - kept, ((number, BLOCK),)))
        alive -= kept
    phases.append(Phase(ROOT, True, alive + REST, REST, alive + REST, 0, ((ROOT, REST),)))
    ends = (replace(rest, name="before"), Piece("after", 0, 0, 0, 0))
    return Profile(2, (*blocks, rest), tuple(phases), batch=MB, between=2 * MB, ends=ends)


def _piece(name: str, size: int, buffers: int = 0) -> Piece:
    """Of one weight."""
    return Piece(name, size // 4, size, size, buffers, largest=size, each=(Weight(size // 1024, 1024, True),))


WHOLE = NUM_BLOCKS * BLOCK + REST


def way(strategy: str, workers: int = 4, micro_batches: int = 1, on_gpu: bool = False, **section: Any) -> Way:
    parallel = ParallelSection(strategy=strategy, **section)
    degrees = find_degrees(parallel, strategy, workers)
    return Way(parallel, strategy, degrees, micro_batches, moments=2, precision="fp32", on_gpu=on_gpu)


def memory(*arguments: Any, kept: int = KEPT, **named: Any) -> Memory:
    return needed(profile(kept), way(*arguments, **named))


def test_one_process_holds_everything_and_its_gradients_come_as_activations_go() -> None:
    found = memory("single", 1)
    assert found.weights == WHOLE and found.optimizer == 2 * WHOLE
    # The last gradient is the largest; all activations of blocks are gone by then.
    assert found.gradients == WHOLE and found.activations == 2 * MB
    assert found.when == "backward pass of what surrounds the blocks"
    assert found.total == 4 * WHOLE + 2 * MB + MB + 12 * MB  # the batch, a buffer, and what kernels keep


def test_with_many_activations_the_worst_moment_is_where_all_of_them_live() -> None:
    found = memory("single", 1, kept=200 * MB)
    assert found.when == "backward pass of blocks.3" and found.gradients == BLOCK
    assert found.activations == MB + MB + NUM_BLOCKS * 200 * MB + WORK


def test_accumulated_gradients_are_there_throughout() -> None:
    once, often = memory("single", 1, kept=200 * MB), memory("single", 1, 3, kept=200 * MB)
    assert often.gradients == WHOLE and often.total - once.total == WHOLE - BLOCK + 2 * MB + BLOCK


def test_every_worker_of_ddp_holds_what_one_process_does_and_buckets() -> None:
    assert memory("ddp", kept=200 * MB).gradients == WHOLE
    # Before the last micro-batch gradients are added up outside of the buckets.
    assert memory("ddp", 4, 2).buffers - memory("ddp").buffers == WHOLE
    apart = memory("ddp", gradient_as_bucket_view=False, kept=200 * MB)
    assert apart.buffers - memory("ddp", kept=200 * MB).buffers == WHOLE


def test_packed_gradients_are_there_beside_those_that_were_made_so_far() -> None:
    plain, packed = memory("ddp"), memory("ddp", compress="bf16")
    assert packed.when == plain.when == "backward pass of what surrounds the blocks"
    assert packed.buffers - plain.buffers == WHOLE // 2
    plain, packed = memory("ddp", kept=200 * MB), memory("ddp", kept=200 * MB, compress="bf16")
    assert packed.when == plain.when == "backward pass of blocks.3"
    assert packed.buffers - plain.buffers == BLOCK // 2
    # What powersgd has lost so far, and on a GPU a copy of what is on its way.
    assert memory("ddp", compress="powersgd").buffers - memory("ddp").buffers == WHOLE
    on_gpu = memory("ddp", compress="powersgd", on_gpu=True)
    assert on_gpu.buffers - memory("ddp", on_gpu=True).buffers == 2 * WHOLE


def test_fsdp_divides_all_that_is_kept_and_gathers_a_block_at_a_time() -> None:
    found = memory("fsdp", kept=200 * MB, on_gpu=True)
    assert found.weights == WHOLE // 4 and found.optimizer == WHOLE // 2
    # The rest of the model, a block, and the next one on its way; gradients of the block.
    assert found.when == "backward pass of blocks.3" and found.buffers == MB + 64 * MB + REST + 2 * BLOCK + BLOCK
    assert memory("fsdp", 8).total < memory("fsdp").total < memory("ddp").total


def test_fsdp_that_keeps_blocks_gathered_holds_the_whole_model() -> None:
    keeps = memory("fsdp", kept=200 * MB, on_gpu=True, fsdp={"reshard_after_forward": False})
    assert keeps.buffers == MB + 64 * MB + WHOLE + BLOCK


def test_a_worker_of_fsdp_without_others_talks_to_nobody() -> None:
    alone, among_others = memory("fsdp", 1), memory("fsdp", 4)
    assert alone.when == among_others.when == "sending gradients"
    assert among_others.buffers - alone.buffers == REST, "what is sent last, once more"


def test_groups_of_fsdp_hold_a_copy_each() -> None:
    found = memory("fsdp", fsdp={"shard_size": 2})
    assert found.weights == WHOLE // 2 and found.optimizer == WHOLE


def test_what_fsdp_offloads_is_in_the_hosts_memory() -> None:
    found = memory("fsdp", on_gpu=True, fsdp={"cpu_offload": True})
    pinned = NUM_BLOCKS * 16 * MB + 32 * MB  # powers of two for a fourth of each weight: 10 and 25 MiB
    assert found.weights == found.optimizer == 0 and found.host == 2 * pinned + 2 * WHOLE // 4
    adds_up = memory("fsdp", 4, 2, on_gpu=True, fsdp={"cpu_offload": True})
    assert adds_up.host == found.host + pinned, "a micro-batch's beside the sum of those before"
    late = {"cpu_offload": True, "reduce_every_micro_batch": False}
    assert memory("fsdp", 4, 2, on_gpu=True, fsdp=late).host == found.host
    *blocks, rest = profile().pieces
    frozen = replace(profile(), pieces=(*blocks, replace(rest, each=(Weight(6, MB, False),))))
    part = needed(frozen, way("fsdp", on_gpu=True, fsdp={"cpu_offload": True}))
    assert part.host == found.host - 2 * 32 * MB + 2 * MB, "two of six rows, and no gradient"
    here = memory("fsdp", fsdp={"cpu_offload": True})  # where that is the same memory
    assert here.host == 0 and here.total == memory("fsdp").total


def test_gradients_that_are_summed_after_the_last_micro_batch_are_whole_until_then() -> None:
    late = memory("fsdp", 4, 2, fsdp={"reduce_every_micro_batch": False})
    assert late.gradients >= WHOLE > memory("fsdp", 4, 2).gradients


def test_half_precision_halves_what_is_gathered() -> None:
    whole, half = (replace(way("fsdp", on_gpu=True), precision=precision) for precision in ("fp32", "bf16"))
    gathered = [needed(profile(200 * MB), each).buffers for each in (whole, half)]
    assert gathered[0] - gathered[1] == (REST + 2 * BLOCK) // 2


def test_a_model_whose_blocks_share_weights_is_gathered_at_once() -> None:
    shared = replace(profile(200 * MB), has_own_blocks=False)
    assert needed(shared, way("fsdp", on_gpu=True)).buffers >= WHOLE


def test_the_stages_of_zero_divide_more_and_more() -> None:
    found = [memory("deepspeed", deepspeed={"stage": stage}, kept=200 * MB) for stage in (1, 2, 3)]
    part = WHOLE // 4
    assert [each.weights for each in found] == [WHOLE + part, WHOLE + part, 2 * part]
    assert [each.optimizer for each in found] == [2 * part] * 3
    assert found[0].total >= found[1].total > found[2].total


def test_what_gloo_gathers_is_there_twice_and_what_nccl_gathers_is_not() -> None:
    zero = {"stage": 2}
    on_cpu, on_gpu = (memory("deepspeed", on_gpu=on_gpu, deepspeed=zero, kept=0) for on_gpu in (False, True))
    assert on_cpu.when == "gathering weights" and on_cpu.buffers >= WHOLE > on_gpu.buffers


def test_a_workers_part_of_the_gradients_is_taken_on_the_cpu_when_it_is_written_to() -> None:
    def first_sum(on_gpu: bool) -> Memory:
        moments = deepspeed_moments(profile(KEPT), way("deepspeed", on_gpu=on_gpu, deepspeed={"stage": 2}))
        return next(moment for moment in moments if moment.when == "summing gradients")

    assert first_sum(on_gpu=False).gradients == BLOCK < WHOLE // 4 == first_sum(on_gpu=True).gradients


def test_buckets_that_nobody_fills_take_no_memory_on_the_cpu() -> None:
    apart, together = (memory("ddp", sync_every=every, micro_batches=1) for every in (2, 1))
    assert apart.total < together.total


def test_what_zero_offloads_is_in_the_hosts_memory() -> None:
    offload = {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"}
    found = memory("deepspeed", on_gpu=True, deepspeed=offload)
    assert found.weights == found.optimizer == 0 and found.host == 5 * WHOLE // 4
    on_disk = memory("deepspeed", on_gpu=True, deepspeed=offload | {"offload_optimizer": "nvme", "nvme_dir": "/nvme"})
    assert on_disk.host == WHOLE // 4 and on_disk.total == found.total, "the optimizer's is not in any memory"


def test_the_first_worker_of_a_pipeline_holds_the_most_micro_batches() -> None:
    found = memory("pipeline", 4, 8, kept=200 * MB)
    assert found.when.endswith("worker 0 of the pipeline")
    # Its block and what comes before it; three micro-batches wait for the one that is computed.
    assert found.weights == BLOCK + REST and found.gradients == BLOCK + REST
    assert found.activations // (200 * MB + MB) == 4
    all_of_them = memory("pipeline", 4, 8, kept=200 * MB, pipeline={"schedule": "gpipe"})
    assert all_of_them.activations // (200 * MB + MB) == 8


def test_pipelines_side_by_side_need_what_one_of_them_needs() -> None:
    one, two = memory("pipeline", 2, 4), memory("pipeline", 4, 4, pipeline={"stages": 2})
    assert one.weights == two.weights and one.activations == two.activations


def test_an_interleaved_pipeline_holds_more_than_one_that_is_not() -> None:
    plain = memory("pipeline", 2, 4, kept=200 * MB)
    interleaved = memory("pipeline", 2, 4, kept=200 * MB, pipeline={"schedule": "interleaved"})
    assert interleaved.activations > plain.activations


def test_tensor_parallel_with_several_groups_copies_gradients_to_sum_them() -> None:
    one, several = memory("tensor", 2, tensor={"size": 2}), memory("tensor", 4, tensor={"size": 2})
    assert several.total >= one.total and several.when in ("summing gradients", one.when)
    assert memory("tensor", 4, tensor={"size": 2, "across": "fsdp"}).weights == WHOLE // 2


@pytest.mark.parametrize(
    ("strategy", "workers", "section", "micro_batches", "expected"),
    [
        ("single", 1, {}, 1, 0),
        ("ddp", 4, {}, 3, 2 * 3 * WHOLE // 4),
        ("ddp", 4, {"compress": "bf16"}, 1, 3 * WHOLE // 4),
        ("ddp", 4, {"sync_every": 6}, 1, 3 * WHOLE // 4),
        ("fsdp", 4, {}, 1, 3 * 3 * WHOLE // 4),
        ("fsdp", 4, {}, 2, 2 * 3 * 3 * WHOLE // 4),
        ("fsdp", 4, {"fsdp": {"reshard_after_forward": False}}, 1, 2 * 3 * WHOLE // 4),
        ("fsdp", 4, {"fsdp": {"reduce_every_micro_batch": False}}, 2, 5 * 3 * WHOLE // 4),
        ("fsdp", 4, {"fsdp": {"shard_size": 2}}, 1, 3 * WHOLE // 2 + WHOLE // 2),
        ("deepspeed", 4, {"deepspeed": {"stage": 1}}, 5, 3 * 3 * WHOLE // 4),
        ("deepspeed", 4, {"deepspeed": {"stage": 2}}, 2, 5 * 3 * WHOLE // 4),
        ("deepspeed", 4, {"deepspeed": {"stage": 3}}, 1, 3 * 3 * WHOLE // 4),
        ("pipeline", 4, {}, 8, 8 * 2 * 2 * MB),
        ("pipeline", 2, {}, 8, 8 * 2 * MB),
    ],
)
def test_bytes_sent(strategy: str, workers: int, section: dict[str, Any], micro_batches: int, expected: int) -> None:
    assert sent(profile(), way(strategy, workers, micro_batches, **section)) == pytest.approx(expected, rel=1e-6)


def test_workers_that_share_layers_send_activations_in_every_micro_batch() -> None:
    shared = replace(profile(), sent=5 * MB)
    assert sent(shared, way("tensor", 2, 3)) == 15 * MB
    assert sent(shared, way("tensor", 4, 3, tensor={"size": 2})) == 15 * MB + WHOLE
