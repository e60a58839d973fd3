"""Under coverage, a forked process writes down what it covered itself, once.

Coverage starts anew in a process that was forked, but leaves the exit of the process that it came from in place. That
one would write down all that was covered there too, again for each of hundreds of forks.
"""

import contextlib
import os
import posix
import sys
from typing import NoReturn


def _save_once() -> None:
    coverage = sys.modules.get("coverage")
    if coverage is None or (covered := coverage.Coverage.current()) is None:
        return

    def leave(status: int) -> NoReturn:
        with contextlib.suppress(Exception):
            covered.save()
        posix._exit(status)

    os._exit = leave


os.register_at_fork(after_in_child=_save_once)  # after coverage's own, which was there before
