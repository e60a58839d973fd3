"""The checks of a cluster in a process of their own: Ray may block there without end, or end it, and no signal would be
answered meanwhile. Who waits for that process is always told something, and can always end it."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from shoal.deploy.doctor.cluster import check_cluster
from shoal.deploy.doctor.finding import Finding

CONNECT_WITHIN_S = 60.0
SILENT_S = 240.0
"""Longer than anything may last, by limits of its own, between two words of it."""
_CLOSE_WITHIN_S = 20.0
"""To end what was started on the cluster."""
_LEAVE_WITHIN_S = 1.0
"""The same before there is a connection."""


def check_apart(address: str, storage: str | None, tell: Callable[[str], None]) -> Generator[Finding, None, None]:
    """As `check_cluster`; if that blocks or breaks, there is a finding which says so."""
    command = [sys.executable, "-P", "-m", "shoal.deploy.doctor.apart"]
    # In a session of its own: a Ctrl-C is told once, by us, and not by the terminal too.
    process = subprocess.Popen(  # noqa: S603 - ourselves
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    lines: queue.Queue[str] = queue.Queue()
    reader = threading.Thread(target=_read, args=(process, lines), name="doctor-apart", daemon=True)
    grace_s = _LEAVE_WITHIN_S
    try:
        reader.start()
        with contextlib.suppress(BrokenPipeError):  # its end is noticed below
            process.stdin.write(json.dumps({"address": address, "storage": storage}) + "\n")
            process.stdin.flush()
        for finding in _follow(process, lines, tell):
            grace_s = _CLOSE_WITHIN_S
            yield finding
    finally:
        _end(process, grace_s)
        reader.join()


def _read(process: "subprocess.Popen[str]", lines: "queue.Queue[str]") -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.put(line)
    lines.put("")


def _follow(
    process: "subprocess.Popen[str]", lines: "queue.Queue[str]", tell: Callable[[str], None]
) -> Generator[Finding, None, None]:
    doing, limit_s = "starting", CONNECT_WITHIN_S
    while True:
        try:
            line = lines.get(timeout=limit_s)
        except queue.Empty:
            process.kill()
            yield _broken(f"no answer within {limit_s:.0f} s, {doing}")
            return
        if not line:
            yield _broken(f"the doctor's own process has ended (status {process.wait()}), {doing}")
            return
        said: dict[str, Any] = json.loads(line)
        if said.get("is_end"):
            return
        if "doing" in said:
            if doing != said["doing"]:  # else it goes on with it
                tell(said["doing"])
            doing = said["doing"]
        else:
            finding = Finding(**said)
            limit_s = SILENT_S  # it is connected
            yield finding


def _broken(found: str) -> Finding:
    advice = "is Ray stopped or overloaded, on the head or here? ray status tells; if it stays so: ray stop, ray start"
    return Finding("connect", "fail", found, advice, group="cluster")


def _end(process: "subprocess.Popen[str]", within_s: float) -> None:
    """Have it end what it has started on the cluster, and itself."""
    assert process.stdin is not None
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=within_s)
    finally:  # also on a second Ctrl-C
        process.kill()
        process.wait()


def main() -> int:
    """The process: what to do comes on stdin, and when that is closed the work ends; findings go to stdout."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints there now and then
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may have been ignored

    def say(**said: Any) -> None:
        print(json.dumps(said), file=out, flush=True)

    wanted = json.loads(sys.stdin.readline())
    threading.Thread(target=_watch, name="doctor-watch", daemon=True).start()
    try:
        with contextlib.closing(check_cluster(**wanted, tell=lambda words: say(doing=words))) as findings:
            for finding in findings:
                say(**finding.to_record())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing is left to interrupt
        say(is_end=True)
    except (KeyboardInterrupt, BrokenPipeError):
        return 1
    return 0


def _watch() -> None:
    """Interrupt the work when who asked for it is gone or wants no more."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(_CLOSE_WITHIN_S)
    os._exit(1)  # Ray blocks


if __name__ == "__main__":
    os._exit(main())  # at once: Ray has been left already, and would have more to do at exit
