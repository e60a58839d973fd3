"""The machines of a cluster together."""

import pytest

from shoal.deploy.doctor.members import Member, judge_answers, judge_gpus, judge_members, judge_versions

HEAD = Member("10.0.0.1", True, {})
WORKER = Member("10.0.0.2", True, {"CPU": 4.0, "GPU": 1.0})


def test_who_is_there() -> None:
    finding = judge_members([HEAD, WORKER])
    assert (finding.level, finding.found) == ("pass", "2 alive, 1 of them for workers: 4 CPU, 1 GPU")
    assert HEAD.is_worker is False and WORKER.is_worker


def test_a_cluster_that_takes_no_work() -> None:
    assert judge_members([HEAD]).level == "fail"


def test_those_that_have_gone_or_will() -> None:
    gone = Member("10.0.0.3", False, why_dead="health check failed")
    finding = judge_members([HEAD, WORKER, gone, Member("10.0.0.4", True, {"CPU": 1}, is_leaving=True)])
    assert finding.level == "warn"
    assert "gone: 10.0.0.3 (health check failed); about to leave: 10.0.0.4" in finding.found
    # One that was started again is there.
    assert judge_members([WORKER, Member("10.0.0.2", False)]).level == "pass"


def test_answers() -> None:
    assert judge_answers(["a", "b"], {}).found == "the doctor runs on 2 machines"
    assert judge_answers(["a"], {}).found == "the doctor runs on 1 machine"
    assert "its memory" in judge_answers(["a"], {"a": "no answer within 60 s"}).advice
    missing = judge_answers(["a"], {"a": "ModuleNotFoundError: No module named 'shoal'"})
    assert missing.level == "fail" and "install this Shoal" in missing.advice


SAME = {"Python": "3.11.7", "torch": "2.13.0", "driver": "550"}


@pytest.mark.parametrize(
    ("odd", "level", "words"),
    [
        ({}, "pass", "the same on 3"),
        ({"torch": "2.12.0"}, "fail", "torch: c has 2.12.0, the others 2.13.0"),
        ({"Python": "3.11.9"}, "warn", "Python: c has 3.11.9"),
        ({"Python": "3.12.1"}, "fail", "Python: c has 3.12.1"),
        ({"driver": "535"}, "warn", "driver: c has 535"),
        ({"NCCL": "2.27"}, "pass", ""),  # those without a GPU have none
    ],
)
def test_versions(odd: dict[str, str], level: str, words: str) -> None:
    finding = judge_versions({"a": SAME, "b": SAME, "c": SAME | odd})
    assert finding.level == level and words in finding.found


def test_gpus_that_ray_was_told_of() -> None:
    assert judge_gpus({"a": 0.0}, {"a": 0}).level == "skip"
    assert judge_gpus({"a": 4.0, "b": 4.0}, {"a": 4, "b": 4}).found == "8 on 2 machines"
    fewer = judge_gpus({"a": 4.0, "b": 4.0}, {"a": 4, "b": 3})
    assert (fewer.level, fewer.found) == ("fail", "b: Ray has 4, torch sees 3")
    more = judge_gpus({"a": 0.0}, {"a": 8})
    assert more.level == "warn" and "--num-gpus" in more.advice
