"""Places for trials: how many, how large, and when one is given up. The crews hold nothing."""

import pytest

from shoal.launch.policy import Size
from shoal.tune import slots as slots_module
from shoal.tune.slots import Slots


class FakeCrew:
    def __init__(self, size: Size, per_worker: dict[str, float], nursery: str) -> None:
        self.size, self.per_worker, self.nursery = size, per_worker, nursery
        self.is_closed = False
        self.lacks_room = False

    def is_short(self) -> bool:
        return self.lacks_room

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class Cluster:
    """Machines, and a clock."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, float]] = [{"CPU": 4.0}]
        self.can_grow = False
        self.now = 100.0
        self.looks = 0

    def look(self) -> list[dict[str, float]]:
        self.looks += 1
        return self.nodes


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(slots_module, "RayCrew", FakeCrew)
    monkeypatch.setattr(slots_module, "alive_nodes", found.look)
    monkeypatch.setattr(slots_module, "can_grow", lambda: found.can_grow)
    monkeypatch.setattr(slots_module.time, "monotonic", lambda: found.now)
    return found


def places(least: int = 1, most: int | None = None, at_most: int | None = None, **per_worker: float) -> Slots:
    return Slots(Size(least, most or least), per_worker or {"CPU": 1.0}, "nursery", at_most)


@pytest.mark.parametrize(
    ("nodes", "least", "at_most", "per_worker", "expected"),
    [
        ([4], 1, None, {}, 4),
        ([4, 2], 1, None, {}, 6),
        ([4], 2, None, {}, 2),
        ([3], 2, None, {}, 1),
        ([1], 2, None, {}, 0),
        ([4], 1, 3, {}, 3),
        ([4], 1, 9, {}, 4),
        ([4], 1, None, {"CPU": 2.0}, 2),
    ],
)
def test_there_are_as_many_as_fit_and_no_more_than_wanted(
    cluster: Cluster, nodes: list[int], least: int, at_most: int | None, per_worker: dict[str, float], expected: int
) -> None:
    cluster.nodes = [{"CPU": float(cpus)} for cpus in nodes]
    slots = places(least, at_most=at_most, **per_worker)
    assert slots.limit == expected
    taken = [slots.take(9) for _ in range(expected + 1)]
    assert None not in taken[:-1] and taken[-1] is None
    slots.close()


def test_a_share_of_a_gpu_is_a_place(cluster: Cluster) -> None:
    cluster.nodes = [{"CPU": 16.0, "GPU": 1.0}, {"CPU": 16.0}]
    assert places(CPU=1.0, GPU=0.25).limit == 4 and places(CPU=1.0, GPU=0.1).limit == 10


def test_a_place_is_handed_on_with_its_workers(cluster: Cluster) -> None:
    slots = places(2)
    first, second = slots.take(5), slots.take(5)
    assert first is not None and second is not None and slots.take(5) is None
    slots.give_back(first)
    again = slots.take(5)
    assert again is first and not first.crew.is_closed  # type: ignore[attr-defined]
    slots.close()
    assert first.crew.is_closed and second.crew.is_closed  # type: ignore[attr-defined]
    slots.close()  # once is enough


def test_a_place_that_is_not_whole_is_given_up_and_none_is_asked_for_a_while(cluster: Cluster) -> None:
    slots = places()
    taken = [slots.take(4) for _ in range(3)]
    broken, kept = taken[0], taken[1]
    assert broken is not None and kept is not None
    slots.give_back(broken, is_whole=False)
    assert broken.crew.is_closed and slots.take(4) is None  # type: ignore[attr-defined]
    slots.give_back(kept)
    assert slots.take(4) is kept, "one that is there may be had meanwhile"
    cluster.now += 29.9
    assert slots.take(4) is None
    cluster.now += 0.2
    found = slots.take(4)
    assert found is not None
    slots.give_back(found, is_whole=False)
    cluster.nodes.append({"CPU": 1.0})
    cluster.now += 1.1
    assert slots.take(4) is not None, "a cluster that has grown is asked at once"
    slots.close()


def test_a_place_that_nobody_uses_makes_room_for_one_that_lacks_it(cluster: Cluster) -> None:
    slots = places(2)  # of the four, others use two: the second place waits for them
    first, second = slots.take(4), slots.take(4)
    assert first is not None and second is not None
    second.crew.lacks_room = True  # type: ignore[attr-defined]
    slots.trim()
    assert not first.crew.is_closed, "it is in use"  # type: ignore[attr-defined]
    slots.give_back(first)
    assert first.crew.is_closed  # type: ignore[attr-defined]
    second.crew.lacks_room = False  # type: ignore[attr-defined]
    assert slots.take(4) is None, "no more than could be had is asked for"
    slots.give_back(second)
    assert slots.take(4) is second
    cluster.now += 31
    third = slots.take(4)
    assert third is not None
    slots.close()


def test_no_more_is_given_up_than_is_lacking(cluster: Cluster) -> None:
    slots = places()
    taken = [slot for _ in range(4) if (slot := slots.take(4)) is not None]
    taken[3].crew.lacks_room = True  # type: ignore[attr-defined]
    for slot in taken[:3]:
        slots.give_back(slot)
    slots.trim()  # what was given up is not there at once
    assert [slot.crew.is_closed for slot in taken] == [True, False, False, False]  # type: ignore[attr-defined]
    cluster.now += 5.1
    slots.trim()
    assert [slot.crew.is_closed for slot in taken] == [True, True, False, False]  # type: ignore[attr-defined]
    slots.close()


def test_where_machines_have_gone_places_are_let_go_when_they_come_free(cluster: Cluster) -> None:
    slots = places()
    taken = [slots.take(4) for _ in range(4)]
    cluster.nodes = [{"CPU": 2.0}]
    assert slots.limit == 4 and cluster.looks == 1, "it is not asked for every trial"
    cluster.now += 1.1
    assert slots.limit == 2
    for slot in taken:
        assert slot is not None
        slots.give_back(slot)
    assert [slot.crew.is_closed for slot in taken if slot] == [True, True, False, False]  # type: ignore[attr-defined]
    cluster.nodes = [{"CPU": 3.0}]
    cluster.now += 1.1
    assert [slots.take(4) is not None for _ in range(4)] == [True, True, True, False]
    slots.close()


@pytest.mark.parametrize(
    ("cpus", "wanted", "expected"),
    [(8, 1, [6]), (8, 2, [4, 4]), (8, 3, [2, 2, 2]), (8, 9, [2, 2, 2, 2]), (9, 2, [4, 4]), (3, 5, [3])],
)
def test_trials_that_may_have_more_workers_share_what_there_is(
    cluster: Cluster, cpus: int, wanted: int, expected: list[int]
) -> None:
    cluster.nodes = [{"CPU": float(cpus)}]
    slots = places(2, 6)
    taken = [slot for _ in range(len(expected)) if (slot := slots.take(wanted)) is not None]
    assert [slot.size for slot in taken] == [Size(2, most) for most in expected]
    slots.close()


def test_a_share_is_handed_on_as_long_as_it_is_the_same(cluster: Cluster) -> None:
    cluster.nodes = [{"CPU": 8.0}]
    slots = places(1, 4)
    taken = [slots.take(4) for _ in range(4)]
    for slot in taken:
        assert slot is not None and slot.size == Size(1, 2)
        slots.give_back(slot)
    assert slots.take(4) is taken[0], "with its workers"
    cluster.nodes = [{"CPU": 4.0}]
    cluster.now += 1.1
    smaller = slots.take(4)
    assert smaller is not None and smaller.size == Size(1, 1)
    assert [slot.crew.is_closed for slot in taken if slot] == [False, True, True, True]  # type: ignore[attr-defined]
    slots.close()


def test_a_share_that_is_too_small_or_large_is_better_than_none(cluster: Cluster) -> None:
    cluster.nodes = [{"CPU": 8.0}]
    slots = places(1, 4)
    first, second = slots.take(4), slots.take(4)
    assert first is not None and second is not None
    slots.give_back(second, is_whole=False)  # others use the cluster too
    slots.give_back(first)
    assert slots.take(1) is first
    slots.close()


def test_places_that_nobody_uses_do_not_keep_what_others_lack(cluster: Cluster) -> None:
    cluster.nodes = [{"CPU": 8.0}]
    slots = places(1, 2)
    taken = [slot for _ in range(4) if (slot := slots.take(4)) is not None]
    for slot in taken[:3]:
        slots.give_back(slot)
    slots.trim()
    assert not any(slot.crew.is_closed for slot in taken)  # type: ignore[attr-defined]
    cluster.nodes = [{"CPU": 4.0}]
    cluster.now += 1.1
    slots.trim()  # there would be room for four of one worker each, but these hold two each
    assert [slot.crew.is_closed for slot in taken] == [True, True, False, False]  # type: ignore[attr-defined]
    slots.close()


def test_what_is_missing_for_a_single_trial_is_told_unless_the_cluster_can_grow(cluster: Cluster) -> None:
    assert places(4).obstacle() is None
    assert places(5).obstacle() == "5 workers need 5 CPU and the cluster has 4"
    cluster.can_grow = True
    assert places(5).obstacle() is None and places(5).limit == 1, "a place that is asked for makes it grow"
    assert places(2).limit == 3 and places(2, at_most=2).limit == 2
