"""Which machines to measure against each other, when, and what the figures say."""

import random
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.deploy.doctor.finding import Finding, in_list, passed, skipped

ALL_PAIRS_UP_TO = 8
"""Machines: every pair is measured. With more, a ring, and as many pairs again by chance."""
SLOW_SHARE = 0.5
"""Of the median: a pair below is slow."""
SLOW_SHARE_OF_BEST = 0.2
"""Of the fastest: where half of the pairs are slow, the median is too."""
SLOW_BYTES_PER_S = 125e6 / 8
"""An eighth of a gigabit: slow for every training, whatever the others have."""
LATE_TIMES = 5.0
LATE_S = 1e-3
"""A latency is late that is so many times the median, and more than this."""
Pair = tuple[str, str]


@dataclass(frozen=True)
class Link:
    """From one machine to another."""

    latency_s: float | None = None
    bytes_per_s: float | None = None
    connected: bool = False
    error: str = ""

    def better(self, other: "Link") -> "Link":
        """The faster of two measurements of the same link."""
        return max(self, other, key=lambda link: (not link.error, link.bytes_per_s or 0.0))


def link_from(facts: Mapping[str, Any]) -> Link:
    """Of what `measure` gave."""
    return Link(**{name: facts[name] for name in ("latency_s", "bytes_per_s", "connected", "error") if name in facts})


def choose_pairs(nodes: Sequence[str], seed: int = 0) -> list[Pair]:
    """Every pair of a few machines; of many a ring and as many others."""
    everyone = [(one, other) for index, one in enumerate(nodes) for other in nodes[index + 1 :]]
    if len(nodes) <= ALL_PAIRS_UP_TO:
        return everyone
    ring = [(one, nodes[(index + 1) % len(nodes)]) for index, one in enumerate(nodes)]
    in_ring = {frozenset(pair) for pair in ring}
    others = [pair for pair in everyone if frozenset(pair) not in in_ring]
    return ring + random.Random(seed).sample(others, min(len(nodes), len(others)))  # noqa: S311 - no secret


def in_rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs in rounds in which no machine has two: they would share its network."""
    rounds: list[list[Pair]] = []
    for pair in pairs:
        free = next((one for one in rounds if not any(set(pair) & set(other) for other in one)), None)
        if free is None:
            rounds.append([pair])
        else:
            free.append(pair)
    return rounds


def slow_links(links: Mapping[Pair, Link]) -> list[Pair]:
    """Those with far less bandwidth than others."""
    rates = {pair: link.bytes_per_s for pair, link in links.items() if link.bytes_per_s}
    if not rates:
        return []
    least = max(SLOW_SHARE * statistics.median(rates.values()), SLOW_SHARE_OF_BEST * max(rates.values()))
    return sorted(
        (pair for pair, rate in rates.items() if rate < max(least, SLOW_BYTES_PER_S)), key=lambda pair: rates[pair]
    )


def judge_links(links: Mapping[Pair, Link], busy: str = "") -> list[Finding]:
    """Whether all connect, how long messages take, and how much goes through.

    Args:
        links: By machine and machine, each way.
        busy: Why the figures say little, where others use the cluster.
    """
    if not links:
        return [skipped("connections", "one machine")]
    remark = f" ({busy})" if busy else ""
    return [_judge_connections(links), _judge_latency(links, remark), _judge_bandwidth(links, remark)]


def _judge_connections(links: Mapping[Pair, Link]) -> Finding:
    unreached = {pair: link for pair, link in links.items() if link.error and not link.connected}
    stalled = {pair: link for pair, link in links.items() if link.error and link.connected}
    if unreached:
        words = in_list(f"{one} cannot reach {other} ({link.error})" for (one, other), link in unreached.items())
        advice = (
            "let the machines reach each other on all TCP ports: firewall, security group, NetworkPolicy, routes; "
            "workers could not meet"
        )
        return Finding("connections", "fail", words + _in_common(list(unreached)), advice)
    if stalled:
        words = in_list(f"{one} to {other}: {link.error}" for (one, other), link in stalled.items())
        advice = "they connect but data does not pass: compare the MTU on the way (ip link; ping -M do -s 1472 ADDRESS)"
        return Finding("connections", "fail", words + _in_common(list(stalled)), advice)
    return passed("connections", f"{len(links) // 2} pair{'s' * (len(links) > 3)} of machines, each way")


def _judge_latency(links: Mapping[Pair, Link], remark: str) -> Finding:
    times = {pair: link.latency_s for pair, link in links.items() if link.latency_s is not None}
    if not times:
        return skipped("latency", "no pair connects")
    middle = statistics.median(times.values())
    late = sorted(
        (pair for pair, s in times.items() if s > max(LATE_TIMES * middle, LATE_S)), key=lambda pair: -times[pair]
    )
    median = f"median {_in_ms(middle)}"
    if late:
        words = in_list(f"{one} to {other} {_in_ms(times[one, other])}" for one, other in late)
        advice = "see whether these machines are in one zone and on one switch, and what else uses their network"
        return Finding("latency", "warn", f"{words}; {median}{_in_common(late)}{remark}", advice)
    return passed("latency", f"{median}, at most {_in_ms(max(times.values()))}{remark}")


def _judge_bandwidth(links: Mapping[Pair, Link], remark: str) -> Finding:
    rates = {pair: link.bytes_per_s for pair, link in links.items() if link.bytes_per_s}
    if not rates:
        return skipped("bandwidth", "no pair connects")
    median = f"median {in_bits(statistics.median(rates.values()))}"
    slow = slow_links(links)
    if slow:
        words = in_list(f"{one} to {other} {in_bits(rates[one, other])}" for one, other in slow)
        advice = "all wait for the slowest: leave out or replace these machines, or see what else uses their network"
        return Finding("bandwidth", "warn", f"{words}; {median}{_in_common(slow)}{remark}", advice)
    return passed("bandwidth", f"{median}, at least {in_bits(min(rates.values()))}, by one connection{remark}")


def _in_common(pairs: Sequence[Pair]) -> str:
    """The machine that all of these have to do with, where it is clear which of two it is."""
    counts = Counter(node for pair in pairs for node in pair)
    everywhere = [node for node, count in counts.items() if count == len(pairs)]
    return f"; all of them with {everywhere[0]}" if len(pairs) > 1 and len(everywhere) == 1 else ""


def in_bits(bytes_per_s: float) -> str:
    """`9.41 Gbit/s`"""
    bits = 8 * bytes_per_s
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _in_ms(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms"
