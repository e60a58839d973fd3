"""From seconds of turns to ratios with their spread. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.bench.step_contenders import CONTENDERS, parted


def ratio_of(theirs: Sequence[float], ours: Sequence[float], starts: int = 1) -> dict[str, Any]:
    """How many times as fast as they we are: the median over the rounds, and how far it can be trusted.

    `starts`: in how many equal parts the rounds were taken by processes of their own.
    """
    each = [their_s / our_s for their_s, our_s in zip(theirs, ours, strict=True)]
    low, high = interval_of(each, starts)
    return {
        "ratio": statistics.median(each),
        "interval": [low, high],
        "least": min(each),
        "most": max(each),
        "by_round": each,
    }


def interval_of(each: Sequence[float], starts: int = 1, confidence: float = 0.95) -> tuple[float, float]:
    """Where the median would lie if all were done again: the middle of what samples of the rounds give.

    Rounds of the same processes are alike; with several starts, samples are of whole starts.
    """
    random = np.random.default_rng(0)
    parts = np.asarray(each).reshape(starts, -1) if starts > 1 else np.asarray(each).reshape(-1, 1)
    drawn = parts[random.integers(0, len(parts), (2000, len(parts)))].reshape(2000, -1)
    outside = 100 * (1 - confidence) / 2
    low, high = np.percentile(np.median(drawn, axis=1), [outside, 100 - outside])
    return float(low), float(high)


def ratios_of(step_s: Mapping[str, Sequence[float]], starts: int = 1) -> dict[str, Any]:
    """Of each contender of Shoal's to every peer and, by name, to the one that is fastest over all rounds."""
    ours, peers = parted(list(step_s))
    found: dict[str, Any] = {}
    for name in ours:
        to_each = {peer: ratio_of(step_s[peer], step_s[name], starts) for peer in peers}
        found[name] = {"to_each": to_each}
        if peers:
            best = best_of(step_s, peers)
            found[name] |= {"best_peer": best, "to_best": to_each[best]}
            for label, compiles in (("eager", False), ("compiled", True)):
                alike = [peer for peer in peers if CONTENDERS[peer].compiles == compiles]
                if alike:
                    found[name][f"best_{label}"] = best_of(step_s, alike)
        if name != "shoal" and "shoal" in step_s:
            found[name]["to_shoal"] = ratio_of(step_s["shoal"], step_s[name], starts)
    return found


def best_of(step_s: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Who takes least over all rounds."""
    return min(names, key=lambda name: statistics.median(step_s[name]))


def mean_of_last(losses: Sequence[tuple[float, int]], count: int = 50) -> float:
    """The mean loss over the items of the last so many steps."""
    last = losses[-count:]
    return sum(loss * items for loss, items in last) / sum(items for _, items in last)


def compile_s(opening: Mapping[str, Any], step_s: float) -> float:
    """What the opening took longer than as many steps take later."""
    return max(0.0, float(opening["opening_s"]) - len(opening["losses"]) * step_s)


_TOLERANCES = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 2e-2, "fp16": 2e-2}
_WITH_DROPOUT = 0.15


def differences(
    facts: Mapping[str, Mapping[str, Any]], first_losses: Mapping[str, float]
) -> tuple[list[str], list[str]]:
    """What shows that not all train the same, and what may only be chance or is wanted, each as a line.

    With the same weights and samples the first losses are the same but for rounding; with dropout, nearly.
    """
    reference = next(iter(facts))
    wrong: list[str] = []
    notes: list[str] = []
    weights = facts[reference]["weights"]
    for name, own in facts.items():
        if own["weights"] != weights:
            wrong.append(f"{name} began with other weights than {reference}")
    with_dropout = any(own["has_dropout"] for own in facts.values())
    for name, loss in first_losses.items():
        expected = first_losses[reference]
        precisions = {facts[name]["precision"], facts[reference]["precision"]}
        tolerance = _WITH_DROPOUT if with_dropout else max(_TOLERANCES.get(each, 2e-2) for each in precisions)
        if not abs(loss - expected) <= tolerance * max(abs(expected), 1e-3):
            line = f"{name}: first loss {loss:.5g}, {reference}: {expected:.5g}"
            (notes if name == "shoal_fast" else wrong).append(line)
    if with_dropout:
        notes.append(f"first losses are compared to {_WITH_DROPOUT:.0%} alone, for the model has dropout")
    if len(kinds := {own["precision"] for own in facts.values()}) > 1:
        told = ", ".join(f"{name}: {own['precision']}" for name, own in facts.items())
        notes.append(f"not all compute in the same precision ({len(kinds)}): {told}")
    return wrong, notes
