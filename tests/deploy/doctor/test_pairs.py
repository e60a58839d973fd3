"""Which machines are measured against each other, and what the figures say."""

import pytest

from shoal.deploy.doctor.pairs import (
    ALL_PAIRS_UP_TO,
    Link,
    Pair,
    choose_pairs,
    in_bits,
    in_rounds,
    judge_links,
    link_from,
    slow_links,
)

FAST = Link(latency_s=1e-4, bytes_per_s=1e9, connected=True)


def links(nodes: str, **odd: Link) -> dict[Pair, Link]:
    """All of these at the same speed, but for some: `ab=`."""
    found = {(one, other): FAST for one in nodes for other in nodes if one != other}
    return found | {(pair[0], pair[1]): link for pair, link in odd.items()}


def levels(found: dict[Pair, Link], busy: str = "") -> dict[str, str]:
    return {finding.check: finding.level for finding in judge_links(found, busy)}


@pytest.mark.parametrize("count", [2, 3, 5, ALL_PAIRS_UP_TO])
def test_of_a_few_machines_every_pair(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    pairs = choose_pairs(nodes)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == count * (count - 1) // 2


@pytest.mark.parametrize("count", [ALL_PAIRS_UP_TO + 1, 64])
def test_of_many_a_ring_and_as_many_again(count: int) -> None:
    nodes = [f"n{number}" for number in range(count)]
    pairs = choose_pairs(nodes)
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == 2 * count
    assert {node for pair in pairs for node in pair} == set(nodes)
    assert pairs == choose_pairs(nodes)


@pytest.mark.parametrize("count", [2, 3, 8, 20])
def test_no_machine_is_measured_twice_at_a_time(count: int) -> None:
    pairs = choose_pairs([f"n{number}" for number in range(count)])
    rounds = in_rounds(pairs)
    assert sorted(pair for one in rounds for pair in one) == sorted(pairs)
    for one in rounds:
        busy = [node for pair in one for node in pair]
        assert len(busy) == len(set(busy))


def test_equal_links_pass() -> None:
    assert levels(links("abc")) == {"connections": "pass", "latency": "pass", "bandwidth": "pass"}
    assert levels({}) == {"connections": "skip"}


def test_a_pair_that_cannot_connect_fails() -> None:
    broken = Link(error="Connection refused")
    found = judge_links(links("abc", ab=broken, ac=broken))
    assert found[0].level == "fail" and "a cannot reach b (Connection refused)" in found[0].found
    assert "all of them with a" in found[0].found and "NetworkPolicy" in found[0].advice
    assert levels(links("ab", ab=broken, ba=broken))["bandwidth"] == "skip"


def test_a_connection_without_data_is_a_matter_of_the_mtu() -> None:
    finding = judge_links(links("ab", ab=Link(latency_s=1e-4, connected=True, error="no answer")))[0]
    assert finding.level == "fail" and "MTU" in finding.advice


def test_a_slow_pair_is_told_and_the_machine_that_they_share() -> None:
    slow = Link(latency_s=1e-4, bytes_per_s=1e8, connected=True)
    found = judge_links(links("abcd", ad=slow, da=slow, bd=slow))
    assert found[2].level == "warn" and "a to d 800 Mbit/s" in found[2].found and "median 8 Gbit/s" in found[2].found
    assert "all of them with d" in found[2].found
    # With three machines one slow one makes most of the links slow, and the median with them.
    assert levels(links("abc", ac=slow, ca=slow, bc=slow, cb=slow))["bandwidth"] == "warn"


def test_a_network_that_is_slow_everywhere_is_told_too() -> None:
    slow = Link(latency_s=1e-4, bytes_per_s=1e6, connected=True)
    assert levels(dict.fromkeys(links("ab"), slow))["bandwidth"] == "warn"
    assert slow_links({("a", "b"): Link(error="x")}) == []


def test_a_late_pair() -> None:
    late = Link(latency_s=0.02, bytes_per_s=1e9, connected=True)
    found = judge_links(links("abcd", ab=late))
    assert found[1].level == "warn" and "a to b 20 ms" in found[1].found
    soon = Link(latency_s=0.0009, bytes_per_s=1e9, connected=True)  # nine times the median, and still soon
    assert levels(links("abcd", ab=soon))["latency"] == "pass"


def test_a_busy_cluster_is_told_with_the_figures() -> None:
    for finding in judge_links(links("ab"), "while others use 2 of 4 CPU")[1:]:
        assert "(while others use 2 of 4 CPU)" in finding.found


def test_the_better_of_two_measurements() -> None:
    slow = Link(latency_s=1e-4, bytes_per_s=1e6, connected=True)
    assert slow.better(FAST) == FAST.better(slow) == FAST
    assert slow.better(Link(error="x")) == slow
    assert link_from({"connected": True, "latency_s": 1e-4, "bytes_per_s": 1e9}) == FAST
    assert (in_bits(1.25e9), in_bits(1e6)) == ("10 Gbit/s", "8 Mbit/s")
