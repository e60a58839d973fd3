"""What the process does that tells others of a run: follow its folder, for each sink by itself."""

import contextlib
import json
import logging
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from filelock import FileLock, Timeout

from shoal.observe.runs import read_events
from shoal.observe.track.build import make_followers
from shoal.observe.track.facts import ENDS
from shoal.observe.track.follow import Follower, is_gone
from shoal.observe.track.progress import FOLDER
from shoal.train.mlflow_model import log_model
from shoal.train.track import END, LOG, Asked

SETTINGS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_ARTIFACT_UPLOAD_DOWNLOAD_TIMEOUT": "60",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""For packages that take no arguments: not to wait long, and not to tell their makers."""
_REPEATING = ("urllib3.connectionpool", "opentelemetry.exporter")
"""Loggers of packages that tell of every attempt; why nothing was taken is told once, in words of ours."""
_LOOK_S = 0.5
_FOR_A_WORD_S = 25.0
"""How long one that has lost its parent waits for what the launcher has to say of that."""
_MOST_LOG_BYTES = 5_000_000
_ATTEMPTS = 3


def beside(run_dir: Path, asked: Asked, parent: int) -> NoReturn:
    """Follow the run until the parent says that it is over, or is gone; then send the rest, if that is soon done."""
    say, _ = _prepare(run_dir, asked)
    lock = _lock(run_dir)
    with contextlib.suppress(OSError, NotImplementedError):
        # The one of the workers before these may still be at it, for as long as it may.
        lock.acquire(timeout=2 * (asked.section.wait_s + _FOR_A_WORD_S))
    followers = make_followers(run_dir, asked.section, say, asked.hide, partial(log_model, run_dir))
    ending, is_at_work = threading.Event(), threading.Event()
    is_at_work.set()
    threads = [
        threading.Thread(target=follower.run, args=(ending, is_at_work.is_set), name=follower.name, daemon=True)
        for follower in followers
    ]
    for thread in threads:
        thread.start()
    say(f"following, for {', '.join(asked.section.sinks)}")
    if not _wait_for_end(run_dir, parent) or is_gone(run_dir):
        is_at_work.clear()
    ending.set()
    deadline = time.monotonic() + asked.section.wait_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    left = [follower.name for follower in followers if not follower.is_done]
    say(f"ends; not all was sent to {', '.join(left)}" if left else "ends; all is sent")
    if is_gone(run_dir):
        _clear(run_dir)
    _leave(1 if left else 0)


def _clear(run_dir: Path) -> None:
    """What this process has written while the folder was being taken away must not keep it there."""
    shutil.rmtree(run_dir / FOLDER, ignore_errors=True)
    with contextlib.suppress(OSError):  # there is more, of somebody else
        run_dir.rmdir()


def once(run_dir: Path, asked: Asked) -> NoReturn:
    """Send what was not sent yet; the last line on stdout says how that went."""
    stdout = os.dup(1)
    say, hide = _prepare(run_dir, asked)
    problems: dict[str, str] = {}
    targets: dict[str, str] = {}
    lock = _lock(run_dir)
    try:
        try:
            lock.acquire(timeout=1.0)
        except Timeout:
            raise
        except (OSError, NotImplementedError) as error:  # a full disk, or one without locks
            say(f"goes on without a lock: {error}")
        followers = make_followers(run_dir, asked.section, say, hide, partial(log_model, run_dir))
        for thread in [_started(follower) for follower in followers]:
            thread.join()
        for follower in followers:
            targets[follower.name] = follower.progress.target
            if not follower.is_done:
                problems[follower.name] = follower.progress.problem or "see track/log"
    except Timeout:
        targets = dict.fromkeys(asked.section.sinks, "")
        problems = dict.fromkeys(
            asked.section.sinks, "another process is sending it, beside its training or by shoal track"
        )
    os.write(stdout, (json.dumps({"targets": targets, "problems": problems}) + "\n").encode())
    _leave(1 if problems else 0)


def _started(follower: Follower) -> threading.Thread:
    def attempt() -> None:
        for _ in range(_ATTEMPTS):
            if follower.sync(is_at_work=False):
                follower.close()
                follower.is_done = True
                return
            time.sleep(1.0)

    thread = threading.Thread(target=attempt, name=follower.name, daemon=True)
    thread.start()
    return thread


def _wait_for_end(run_dir: Path, parent: int) -> bool:
    """Until there is nothing more to wait for; whether somebody is still at work on the run, or has ended it well."""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], _LOOK_S)
        if ready:
            if os.read(0, len(END)) == END:
                return True
            break  # it has closed its end, which only happens when it ends
    began = sum(event["event"] == "start" for event in read_events(run_dir))
    for _ in range(round(_FOR_A_WORD_S / _LOOK_S)):
        if is_gone(run_dir):
            return False
        events = read_events(run_dir)
        last = next((event["event"] for event in reversed(events) if event["event"] in (*ENDS, "start")), "start")
        if last in ENDS or sum(event["event"] == "start" for event in events) > began:
            return True
        time.sleep(_LOOK_S)
    return False


def _prepare(run_dir: Path, asked: Asked) -> tuple[Callable[[str], None], Callable[[str], str]]:
    """Be modest: others come first for the cores, and this process first when memory runs out."""
    os.nice(10)
    with contextlib.suppress(OSError):  # the worker may be kept to cores of its own
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    for name in _REPEATING:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    _write_to_log(run_dir / FOLDER / LOG, asked.hide)

    def say(words: str) -> None:
        print(f"{time.strftime('%F %T')} {words}", flush=True)

    return say, asked.hide


def _write_to_log(path: Path, hide: Callable[[str], str]) -> None:
    """Whatever this process and those that it starts say goes to a file, without secrets, and not without an end."""
    outlet, inlet = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(inlet, 1)
    os.dup2(inlet, 2)
    os.close(inlet)

    def copy() -> None:
        with os.fdopen(outlet, "r", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                with contextlib.suppress(OSError):  # a full disk
                    path.parent.mkdir(exist_ok=True)
                    with path.open("a", encoding="utf-8") as file:
                        if file.tell() < _MOST_LOG_BYTES:
                            file.write(hide(line))

    threading.Thread(target=copy, name="log", daemon=True).start()


def _lock(run_dir: Path) -> Any:
    with contextlib.suppress(OSError):
        (run_dir / FOLDER).mkdir(exist_ok=True)
    return FileLock(run_dir / FOLDER / ".lock")


def _leave(status: int) -> NoReturn:
    """At once: a thread that hangs, or a package that cleans up, must not hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.1)  # for the last lines of the log
    os._exit(status)
