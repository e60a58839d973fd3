"""Asking Ray which machines will go, while its head may be away."""

import threading
import time

import pytest

ray = pytest.importorskip("ray")

from shoal.launch import ray_crew  # noqa: E402
from shoal.launch.ray_crew import Departures  # noqa: E402


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What Ray answers, in turn; an event is waited for, and the last answer stays."""
    found: list[object] = []

    def ask() -> object:
        answer = found.pop(0) if len(found) > 1 else found[0]
        if isinstance(answer, threading.Event):
            answer.wait(20)
            return {}
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(ray._private.state.state, "get_draining_nodes", ask)
    monkeypatch.setattr(ray_crew, "_LOOK_EVERY_S", 0.01)
    return found


def until(departures: Departures, nodes: set[str]) -> None:
    deadline = time.monotonic() + 5
    while departures.nodes != nodes:
        assert time.monotonic() < deadline, departures.nodes
        time.sleep(0.005)


def test_a_head_that_is_away_keeps_nobody_waiting_and_what_it_said_stays(answers: list[object]) -> None:
    away = threading.Event()
    answers += [{"a": 1}, away, ConnectionError("GCS is gone"), {"a": 1, "b": 1}]
    departures = Departures()
    until(departures, {"a"})
    began = time.monotonic()
    for _ in range(100):
        assert departures.nodes == {"a"}
    assert time.monotonic() - began < 0.5
    away.set()
    until(departures, {"a", "b"})
    departures.close()


def test_its_end_does_not_wait_for_a_head_that_is_away(answers: list[object]) -> None:
    away = threading.Event()
    answers += [away]
    departures = Departures()
    began = time.monotonic()
    departures.close()
    assert time.monotonic() - began < 2.0
    away.set()
