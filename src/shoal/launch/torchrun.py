"""Workers by torchrun: started for the user, or joined where the user has started `shoal train` under it."""

from typing import Any

from shoal.launch.run import Launch, Prepared


def run_by_torchrun(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Have torchrun start the workers on this machine."""
    raise NotImplementedError


def run_under_torchrun(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Be one of the workers that torchrun has started."""
    raise NotImplementedError
