"""What holds a run up, in one line: the bottleneck, its evidence, and what to change. A pure function of seconds."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.observe.compiling import Recompiled
from shoal.observe.number_words import share
from shoal.observe.phases import COMPUTING, PHASES

BOTTLENECKS = (
    "input",
    "compute",
    "communication",
    "checkpoint",
    "straggler",
    "launch",
    "evaluation",
    "reporting",
    "compile",
    "unknown",
)
"""input: steps wait for data. communication: workers wait for each other's gradients or weights. straggler: they wait
for one that is slower. launch: a GPU waits for the host, which cannot tell it fast enough what to compute.
compile: what was compiled is compiled again and again."""
_NOTABLE = 0.1
"""A share of the time that is worth a change."""
_BEHIND = 1.25
"""A worker that takes so many times what others take is slower, and not only by chance."""
_NEVER_AHEAD = 0.03
"""A host that waits less for its GPU than this share of the time never gets ahead of it."""
_JUDGED = tuple(phase for phase in PHASES if phase not in ("start", "compile", "end"))
_OF_PHASE = {
    "data": "input",
    "comm": "communication",
    "checkpoint": "checkpoint",
    "evaluate": "evaluation",
    "report": "reporting",
}
_WHAT = {
    "input": "waiting for data",
    "communication": "waiting for other workers",
    "checkpoint": "saving",
    "evaluation": "evaluation",
    "reporting": "reporting",
}


@dataclass(frozen=True)
class Circumstances:
    """What of a run decides which advice is of use."""

    is_gpu: bool = False
    strategy: str = "single"
    precision: str = "fp32"
    compiles: bool = False
    compresses: bool = False
    accumulates: bool = False
    """Whether a step has several micro-batches."""
    readers: int | str = "auto"
    """data.workers, or what comes of it."""
    most_readers: int | None = None
    """Where `auto` stops."""
    loader: str = "map"
    """Who reads: `map`, `stream`, `memory` or `ray`; `iterable`: the same for an iterator of the user's own."""
    can_reside: bool = False
    """Whether all samples could be in the GPU's memory, and are not."""
    evaluates_often: bool = True
    """Whether there are evaluations before the last step."""
    settings: Mapping[str, int] = field(default_factory=dict)
    """Numbers of the recipe as they are, by dotted field: an advice to raise one says from where."""


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    bottleneck: str
    evidence: str
    advice: str = ""
    rank: int | None = None
    """The worker that others wait for."""

    def __str__(self) -> str:
        """In one line."""
        words = f"{self.bottleneck}: {self.evidence}"
        return f"{words}; {self.advice}" if self.advice else words

    def to_record(self) -> dict[str, Any]:
        """As it is written."""
        return {"bottleneck": self.bottleneck, "verdict": str(self)}


def judge(
    workers: Sequence[Mapping[str, float]],
    around: Circumstances | None = None,
    ahead_s: float | None = None,
    recompiled: Recompiled | None = None,
) -> Verdict:
    """The verdict on some time of training, given each worker's seconds by phase.

    `ahead_s`: for how many of these seconds the hosts waited for their GPUs, on average; None without GPUs.
    `recompiled`: what was compiled again in this time. Compiling for the first time is not judged, as start-up is not.
    """
    around = around or Circumstances()
    loops = [{phase: max(seconds.get(phase, 0.0), 0.0) for phase in _JUDGED} for seconds in workers]
    total = statistics.fmean(sum(loop.values()) for loop in loops) if loops else 0.0
    found = _judge(loops, total, around, ahead_s) if total > 0 else Verdict("unknown", "nothing has run yet")
    return _with_recompiled(found, recompiled, total) if recompiled else found


def _with_recompiled(found: Verdict, recompiled: Recompiled, total: float) -> Verdict:
    """Recompilations are always named, and first where they are what takes the time."""
    part = recompiled.seconds / max(total + recompiled.seconds, 1e-9)
    if part >= _NOTABLE:
        return Verdict(
            "compile", f"{share(part)} of the time is compiling again: {recompiled.words}", recompiled.advice
        )
    advice = "; ".join(words for words in (found.advice, recompiled.advice) if words)
    return dataclasses.replace(found, evidence=f"{found.evidence}, and {recompiled.words}", advice=advice)


def _judge(loops: Sequence[Mapping[str, float]], total: float, around: Circumstances, ahead_s: float | None) -> Verdict:
    if (slow := _straggler(loops, total)) is not None:
        return slow
    mean = {phase: statistics.fmean(loop[phase] for loop in loops) / total for phase in _JUDGED}
    # What even the last one waits for is the network's; what others wait more is for each other.
    shares = mean | {"comm": min(loop["comm"] for loop in loops) / total}
    computing = sum(mean[phase] for phase in COMPUTING)
    worst = max(_OF_PHASE, key=lambda phase: shares[phase])
    if shares[worst] >= _NOTABLE and shares[worst] >= 0.25 * computing:
        bottleneck = _OF_PHASE[worst]
        evidence = f"{shares[worst]:.0%} of the time is {_WHAT[bottleneck]}"
        if mean[worst] - shares[worst] >= 0.01:
            evidence += f", even for the one that waits least ({mean[worst]:.0%} on average)"
        return Verdict(bottleneck, evidence, _ADVICE[bottleneck](around))
    if ahead_s is not None and ahead_s / total < _NEVER_AHEAD:
        evidence = f"the GPU waits for the host, which was never ahead of it ({computing:.0%} of the time is steps)"
        return Verdict("launch", evidence, _ADVICE["launch"](around))
    return Verdict("compute", f"{computing:.0%} of the time is computing", _ADVICE["compute"](around))


