"""What came of an all-reduce; the ranks themselves run in `test_probe.py`."""

from shoal.deploy.doctor.reduce import Rank, judge_reduce


def done(node: str, rank: int) -> Rank:
    return Rank(node, rank, "done", seconds=0.1, num_bytes=16 << 20)


def test_all_came() -> None:
    finding = judge_reduce("all-reduce", [done("a", 0), done("b", 1)], 90.0)
    assert finding.level == "pass"
    assert finding.found == "2 ranks on 2 machines, the sum is right; 16 MiB in 100 ms, 1.34 Gbit/s on the bus"
    assert "(while busy)" in judge_reduce("all-reduce", [done("a", 0), done("b", 1)], 90.0, "while busy").found


def test_nobody_to_sum_with() -> None:
    assert judge_reduce("all-reduce", [done("a", 0)], 90.0).level == "skip"


def test_a_rank_that_did_not_come_is_named() -> None:
    finding = judge_reduce("x", [Rank("a", 0, "reached"), Rank("b", 1, "ready"), Rank("c", 2, "reached")], 90.0)
    assert finding.level == "fail"
    assert finding.found == "rank 1 on b did not come within 90 s: stuck reaching the machine of rank 0"


def test_its_error_counts_and_not_what_the_others_complain_of() -> None:
    ranks = [Rank("a", 0, "reached", "timed out"), Rank("b", 1, "ready", "OSError: No route to host")]
    assert judge_reduce("x", ranks, 90.0).found == (
        "rank 1 on b failed, reaching the machine of rank 0: OSError: No route to host"
    )


def test_all_are_stuck_together() -> None:
    stuck = judge_reduce("x", [Rank("a", 0, "joined"), Rank("b", 1, "joined")], 90.0)
    assert stuck.found == "none of 2 ranks came through within 90 s: stuck summing" and stuck.advice
    broken = judge_reduce(
        "x", [Rank("a", 0, "reached", "Gloo: refused"), Rank("b", 1, "reached", "Gloo: refused")], 90.0
    )
    assert broken.found == "none of 2 ranks came through, meeting the others: Gloo: refused"


def test_a_wrong_sum_is_another_matter() -> None:
    ranks = [done("a", 0), Rank("b", 1, "joined", "ValueError: the sum is wrong in 3 of 9 numbers")]
    finding = judge_reduce("x", ranks, 90.0)
    assert finding.level == "fail" and "rank 1 on b" in finding.found and "wrongly" in finding.advice
