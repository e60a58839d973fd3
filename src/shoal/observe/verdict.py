"""What holds a run up, in one line: the bottleneck, its evidence, and what to change. A pure function of seconds."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    "unknown",
)
"""input: steps wait for data. communication: workers wait for each other's gradients or weights. straggler: they wait
for one that is slower. launch: a GPU waits for the host, which cannot tell it fast enough what to compute."""
_NOTABLE = 0.1
"""A share of the time that is worth a change."""
_BEHIND = 1.25
"""A worker that takes so many times what others take is slower, and not only by chance."""
_NEVER_AHEAD = 0.03
"""A host that waits less for its GPU than this share of the time never gets ahead of it."""
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
    """data.workers."""
    can_add_readers: bool = True
    """Not where the data comes from an iterator of the user's own, or from Ray."""


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
) -> Verdict:
    """The verdict on some time of training, given each worker's seconds by phase.

    `ahead_s`: for how many of these seconds the hosts waited for their GPUs, on average; None without GPUs.
    """
    around = around or Circumstances()
    loops = [{phase: max(seconds.get(phase, 0.0), 0.0) for phase in PHASES[1:-1]} for seconds in workers]
    total = statistics.fmean(sum(loop.values()) for loop in loops) if loops else 0.0
    if total <= 0:
        return Verdict("unknown", "nothing has run yet")
    if (slow := _straggler(loops, total)) is not None:
        return slow
    mean = {phase: statistics.fmean(loop[phase] for loop in loops) / total for phase in PHASES[1:-1]}
    # What even the last one waits for is the network's; what others wait more is for each other.
    shares = mean | {"comm": min(loop["comm"] for loop in loops) / total}
    computing = sum(mean[phase] for phase in COMPUTING)
    worst = max(_OF_PHASE, key=lambda phase: shares[phase])
    if shares[worst] >= _NOTABLE and shares[worst] >= 0.25 * computing:
        bottleneck = _OF_PHASE[worst]
        evidence = f"{shares[worst]:.0%} of the time is {_WHAT[bottleneck]}"
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
        f"look at the disk and the loader processes of worker {rank}"
        if phase == "data"
        else f"look at what else runs on the machine of worker {rank}, at its clock and temperature, or leave it out"
    )
    return Verdict("straggler", evidence, advice, rank)


def _faster_data(around: Circumstances) -> str:
    if not around.can_add_readers:
        return "make the dataset itself faster, or cut the data into shards with shoal data shard"
    if around.readers == "auto":
        return "move the data to a faster disk, cut it into shards (shoal data shard), or try data.workers by hand"
    return f"raise data.workers (now {around.readers}) or move the data to a faster disk"


def _less_communication(around: Circumstances) -> str:
    if around.strategy == "ddp" and not around.compresses:
        return "try parallel.compress=bf16, a larger train.global_batch, or parallel.sync_every"
    if around.strategy in ("fsdp", "deepspeed"):
        return "try a larger train.micro_batch, or a shard size of one machine (parallel.fsdp.shard_size)"
    if around.strategy in ("pipeline", "tensor"):
        return "keep the workers of one copy on one machine, or use fewer of them for each"
    return "raise train.global_batch, so that workers talk less often"


def _more_compute(around: Circumstances) -> str:
    untried = []
    if around.is_gpu and around.precision in ("fp32", "tf32"):
        untried.append("train.precision=bf16")
    if around.is_gpu and not around.compiles:
        untried.append("train.compile=true")
    if not around.is_gpu:
        return "as it should be; more workers or a GPU make it faster"
    return f"as it should be; {' and '.join(untried)} or more workers make it faster" if untried else "as it should be"


def _faster_launch(around: Circumstances) -> str:
    if around.compiles:
        return "raise train.micro_batch, so that there is more to compute at once"
    return "try train.compile=true, or raise train.micro_batch"


_ADVICE: dict[str, Callable[[Circumstances], str]] = {
    "input": _faster_data,
    "communication": _less_communication,
    "launch": _faster_launch,
    "compute": _more_compute,
    "checkpoint": lambda around: "raise checkpoint.every_steps, or save to a faster disk",
    "evaluation": lambda around: "raise evaluate.every_steps or evaluate.batch",
    "reporting": lambda around: "raise observe.every_steps",
}
"""What to try next."""
