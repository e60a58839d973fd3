"""An all-reduce over all workers: the processes of one machine, and what came of all of them."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.deploy.doctor.finding import Finding, in_list, passed, skipped
from shoal.deploy.doctor.pairs import in_bits

STAGES = ("started", "ready", "reached", "joined", "done")
"""How far a rank is: the process runs; torch is imported; rank 0's machine answers; all have met; the sum is right."""
_IN = {
    "started": "importing torch",
    "ready": "reaching the machine of rank 0",
    "reached": "meeting the others",
    "joined": "summing",
}
JOIN_WITHIN_S = 30.0
"""For meeting, and for a collective."""
LIMIT_S = 90.0
"""In all: torch's libraries may come from a slow disk."""


@dataclass(frozen=True)
class Rank:
    """What is known of one rank."""

    node: str
    rank: int
    stage: str = "started"
    error: str = ""
    seconds: float = 0.0
    num_bytes: int = 0


class RankProcess:
    """One rank, run on this machine."""

    def __init__(self, job: Mapping[str, Any], environment: Mapping[str, str], listen_fd: int | None = None) -> None:
        self._said: dict[str, Any] = {"stage": "started"}
        reading, writing = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        given = [writing] + ([listen_fd] if listen_fd is not None else [])
        self._process = subprocess.Popen(  # noqa: S603 - ourselves
            [sys.executable, "-m", "shoal.deploy.doctor.reduce_rank", str(writing)],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=given,
            text=True,
        )
        os.close(writing)
        self._reader = threading.Thread(target=self._read, args=(reading,), name="doctor-rank", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dict(job) | {"listen_fd": listen_fd}) + "\n")
        self._process.stdin.flush()

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as lines:
            for line in lines:
                said = json.loads(line)
                # A failure keeps the stage in which it came.
                self._said = self._said | {"error": said["error"]} if said["stage"] == "failed" else said

    def state(self) -> dict[str, Any]:
        """How far it is; with an `error` once it has failed."""
        ended = self._process.poll()
        if ended is not None:
            self._reader.join(timeout=1.0)
            if self._said["stage"] != "done" and "error" not in self._said:
                self._said = self._said | {"error": f"ended with status {ended}: {self._last_words()}"}
        return dict(self._said)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=1.0)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._log.close()


def judge_reduce(check: str, ranks: Sequence[Rank], timeout_s: float, busy: str = "") -> Finding:
    """Whether all came, and how fast it was; where not all came, who did not."""
    if len(ranks) < 2:
        return skipped(check, "one rank, which has nobody to sum with")
    if all(rank.stage == "done" for rank in ranks):
        return _judge_speed(check, ranks, busy)
    failed = [rank for rank in ranks if rank.error]
    least = min(STAGES.index(rank.stage) for rank in ranks)
    behind = [rank for rank in ranks if STAGES.index(rank.stage) == least]
    advice = "see the check connections; nccl.debug=INFO tells more of GPUs, nccl.interface names the network"
    if any("the sum is wrong" in rank.error for rank in failed):
        words = in_list(f"rank {rank.rank} on {rank.node}: {rank.error}" for rank in failed)
        advice = "a machine computes or transfers wrongly: leave out one after the other, and test its memory and GPU"
        return Finding(check, "fail", words, advice)
    doing = _IN[STAGES[least]]
    if len(behind) == len(ranks):
        who = f"none of {len(ranks)} ranks"
    else:
        who = in_list(f"rank {rank.rank} on {rank.node}" for rank in behind)
    own = [rank for rank in behind if rank.error]
    if own:  # what the others then complain of is its consequence
        errors = in_list(dict.fromkeys(rank.error for rank in own), 2)
        verb = "came through" if len(behind) == len(ranks) else "failed"
        return Finding(check, "fail", f"{who} {verb}, {doing}: {errors}", advice)
    verb = "came through" if len(behind) == len(ranks) else "did not come"
    return Finding(check, "fail", f"{who} {verb} within {timeout_s:.0f} s: stuck {doing}", advice)


def _judge_speed(check: str, ranks: Sequence[Rank], busy: str) -> Finding:
    seconds, size = max(rank.seconds for rank in ranks), ranks[0].num_bytes
    # What each link carries: every byte goes to and fro but for a rank's own part.
    on_bus = 2 * (len(ranks) - 1) / len(ranks) * size / seconds if seconds else 0.0
    nodes = len({rank.node for rank in ranks})
    found = f"{len(ranks)} ranks on {nodes} machines, the sum is right; {size >> 20} MiB in {1000 * seconds:.3g} ms"
    return passed(check, f"{found}, {in_bits(on_bus)} on the bus{f' ({busy})' if busy else ''}")
