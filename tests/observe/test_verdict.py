import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.observe.compiling import Reason, Recompiled
from shoal.observe.phases import PHASES
from shoal.observe.verdict import BOTTLENECKS, Circumstances, judge
from shoal.recipe.load import load_recipe

STEP = {"data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0}
GPU = Circumstances(is_gpu=True)


def workers(count: int, **changed: float) -> list[dict[str, float]]:
    return [STEP | changed for _ in range(count)]


TIMELINES = {
    "nothing yet": ([], None, None, "unknown", "nothing has run yet"),
    "no step yet": ([{"start": 9.0}], None, None, "unknown", "nothing has run yet"),
    "one worker that computes": (workers(1), None, None, "compute", "99% of the time is computing; as it should be"),
    "a start-up is no bottleneck of steps": (workers(1, start=900.0), None, None, "compute", "99%"),
    "little data wait": (workers(1, data=9.0), None, None, "compute", "91%"),
    "data": (workers(1, data=60.0), None, None, "input", "39% of the time is waiting for data; raise data.workers"),
    "data, as many readers as auto takes": (
        *(workers(1, data=60.0), Circumstances(most_readers=8), None, "input"),
        "try data.workers=16 (auto stops at 8), keep data.dir on a local disk, or cut the data into shards",
    ),
    "data, readers given": (
        *(workers(1, data=60.0), Circumstances(readers=2), None, "input"),
        "raise data.workers from 2 to 4, keep data.dir on a local disk",
    ),
    "data, an iterable": (
        *(workers(1, data=60.0), Circumstances(loader="iterable"), None, "input"),
        "make the dataset itself faster, because one process at most reads an iterator (data.workers=1)",
    ),
    "data, read by Ray": (
        *(workers(1, data=60.0), Circumstances(loader="ray"), None, "input"),
        "add CPUs to the Ray cluster, or leave its readers more of them with cluster.cpus_per_worker=1",
    ),
    "data in memory": (
        *(workers(1, data=60.0), Circumstances(loader="memory", readers=0), None, "input"),
        "raise data.workers from 0 to 2, which read beside the training",
    ),
    "data in memory, with room on the GPU": (
        *(workers(1, data=60.0), Circumstances(is_gpu=True, loader="memory", readers=0, can_reside=True), 9.0, "input"),
        "try data.resident=true, or raise data.workers from 0 to 2",
    ),
    "all of many wait for data": (workers(8, data=60.0), None, None, "input", "39%"),
    "communication": (
        *(workers(4, comm=60.0), Circumstances(strategy="ddp"), None, "communication"),
        "38% of the time is waiting for other workers; try parallel.compress=bf16; or raise train.global_batch; or try",
    ),
    "communication of shards": (
        *(workers(4, comm=60.0), Circumstances(strategy="fsdp", accumulates=True), None, "communication"),
        "try parallel.fsdp.reduce_every_micro_batch=false or parallel.fsdp.shard_size=node; or raise train.micro_batch",
    ),
    "communication of ZeRO": (
        *(workers(4, comm=60.0), Circumstances(strategy="deepspeed"), None, "communication"),
        "try parallel.deepspeed.stage=1, which sends least; or raise train.global_batch",
    ),
    "communication of a pipeline": (
        *(workers(4, comm=60.0), Circumstances(strategy="pipeline"), None, "communication"),
        "try parallel.pipeline.schedule=interleaved",
    ),
    "communication of layers": (
        *(workers(4, comm=60.0), Circumstances(strategy="tensor"), None, "communication"),
        "try a smaller parallel.tensor.size",
    ),
    "communication, compressed": (
        *(workers(4, comm=60.0), Circumstances(strategy="ddp", compresses=True), None, "communication"),
        "raise train.global_batch, or try parallel.sync_every=4 (local SGD)",
    ),
    "saving": (
        *(workers(2, checkpoint=30.0), Circumstances(settings={"checkpoint.every_steps": 50}), None, "checkpoint"),
        "24% of the time is saving; raise checkpoint.every_steps from 50 to 200, or keep the run on a faster disk with",
    ),
    "evaluation": (workers(2, evaluate=50.0), None, None, "evaluation", "raise evaluate.every_steps"),
    "evaluation at the end alone": (
        *(workers(2, evaluate=50.0), Circumstances(evaluates_often=False), None, "evaluation"),
        "is evaluation; raise evaluate.batch",
    ),
    "reporting": (workers(2, report=50.0), None, None, "reporting", "raise observe.every_steps"),
    "the largest of several": (workers(2, evaluate=30.0, checkpoint=50.0), None, None, "checkpoint", "28%"),
    "one slow worker": (
        *([STEP | {"comm": 60.0}] * 3 + [STEP | {"forward": 60.0, "backward": 90.0}], None, None, "straggler"),
        "worker 3 takes 1.6 times as long as the others, most of it in its",
    ),
    "one worker with slow data": (
        *([STEP | {"data": 50.0}, STEP | {"comm": 49.0}], None, None, "straggler"),
        "worker 0 takes 1.5 times as long as the others, most of it for data; look at the disk that worker 0",
    ),
    "a little apart is chance": ([STEP | {"comm": 5.0}, STEP | {"forward": 35.0}], None, None, "compute", ""),
    "others' wait for a slow one is not the network's": (
        *([STEP | {"comm": 50.0}, STEP | {"forward": 50.0, "comm": 30.0}], None, None, "communication"),
        "21% of the time is waiting for other workers, even for the one that waits least (27% on average); ",
    ),
    "a GPU that is kept busy": (workers(1), GPU, 30.0, "compute", "train.precision=bf16 and train.compile=true"),
    "a GPU with everything tried": (
        *(workers(1), Circumstances(is_gpu=True, precision="bf16", compiles=True), 30.0, "compute", "as it should be"),
    ),
    "a GPU that waits for its host": (workers(1), GPU, 0.5, "launch", "never ahead of it"),
    "the same, compiled": (
        *(workers(1), Circumstances(is_gpu=True, compiles=True, accumulates=True), 0.5, "launch"),
        "raise train.micro_batch",
    ),
    "a GPU that waits for data has no launch problem": (workers(1, data=80.0), GPU, 0.0, "input", "46%"),
    "a pipeline": ([{"forward_backward": 90.0, "comm": 5.0}] * 4, None, None, "compute", "95%"),
}


@pytest.mark.parametrize("name", TIMELINES)
def test_the_verdict_names_the_bottleneck_its_evidence_and_what_to_change(name: str) -> None:
    seconds, around, ahead_s, bottleneck, says = TIMELINES[name]
    verdict = judge(seconds, around, ahead_s)
    assert verdict.bottleneck == bottleneck, str(verdict)
    assert says in str(verdict), str(verdict)
    assert (verdict.rank is not None) == (bottleneck == "straggler")


FIELD = re.compile(r"\b((?:train|data|parallel|checkpoint|evaluate|observe|cluster)\.[a-z_.]*[a-z])(?:=(\w+))?")


@pytest.mark.parametrize("name", TIMELINES)
def test_an_advice_names_fields_that_a_recipe_has_with_values_that_it_takes(name: str) -> None:
    seconds, around, ahead_s, *_ = TIMELINES[name]
    verdict = judge(seconds, around, ahead_s)
    for field, value in FIELD.findall(verdict.advice):
        # One with files, one with blocks that can be divided, one that is in memory.
        recipe = {"data.dir": "imagenet"}.get(field, "gpt2" if field.startswith("parallel.") else "digits")
        section = load_recipe([recipe]).tree()
        for part in field.split("."):
            section = section[part]
        if value:
            own = {"parallel.strategy": around.strategy} if field.startswith("parallel.") else {}
            load_recipe([recipe], own | {"cluster.workers": 4, "train.steps": 400, field: json.loads(_as_json(value))})
    if verdict.bottleneck not in ("unknown", "compute"):
        assert FIELD.search(verdict.advice), verdict.advice


def _as_json(value: str) -> str:
    return value if value.isdigit() or value in ("true", "false") else json.dumps(value)


def test_every_bottleneck_that_has_a_name_is_in_the_table() -> None:
    assert {row[3] for row in TIMELINES.values()} | {"compile"} == set(BOTTLENECKS)


SHAPES = Recompiled(3, 4.0, Reason("a batch of another shape", "pad to one length"))


def test_recompilations_are_named_beside_what_is_found_else() -> None:
    found = judge(workers(1, data=80.0), None, None, SHAPES)
    assert found.bottleneck == "input" and found.advice.endswith("; pad to one length; or train.compile=false")
    assert found.evidence.endswith(", and 3 recompilations took 4.0 s (a batch of another shape)")
    given_up = judge([], None, None, Recompiled(given_up="forward (model.py:3)"))
    assert given_up.evidence.startswith("nothing has run yet, and PyTorch has given up compiling forward (model.py:3)")


def test_recompilations_that_take_the_time_are_the_bottleneck() -> None:
    total = sum(workers(1)[0].values())
    many = Recompiled(9, total, SHAPES.reason)
    found = judge(workers(1), None, None, many)
    assert found.bottleneck == "compile" and found.advice == many.advice
    assert found.evidence.startswith("5") and "% of the time is compiling again: 9 recompilations took" in str(found)


def test_compiling_for_the_first_time_is_not_judged() -> None:
    assert judge(workers(2, compile=1e6)) == judge(workers(2)) == judge(workers(2), None, None, Recompiled())


@given(
    st.lists(st.dictionaries(st.sampled_from(PHASES), st.floats(0, 1e9)), max_size=5),
    st.one_of(st.none(), st.floats(0, 1e9)),
)
def test_any_seconds_have_a_verdict_of_one_line(seconds: list[dict[str, float]], ahead_s: float | None) -> None:
    verdict = judge(seconds, Circumstances(is_gpu=ahead_s is not None), ahead_s)
    assert verdict.bottleneck in BOTTLENECKS
    assert len(str(verdict).splitlines()) == 1
    assert verdict.to_record() == {"bottleneck": verdict.bottleneck, "verdict": str(verdict)}
