"""Judging the machines of a cluster together: who is there, which versions they have, which GPUs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.deploy.doctor.finding import Finding, in_list, passed, skipped
from shoal.observe.number_words import counted

_MUST_BE_EQUAL = ("Shoal", "Ray", "torch", "CUDA", "NCCL")
"""Workers of different ones do not understand each other, or compute differently."""


@dataclass(frozen=True)
class Member:
    """A machine, as the cluster's head knows it."""

    address: str
    is_alive: bool
    resources: Mapping[str, float] = field(default_factory=dict)
    is_leaving: bool = False
    why_dead: str = ""

    @property
    def is_worker(self) -> bool:
        """Whether workers can be placed there: a head may have been started with no cores."""
        return self.is_alive and (self.resources.get("CPU", 0) >= 1 or self.resources.get("GPU", 0) > 0)


def judge_members(members: Sequence[Member]) -> Finding:
    """Who is there, who has gone, who is about to go."""
    alive = [member for member in members if member.is_alive]
    here = {member.address for member in alive}
    gone = {member.address: member for member in members if not member.is_alive and member.address not in here}
    leaving = [member.address for member in alive if member.is_leaving]
    workers = sum(member.is_worker for member in alive)
    cpus, gpus = (sum(member.resources.get(name, 0) for member in alive) for name in ("CPU", "GPU"))
    found = f"{len(alive)} alive, {workers} of them for workers: {cpus:g} CPU, {gpus:g} GPU"
    if not workers:
        advice = "start machines that take work: RAY_AUTH_MODE=token ray start --address HEAD:6379 on each"
        return Finding("nodes", "fail", f"{found}; none takes work", advice)
    trouble = []
    if gone:
        words = (f"{address} ({member.why_dead})" if member.why_dead else address for address, member in gone.items())
        trouble.append(f"gone: {in_list(words)}")
    if leaving:
        trouble.append(f"about to leave: {in_list(leaving)}")
    if trouble:
        advice = (
            "if they should be there, look at them and at /tmp/ray/session_latest/logs/raylet.out; then ray start again"
        )
        return Finding("nodes", "warn", f"{found}; {'; '.join(trouble)}", advice)
    return passed("nodes", found)


def judge_answers(asked: Sequence[str], errors: Mapping[str, str]) -> Finding:
    """Whether a process of ours runs on each machine."""
    if not errors:
        return passed("answers", f"the doctor runs on {counted(len(asked), 'machine')}")
    words = in_list(f"{node}: {why}" for node, why in errors.items())
    if any("No module named 'shoal" in why for why in errors.values()):
        advice = "install this Shoal there, in the Python that ray start is called with"
    else:
        advice = (
            "look at its network, its memory and /tmp/ray/session_latest/logs there; try again if it was just restarted"
        )
    return Finding("answers", "fail", words, advice)


def judge_versions(by_node: Mapping[str, Mapping[str, str]]) -> Finding:
    """Whether all machines have the same.

    Args:
        by_node: name -> version, by machine; that of the one that asks is among them.
    """
    names = dict.fromkeys(name for versions in by_node.values() for name in versions)
    differing = {}
    for name in names:
        counts = Counter(versions[name] for versions in by_node.values() if name in versions)
        if len(counts) > 1:
            differing[name] = counts
    if not differing:
        first: Mapping[str, str] = next(iter(by_node.values()), {})
        return passed("versions", f"the same on {len(by_node)}: {', '.join(map(' '.join, first.items()))}")
    words = []
    for name, counts in differing.items():
        usual, _ = counts.most_common(1)[0]
        odd = [
            f"{node} has {versions[name]}" for node, versions in by_node.items() if versions.get(name, usual) != usual
        ]
        words.append(f"{name}: {in_list(odd)}, the others {usual}")
    python = {version.rpartition(".")[0] for version in differing.get("Python", ())}
    is_bad = len(python) > 1 or any(name in _MUST_BE_EQUAL for name in differing)
    advice = "install the same on all: pip install -c constraints.txt -e ., or one image for all"
    if list(differing) == ["driver"]:
        advice = "install the same driver on all; a torch for the oldest of them runs on each"
    return Finding("versions", "fail" if is_bad else "warn", "; ".join(words), advice)


def judge_gpus(told: Mapping[str, float], seen: Mapping[str, int]) -> Finding:
    """Whether Ray was told of the GPUs that torch sees, by machine."""
    fewer = [
        f"{node}: Ray has {told[node]:g}, torch sees {count}" for node, count in seen.items() if count < told[node]
    ]
    if fewer:
        advice = "workers placed there would find none: see the checks of that machine; then ray start with --num-gpus"
        return Finding("gpus", "fail", in_list(fewer), advice)
    more = [f"{node}: Ray has {told[node]:g}, torch sees {count}" for node, count in seen.items() if count > told[node]]
    if more:
        advice = "some are left unused: ray start --num-gpus with as many as there are, on that machine"
        return Finding("gpus", "warn", in_list(more), advice)
    total = sum(seen.values())
    return (
        passed("gpus", f"{total} on {counted(sum(map(bool, seen.values())), 'machine')}")
        if total
        else skipped("gpus", "none")
    )