def _straggler(loops: Sequence[Mapping[str, float]], total: float) -> Verdict | None:
    """The worker that all others wait for, if there is one."""
    if len(loops) < 2:
        return None
    own_phases = ("data", *COMPUTING)
    own = [sum(loop[phase] for phase in own_phases) for loop in loops]
    rank = max(range(len(own)), key=lambda number: own[number])
    others = [seconds for number, seconds in enumerate(own) if number != rank]
    usual = statistics.median(others)
    behind = own[rank] - usual
    if behind < _NOTABLE * total or own[rank] < _BEHIND * usual:
        return None

    def excess(phase: str) -> float:
        return loops[rank][phase] - statistics.median(
            loop[phase] for number, loop in enumerate(loops) if number != rank
        )

    phase = max(own_phases, key=excess)
    what = "for data" if phase == "data" else f"in its {phase.replace('_', ' and ')}"
    evidence = f"worker {rank} takes {own[rank] / max(usual, 1e-9):.1f} times as long as the others, most of it {what}"
    advice = (
        f"look at the disk that worker {rank} reads from, and keep data.dir on one that is as fast on every machine"
        if phase == "data"
        else f"look at what else runs on the machine of worker {rank}, at its clock and temperature; where workers "
        "share a machine, try cluster.pin_cores=true"
    )
    return Verdict("straggler", evidence, advice, rank)


def _raise(around: Circumstances, name: str, times: int = 2) -> str:
    """`raise train.global_batch from 64 to 128`."""
    value = around.settings.get(name)
    return f"raise {name}" if value is None else f"raise {name} from {value} to {times * value}"


def _faster_data(around: Circumstances) -> str:
    if around.loader == "iterable":
        return (
            "make the dataset itself faster, because one process at most reads an iterator (data.workers=1); or cut "
            "the data into shards with shoal data shard, which several read"
        )
    if around.loader == "ray":
        return "add CPUs to the Ray cluster, or leave its readers more of them with cluster.cpus_per_worker=1"
    if around.readers == "auto":
        most = around.most_readers
        more = "raise data.workers" if most is None else f"try data.workers={min(2 * most, 256)} (auto stops at {most})"
    else:
        before = int(around.readers)
        more = f"raise data.workers from {before} to {min(max(2 * before, 2), 256)}"
    if around.loader == "memory":
        return f"try data.resident=true, or {more}" if around.can_reside else f"{more}, which read beside the training"
    return f"{more}, keep data.dir on a local disk, or cut the data into shards with shoal data shard"


def _less_communication(around: Circumstances) -> str:
    if around.strategy == "ddp":
        more = _raise(around, "train.global_batch")
        apart = f"try parallel.sync_every={4 * around.settings.get('parallel.sync_every', 1)} (local SGD)"
        return f"{more}, or {apart}" if around.compresses else f"try parallel.compress=bf16; or {more}; or {apart}"
    if around.strategy == "fsdp":
        seldom = "parallel.fsdp.reduce_every_micro_batch=false or " if around.accumulates else ""
        return f"try {seldom}parallel.fsdp.shard_size=node; or {_raise(around, _batch(around))}"
    if around.strategy == "deepspeed":
        return f"try parallel.deepspeed.stage=1, which sends least; or {_raise(around, _batch(around))}"
    if around.strategy == "pipeline":
        return (
            "try parallel.pipeline.schedule=interleaved or a smaller train.micro_batch, so that stages wait less for "
            "each other; keep parallel.pipeline.stages within one machine"
        )
    if around.strategy == "tensor":
        return "try a smaller parallel.tensor.size: at most as many workers as one machine has"
    return f"{_raise(around, 'train.global_batch')}, so that workers talk less often"


def _batch(around: Circumstances) -> str:
    """What to raise so that a device has more to do at once: the global batch, where it is one micro-batch a worker."""
    return "train.micro_batch" if around.accumulates else "train.global_batch"


def _more_compute(around: Circumstances) -> str:
    if not around.is_gpu:
        return "as it should be; more workers (--workers) or a GPU (--gpu) make it faster"
    untried = []
    if around.precision in ("fp32", "tf32"):
        untried.append("train.precision=bf16")
    if not around.compiles:
        untried.append("train.compile=true")
    more = "more workers (--workers)"
    return f"as it should be; {' and '.join(untried)} or {more} make it faster" if untried else "as it should be"


def _faster_launch(around: Circumstances) -> str:
    more = f"{_raise(around, _batch(around))}, so that there is more to compute at once"
    return more if around.compiles else f"try train.compile=true; or {more}"


_ADVICE: dict[str, Callable[[Circumstances], str]] = {
    "input": _faster_data,
    "communication": _less_communication,
    "launch": _faster_launch,
    "compute": _more_compute,
    "checkpoint": lambda around: (
        f"{_raise(around, 'checkpoint.every_steps', 4)}, or keep the run on a faster disk with --run-dir"
    ),
    "evaluation": lambda around: (
        (f"{_raise(around, 'evaluate.every_steps', 4)}, or " if around.evaluates_often else "")
        + _raise(around, "evaluate.batch", 4)
    ),
    "reporting": lambda around: _raise(around, "observe.every_steps", 10),
}
"""What to try next: a field of the recipe, or an option of the command, with a value where it has one."""
