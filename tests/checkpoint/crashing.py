"""A process that forks children which save until they are killed: run by test_crash.py, one line a command.

`count FOLDER STORE`: a child that is not killed; answers with how many lines of each function it has run.
`kill FOLDER STORE FUNCTION NUMBER`: a child that kills itself before the NUMBER-th line that it runs in FUNCTION.
`time FOLDER STORE SECONDS`: a child that is killed after so many seconds.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import fsspec.implementations.local
import torch

import shoal.checkpoint
import shoal.core.remote
from shoal.checkpoint import shard
from shoal.checkpoint.folder import clear_leftovers, list_checkpoints
from shoal.checkpoint.saver import Saver
from shoal.checkpoint.section import CheckpointSection
from tests.checkpoint.states import ALONE, snapshot

SAVES = 4
_CODE = (str(Path(shoal.checkpoint.__file__).parent), shoal.core.remote.__file__)


class Watch:
    """Counts the lines that are run in the package, by function, and kills before one of them."""

    def __init__(self, function: str = "", number: int = 0) -> None:
        self.function = function
        self.number = number
        self.lines: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(_CODE):
            return None
        if event == "line":
            name = f"{Path(code.co_filename).stem}.{code.co_qualname.split('.<locals>')[0]}"
            self.lines[name] += 1
            if name == self.function and self.lines[name] == self.number:
                os.kill(os.getpid(), signal.SIGKILL)
        return self


def save(folder: Path, store: Path) -> None:
    """As a run that is started again: clear up, and save the steps that follow."""
    clear_leftovers(folder)
    step = list_checkpoints(folder)[-1].step
    settings = CheckpointSection(keep_last=1, keep_best=1, metric="val_loss", upload_to=f"file://{store}")
    saver = Saver(folder, settings, ALONE, recipe="name: x\n")
    for number in range(1, SAVES + 1):
        saver.save(snapshot(step + number, finite=frozenset({"model.weight"})))
    saver.finish()


def run_child(words: list[str], answer: int) -> None:
    command, folder, store, *target = words
    watch = Watch(target[0], int(target[1])) if command == "kill" else Watch()
    if command != "time":
        threading.settrace(watch)
        sys.settrace(watch)
    save(Path(folder), Path(store))
    sys.settrace(None)
    os.write(answer, json.dumps(watch.lines).encode())


def main() -> None:
    torch.set_num_threads(1)
    shard._CHUNK = 30_000  # so that files are written in several pieces, between which a child can be killed
    assert fsspec.implementations.local
    for line in sys.stdin:
        words = line.split()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            run_child(words, writer)
            os._exit(0)
        os.close(writer)
        if words[0] == "time":
            time.sleep(float(words[3]))
            os.kill(child, signal.SIGKILL)
        with os.fdopen(reader, "rb") as answer:
            lines = answer.read().decode()
        _, status = os.waitpid(child, 0)
        print(json.dumps({"killed": os.WIFSIGNALED(status), "status": status, "lines": lines}), flush=True)


if __name__ == "__main__":
    main()
