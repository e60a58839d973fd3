"""What a trainer is told when it is started; all of it plain values, which travel as JSON."""

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from shoal.launch.account import Account
from shoal.launch.attempt import Attempt
from shoal.launch.crew import LOOPBACK
from shoal.launch.environment import nccl_environment, referenced_environment


def meeting_host(attempt: Attempt) -> str:
    """Where the workers meet: nowhere beyond this machine if they are all on one."""
    return LOOPBACK if len({member.node for member in attempt.members}) == 1 else attempt.members[0].address


def make_job(account: Account, attempt: Attempt, rank: int, port: int, threads: int | None) -> dict[str, Any]:
    """The job of one worker."""
    nodes = [member.node for member in attempt.members]
    loaded, how = account.prepared.loaded, account.how
    recipe = loaded.recipe
    return {
        "recipe": loaded.tree(),
        "run_dir": str(account.run_dir),
        "resume": account.prepared.resume,
        "restarts": account.restarts,
        "starts": attempt.number,
        "started": how.started,
        "marks": how.marks,
        "launch": how.asked,
        "first_step_s": account.first_step_s,
        "threads": threads,
        "pause_at": how.pause_at,
        "node": nodes[rank],
        "address": LOOPBACK if len(set(nodes)) == 1 else attempt.members[rank].address,
        "local_rank": nodes[:rank].count(nodes[rank]),
        "local_world_size": nodes.count(nodes[rank]),
        "environment": nccl_environment(recipe.nccl) | referenced_environment(loaded),
        "directory": os.getcwd(),  # noqa: PTH109 - as a string
        "paths": own_paths(),
        "meeting": {
            "rank": rank,
            "world_size": len(nodes),
            "host": meeting_host(attempt),
            "port": port,
            # The launcher notices a hang before; torch's own limit is for a hang before the first step.
            "timeout_s": recipe.nccl.timeout_s or recipe.failures.hang_timeout_s + 60,
        },
    }


def own_paths() -> list[str]:
    """Where this process finds modules, but for Python's own and those that are installed: workers have them too."""
    python = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return [
        path
        for path in sys.path
        if path
        and Path(path).is_dir()
        and not path.endswith(("site-packages", "dist-packages"))
        and not any(Path(path).is_relative_to(folder) for folder in python)
    ]
