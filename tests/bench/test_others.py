"""Whether others took the machine's cores."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.bench import others
from shoal.bench.others import QUIET, Watch, quietly


@contextlib.contextmanager
def somebody() -> Iterator[None]:
    """Who works, and is no child of ours that has ended."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        time.sleep(0.1)
        yield
        process.kill()


def work(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_who_works_beside_us_is_seen() -> None:
    cores = others.os.cpu_count() or 1
    with somebody():
        watch = Watch()
        time.sleep(1)
        assert watch.others() > 0.4 / cores


def test_our_own_work_and_that_of_our_children_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    began = others._own_s()
    busy = others._busy_s()
    monkeypatch.setattr(others, "_busy_s", lambda: busy + others._own_s() - began)  # nobody else works
    watch = Watch()
    subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    work(0.3)
    assert others._own_s() - began > 0.4 and watch.others() == pytest.approx(0, abs=1e-6)


def test_what_was_disturbed_is_measured_again_and_the_quietest_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.4, 0.2, 0.3, 0.01])
    monkeypatch.setattr(others, "_wait_for_quiet", lambda patience_s: None)
    monkeypatch.setattr(Watch, "others", lambda self: next(shares))
    numbers = iter(range(9))
    assert quietly(lambda: next(numbers)) == (1, 0.2)
    assert quietly(lambda: next(numbers)) == (3, 0.01) and QUIET == 0.05


def test_it_waits_for_quiet_and_not_for_ever() -> None:
    with somebody():
        began = time.monotonic()
        assert quietly(lambda: "found", attempts=1, patience_s=0.7)[0] == "found"
        assert time.monotonic() - began < 5


def test_a_kernel_that_does_not_tell_is_taken_for_quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(others, "_STAT", tmp_path / "none")
    with somebody():
        watch = Watch()
        time.sleep(0.2)
        assert watch.others() == 0
