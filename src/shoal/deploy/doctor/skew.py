"""How far the clocks of machines are apart, by round trips."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shoal.deploy.doctor.finding import Finding, Level, in_list, passed, skipped

ROUND_TRIPS = 8
APART_S = 0.5
"""Events of several machines can then no longer be put in order."""
TOO_FAR_APART_S = 30.0
"""Half of the time after which a run that wrote nothing counts as stopped; signatures of stores end soon after."""


@dataclass(frozen=True)
class Offset:
    """How much later the clock of a machine is than ours."""

    seconds: float
    uncertain_s: float
    """It may be so much more or less: half a round trip."""


@dataclass(frozen=True)
class RoundTrip:
    """One question for the time, and its answer."""

    sent: float
    """By our clock."""
    told: float
    """By theirs."""
    received: float
    """By ours."""


def ask_clock(ask: Callable[[], float], times: int = ROUND_TRIPS) -> list[RoundTrip]:
    """So many round trips."""
    found = []
    for _ in range(times):
        sent = time.time()
        told = ask()
        found.append(RoundTrip(sent, told, time.time()))
    return found


def offset_of(trips: Sequence[RoundTrip]) -> Offset:
    """By the fastest round trip: their clock was read somewhere between, so the middle is at most half of it wrong."""
    best = min(trips, key=lambda trip: trip.received - trip.sent)
    return Offset(best.told - (best.sent + best.received) / 2, (best.received - best.sent) / 2)


def judge_skew(offsets: Mapping[str, Offset]) -> Finding:
    """Whether the machines agree on the time: each is held against the middle one."""
    if len(offsets) < 2:
        return skipped("time skew", "one machine")
    middle = statistics.median(offset.seconds for offset in offsets.values())
    # Only what is certain counts: of one offset and, at worst, of the middle one too.
    apart = {node: offset.seconds - middle for node, offset in offsets.items()}
    sure = {node: abs(apart[node]) - offsets[node].uncertain_s for node in offsets}
    uncertain = f"±{max(offset.uncertain_s for offset in offsets.values()) * 1000:.1f} ms"
    far = sorted((node for node in offsets if sure[node] > APART_S), key=lambda node: -sure[node])
    if far:
        words = in_list(
            f"{node} is {abs(apart[node]):.3g} s {'ahead' if apart[node] > 0 else 'behind'}" for node in far
        )
        level: Level = "fail" if sure[far[0]] > TOO_FAR_APART_S else "warn"
        advice = "keep the clocks of all machines by one time server: chronyd or timedatectl set-ntp true there"
        return Finding("time skew", level, f"{words} ({uncertain})", advice)
    widest = max(apart.values()) - min(apart.values())
    return passed("time skew", f"at most {widest * 1000:.1f} ms apart ({uncertain})")
