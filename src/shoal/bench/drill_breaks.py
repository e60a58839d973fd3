"""The ways in which a drill breaks a run: one function each, from a run well under way to what was done to it."""

import contextlib
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.drill_cluster import DrillCluster
from shoal.bench.drill_run import OverError, TrainRun
from shoal.bench.drill_victim import Victim, held, on_this_machine
from shoal.checkpoint.folder import step_folders, step_of, worker_name

_SLOW_FOR_S = 4.0
_STOPPED_S, _RUNNING_S = 0.5, 0.1
_PREEMPT_WITHIN_S = 30.0
_END_OF_WORKERS_S = 60.0
"""How long the workers of a launcher that was killed may go on."""
_ROOM_BYTES = 1000
"""What a full disk still takes of a file; what a worker saves is longer, be the model ever so small."""
_SAVES_TO_FAIL = 2
"""So many have come to nothing before the disk takes files again."""


class LossError(Exception):
    """The run did not get as far as it should have."""


@dataclass(frozen=True)
class Break:
    """What was done to a run."""

    what: str
    time: float
    """In unix seconds."""
    rank: int | None = None
    noticed: float | None = None
    """When, where no event tells."""
    resumes_at: int | None = None
    """The step that the run must go on from, where there is but one right answer."""
    spoilt: int | None = None
    """The checkpoint that must be found out."""
    over: float | None = None
    """When a disk took files again, after some could not be saved; in unix seconds."""


@dataclass(frozen=True)
class Scene:
    """A run that is well under way, and what it takes to break it."""

    run: TrainRun
    draw: random.Random
    cluster: DrillCluster | None
    stack: contextlib.ExitStack
    """What is let go of when the run is over."""

    def worker(self) -> dict[str, Any]:
        """One of its workers, drawn."""
        return self.draw.choice(on_this_machine(self.run.workers()))

    def victim(self) -> Victim:
        """The process of one of them."""
        return self.stack.enter_context(held(self.worker()))[0]


def kill_worker(scene: Scene) -> Break:
    """SIGKILL to a worker."""
    victim = scene.victim()
    now = time.time()
    victim.send(signal.SIGKILL)
    return Break(f"worker {victim.rank} killed (process {victim.pid})", now, victim.rank)


def hang_worker(scene: Scene) -> Break:
    """A worker that is there and does nothing."""
    victim = scene.victim()
    now = time.time()
    victim.send(signal.SIGSTOP)
    return Break(f"worker {victim.rank} stopped (process {victim.pid})", now, victim.rank)


def slow_worker(scene: Scene) -> Break:
    """A worker that stands most of the time."""
    victim = scene.victim()
    now = time.time()
    while True:
        victim.send(signal.SIGSTOP)
        if victim.has_ended(_STOPPED_S):
            raise OverError(f"worker {victim.rank} had ended")
        victim.send(signal.SIGCONT)
        if time.time() - now > _SLOW_FOR_S or victim.has_ended(_RUNNING_S):
            break
    slowed_s = time.time() - now
    return Break(f"worker {victim.rank} slowed for {slowed_s:.1f} s (process {victim.pid})", now, victim.rank)


def kill_node(scene: Scene) -> Break:
    """A Ray node gone with everything on it."""
    assert scene.cluster is not None
    worker = scene.worker()
    now = time.time()
    scene.cluster.kill(worker["node"])
    return Break(f"node of worker {worker['rank']} killed ({worker['node'][:8]})", now, worker["rank"])


def preempt(scene: Scene) -> Break:
    """A Ray node that is about to be taken away."""
    assert scene.cluster is not None
    worker = scene.worker()
    now = time.time()
    scene.cluster.preempt(worker["node"], _PREEMPT_WITHIN_S)
    return Break(f"node of worker {worker['rank']} drained ({worker['node'][:8]})", now, worker["rank"])


def kill_driver(scene: Scene) -> Break:
    """SIGKILL to the launcher: its workers must end by themselves, and the run must go on with --resume."""
    with held(*on_this_machine(scene.run.workers())) as workers:
        now = time.time()
        scene.run.kill()
        for worker in workers:
            if not worker.has_ended(now + _END_OF_WORKERS_S - time.time()):
                raise LossError(f"worker {worker.rank} trained on for {_END_OF_WORKERS_S:.0f} s without its launcher")
        noticed = time.time()
    scene.run.wait_until_free()
    scene.run.resume()
    return Break("launcher killed, then --resume", now, noticed=noticed)


