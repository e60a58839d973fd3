import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from shoal.launch.interrupts import Interrupts

TWICE = """
import os, signal, time
from shoal.launch.interrupts import Interrupts
with Interrupts() as stop:
    for _ in range(2):
        os.kill(os.getpid(), signal.{name})
        time.sleep({pause})
    print("still here")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_asks_to_stop_and_says_so(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as stop:
        stop.enter("training")
        assert stop() is None
        os.kill(os.getpid(), number)
        assert stop() == number.name == stop()
    assert f"{number.name}: saving after this step; once more to stop at once" in capfd.readouterr().err


def test_a_display_that_tells_of_it_is_not_torn_apart(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as stop:
        stop.tell_elsewhere()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop() == "SIGINT"
    assert capfd.readouterr() == ("", "")


def test_before_the_first_step_nothing_is_promised_to_be_saved(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop() == "SIGTERM"
    assert capfd.readouterr().err == "SIGTERM: ending, because no step was taken yet\n"


def test_while_this_process_builds_a_signal_ends_what_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as stop:
        stop.enter("building")
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            subprocess.run(["sh", "-c", f"sleep 0.3; kill -TERM {os.getpid()}; exec sleep 20"])
        assert time.monotonic() - began < 10 and stop() == "SIGTERM"
    with Interrupts() as stop:
        os.kill(os.getpid(), signal.SIGINT)  # just before it builds
        with pytest.raises(KeyboardInterrupt):
            stop.enter("building")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_handlers_from_before_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(ZeroDivisionError), Interrupts():
        assert signal.getsignal(number) != before
        raise ZeroDivisionError
    assert signal.getsignal(number) == before


def test_two_runs_in_one_process_each_catch_their_own(capfd: pytest.CaptureFixture[str]) -> None:
    with Interrupts() as first:
        os.kill(os.getpid(), signal.SIGINT)
    with Interrupts() as second:
        assert first() == "SIGINT" and second() is None


def test_in_another_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def enter() -> None:
        with Interrupts() as stop:
            seen.append((stop(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [(None, before)]
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_second_signal_stops_at_once(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWICE.format(name=name, pause=0.6)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 130
    assert ended.stdout == ""
    assert ended.stderr.splitlines()[-1] == "stopped at once"


def test_the_same_signal_passed_on_twice_counts_once() -> None:
    script = TWICE.format(name="SIGINT", pause=0.005)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "still here\n")


def test_a_closed_terminal_counts_too_unless_it_is_ignored() -> None:
    before = signal.getsignal(signal.SIGHUP)
    with Interrupts() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop() == "SIGHUP"
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with Interrupts() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop() is None
    finally:
        signal.signal(signal.SIGHUP, before)
