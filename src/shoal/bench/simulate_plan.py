"""One step under a strategy as tasks: what is computed, what is sent, and what waits for what; as Shoal does it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from shoal.bench.simulate_events import COMPUTE, Task
from shoal.bench.simulate_network import Collective, Members, Wires
from shoal.bench.simulate_work import ROOT, Bucket, Phases, Shape, buckets

STRATEGIES = ("ddp", "fsdp", "hsdp", "ddp_bf16", "ddp_fp16", "ddp_powersgd")
_WIRE, _ACROSS = "network", "between copies"
"""HSDP sums between copies of the model while blocks are gathered inside of one: these are other wires."""
_ELEMENT = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}
_PASSES = {"ddp_bf16": 3, "ddp_fp16": 3, "ddp_powersgd": 9}
"""How often packing and unpacking go through gradients in memory, in fp32: read and written, to half the size and back;
for PowerSGD with the error added, kept and computed anew, and three products."""


@dataclass(frozen=True)
class Rules:
    """What of a recipe decides what is sent."""

    bucket_mb: float = 25.0
    powersgd_rank: int = 4
    gathered: str = "fp32"
    """What FSDP gathers weights in."""
    reduced: str = "fp32"
    """What it sums gradients in."""
    gathers_again: bool = True
    """For the backward pass."""
    reduces_each: bool = True
    """After every micro-batch."""
    clips: bool = False
    micro_batches: int = 1


@dataclass(frozen=True)
class Place:
    """How many workers there are, and how many of them on a machine."""

    workers: int
    on_node: int

    @property
    def everybody(self) -> Members:
        """All of them."""
        return Members(self.workers, self.on_node)

    @property
    def one_node(self) -> Members:
        """Those of a machine."""
        return Members(self.on_node, self.on_node)

    @property
    def across(self) -> Members:
        """One of each machine; each of its neighbours has such a group too."""
        return Members(self.workers // self.on_node, 1, alike=self.on_node)


@dataclass
class _Step:
    """Tasks, in the making."""

    wires: Wires
    tasks: list[Task] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    """What the next stretch of computing waits for, besides what is computed before it."""

    def compute(self, name: str, seconds: float) -> int:
        """What is computed next."""
        self.tasks.append(Task(name, COMPUTE, seconds, tuple(self.awaited)))
        self.awaited = []
        return len(self.tasks) - 1

    def send(
        self,
        name: str,
        collective: Collective,
        num_bytes: float,
        members: Members,
        after: Sequence[int],
        dtype: str = "fp32",
        wire: str = _WIRE,
    ) -> int:
        """A message that nobody waits for yet."""
        message = self.wires.message(collective, num_bytes, members, dtype)
        self.tasks.append(Task(name, wire, message.seconds, tuple(after), message.busy))
        return len(self.tasks) - 1

    @property
    def last(self) -> tuple[int, ...]:
        """What has been computed so far."""
        found = [number for number, task in enumerate(self.tasks) if task.stream == COMPUTE]
        return (found[-1],) if found else ()


def tasks_of(
    strategy: str,
    shape: Shape,
    own: Phases,
    rules: Rules,
    place: Place,
    wires: Wires,
) -> list[Task]:
    """A step of each of the workers, which are all alike.

    Args:
        strategy: One of `STRATEGIES`.
        shape: The model's.
        own: What a worker computes under the strategy in all its micro-batches.
        rules: What is sent.
        place: Of the workers.
        wires: The network.
    """
    assert strategy in STRATEGIES, strategy
    step = _Step(wires)
    if shape.buffers:
        step.awaited = [step.send("buffers", "all_gather", shape.buffers, place.everybody, ())]
    each = Phases(own.forward_s / rules.micro_batches, own.backward_s / rules.micro_batches, own.optimizer_s)
    if strategy in ("fsdp", "hsdp"):
        _sharded(step, shape, each, rules, place, is_hybrid=strategy == "hsdp")
    else:
        _replicated(step, strategy, shape, each, rules, place)
    step.compute("optimizer", own.optimizer_s)
    return step.tasks


def packing_s(strategy: str, shape: Shape, memory_gb_per_s: float) -> float:
    """What packing gradients takes by the bytes that it moves, where nobody has measured it."""
    return _PASSES.get(strategy, 0) * 4 * shape.numel / (1e9 * memory_gb_per_s)


def _replicated(step: _Step, strategy: str, shape: Shape, each: Phases, rules: Rules, place: Place) -> None:
    """DistributedDataParallel: in the last micro-batch, each bucket is sent when its gradients are there."""
    for number in range(rules.micro_batches):
        step.compute("forward", each.forward_s)
        if number < rules.micro_batches - 1:
            step.compute("backward", each.backward_s)
    before, sent = 0.0, []
    for bucket in buckets(shape, rules.bucket_mb * 2**20):
        step.compute("backward", (bucket.ready - before) * each.backward_s)
        before = bucket.ready
        messages = _bucket(step, strategy, bucket, rules, place)
        if strategy == "ddp_powersgd" and step.wires.waits:
            step.awaited = [messages[-1]]
        sent.append(messages[-1])
    step.compute("backward", (1 - before) * each.backward_s)
    step.awaited += sent


def _bucket(step: _Step, strategy: str, bucket: Bucket, rules: Rules, place: Place) -> list[int]:
    """The messages of a bucket, one after the other."""
    if strategy != "ddp_powersgd":
        dtype = strategy.removeprefix("ddp_") if strategy != "ddp" else "fp32"
        size = _ELEMENT[dtype] * bucket.numel
        return [step.send("bucket", "all_reduce", size, place.everybody, step.last, dtype)]
    factors = [weight.low_rank(rules.powersgd_rank) for weight in bucket.weights]
    whole = sum(weight.numel for weight, pair in zip(bucket.weights, factors, strict=True) if pair is None)
    first, second = (sum(pair[side] for pair in factors if pair) for side in (0, 1))
    after, found = step.last, []
    for name, numel in (("whole gradients", whole), ("first factors", first), ("second factors", second)):
        found.append(step.send(name, "all_reduce", 4 * numel, place.everybody, after))
        after = (found[-1],)
    return found


def _sharded(step: _Step, shape: Shape, each: Phases, rules: Rules, place: Place, is_hybrid: bool) -> None:
    """FSDP2 by blocks: weights are gathered before a block is computed, one block ahead where the network goes on
    beside computing, and gradients are summed after it."""
    blocks = range(shape.num_blocks)
    shards = _Shards(step, shape, rules, place, is_hybrid)
    for number in range(rules.micro_batches):
        shards.gather(ROOT, step.last)
        shards.compute("forward", shape.forward[0] * each.forward_s)
        for block in blocks:
            shards.compute("forward", shape.forward[block + 1] * each.forward_s, gathers=block)
        shards.compute("forward", shape.forward[-1] * each.forward_s)
        if rules.gathers_again:
            shards.gather(ROOT, step.last)
        has_reduced = rules.reduces_each or number == rules.micro_batches - 1
        shards.compute("backward", shape.backward[-1] * each.backward_s)
        for block in reversed(blocks):
            gathers = block if rules.gathers_again else None
            shards.compute("backward", shape.backward[block + 1] * each.backward_s, gathers)
            if has_reduced:
                shards.reduce(block)
        shards.compute("backward", shape.backward[0] * each.backward_s)
        if has_reduced:
            shards.reduce(ROOT)
    step.awaited += shards.sums
    if rules.clips:
        step.awaited.append(step.send("norm", "all_reduce", 4, place.everybody, [*step.last, *step.awaited]))


class _Shards:
    """What FSDP sends in a step."""

    def __init__(self, step: _Step, shape: Shape, rules: Rules, place: Place, is_hybrid: bool) -> None:
        self.step, self.shape, self.rules = step, shape, rules
        self.group = place.one_node if is_hybrid else place.everybody
        self.across = place.across if is_hybrid and place.workers > place.on_node else None
        self.sums: list[int] = []
        """What only the optimizer waits for."""
        self.before: tuple[int, ...] = ()
        """What the latest stretch of computing waits for: it has begun when all of this is done."""

    def gather(self, block: int, after: Sequence[int]) -> None:
        """Weights of a block, for the next stretch of computing."""
        size = _ELEMENT[self.rules.gathered] * self.shape.numel_of(block)
        if self.step.wires.waits:
            after = [*self.step.last, *self.step.awaited]
        if size:
            self.step.awaited.append(self.step.send(f"gather {block}", "all_gather", size, self.group, after))

    def compute(self, name: str, seconds: float, gathers: int | None = None) -> None:
        """A stretch of computing; the block that it needs is gathered while the one before is computed."""
        if gathers is not None:
            self.gather(gathers, self.before)
        self.before = (*self.step.last, *self.step.awaited)
        self.step.compute(name, seconds)

    def reduce(self, block: int) -> None:
        """Gradients of a block: summed over the shards, then over the copies."""
        size = _ELEMENT[self.rules.reduced] * self.shape.numel_of(block)
        if not size:
            return
        wires = self.step.wires
        message = self.step.send(f"reduce {block}", "reduce_scatter", size, self.group, self.step.last)
        if self.across is not None:
            wire = _WIRE if wires.waits else _ACROSS
            part = size / self.group.size
            message = self.step.send(f"sum {block}", "all_reduce", part, self.across, [message], wire=wire)
        (self.step.awaited if wires.waits else self.sums).append(message)