def corrupt_checkpoint(scene: Scene) -> Break:
    """Ctrl-C, another bit in the newest checkpoint, and --resume: the one before must be used."""
    status = scene.run.interrupt()
    if status == 0:
        raise OverError("the run was done before it could be interrupted")
    if status != 130:
        raise LossError(f"the run ended with status {status} when it was interrupted: {scene.run.complaint()}")
    *_, before, newest = step_folders(scene.run.checkpoints)
    file = scene.draw.choice(sorted(newest.iterdir()))
    flip_a_bit(file, scene.draw)
    now = time.time()
    scene.run.resume()
    what = f"a bit of {newest.name}/{file.name} flipped, then --resume"
    return Break(what, now, resumes_at=step_of(before), spoilt=step_of(newest))


def flip_a_bit(path: Path, draw: random.Random) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        place = draw.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))


def kill_while_saving(scene: Scene) -> Break:
    """SIGKILL to a worker while a checkpoint is being written: what is half there must not be taken for one."""
    victim = scene.victim()
    while True:
        aside = scene.run.wait_for_save()
        victim.stop()
        if victim.has_ended(0.0):
            raise OverError(f"worker {victim.rank} had ended")
        if is_in_the_middle(aside, victim.rank):
            break
        victim.send(signal.SIGCONT)  # it was faster; the next one, then
    committed = step_of(step_folders(scene.run.checkpoints)[-1])
    now = time.time()
    victim.send(signal.SIGKILL)
    what = f"worker {victim.rank} killed while {_step_name_in(aside)} was being written (process {victim.pid})"
    return Break(what, now, victim.rank, resumes_at=committed)


def is_in_the_middle(aside: Path, rank: int) -> bool:
    """Whether the checkpoint that is put together in `aside` cannot be committed without this worker, which stands.

    Rank 0 renames the folder when all is done; of another, rank 0 waits for its part, whose last file is its JSON.
    """
    return aside.is_dir() and (rank == 0 or not (aside / worker_name(rank)).exists())


def _step_name_in(aside: Path) -> str:
    """`step-00000500`"""
    return "-".join(aside.name.split("-")[1:3])


def fill_disk(scene: Scene) -> Break:
    """No file of a worker may grow, until saves have failed. It is a limit that the kernel sets to those processes, and
    stands for a full disk, which nobody wants to fill for real."""
    with contextlib.ExitStack() as stack:
        victims = stack.enter_context(held(*on_this_machine(scene.run.workers())))
        now = time.time()
        for victim in victims:
            stack.enter_context(victim.files_up_to(_ROOM_BYTES))
        is_done = scene.run.wait_for_failed_saves(
            _SAVES_TO_FAIL, lambda: any(victim.has_ended(0.0) for victim in victims)
        )
        over = time.time()
    what = f"no file could grow beyond {_ROOM_BYTES:,} bytes for {over - now:.1f} s"
    return Break(what, now, over=over if is_done else None)


BREAKS = {
    "kill-worker": kill_worker,
    "hang-worker": hang_worker,
    "slow-worker": slow_worker,
    "kill-node": kill_node,
    "preempt": preempt,
    "kill-driver": kill_driver,
    "corrupt-checkpoint": corrupt_checkpoint,
    "kill-while-saving": kill_while_saving,
    "fill-disk": fill_disk,
}
NOTICES = {
    "kill-worker": "failure",
    "hang-worker": "hang",
    "kill-node": "failure",
    "preempt": "preemption",
    "corrupt-checkpoint": "checkpoint_rejected",
    "kill-while-saving": "failure",
    "fill-disk": "save_failed",
}
"""The event by which a run tells that it has noticed."""
NEED_NODES = ("kill-node", "preempt")
NEED_A_LAUNCHER = ("kill-worker", "hang-worker", "kill-while-saving")
"""Drills in which somebody must be left who starts the worker again."""
GO_ON = {"slow-worker": "one of them was merely slow", "fill-disk": "only the disk was full"}
"""Drills in which nobody may be restarted, and why not."""
