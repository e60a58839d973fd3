"""The `observe:` section. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.core.section import Section


class ProfileSection(Section):
    """A few steps recorded in full by PyTorch's profiler."""

    steps: Annotated[int, Field(gt=0, le=100)] = 3
    """How many."""
    after: Annotated[int, Field(ge=1)] = 10
    """Steps of this start that come before, in which things are still getting warm."""
    ranks: list[Annotated[int, Field(ge=0)]] | Literal["all"] = [0]
    """Workers that record."""


class ObserveSection(Section):
    """What is seen and written down while training."""

    every_steps: Annotated[int, Field(gt=0)] = 10
    """A line in metrics.jsonl every so many steps."""
    workers_every_s: Annotated[float, Field(gt=0)] = 10.0
    """A line in workers.jsonl, on every worker by itself, at most every so many seconds; with more than 64 workers,
    less often by as much."""
    phases: bool = True
    """Say what the passes and communication take by themselves, and what each worker does and uses of its machine.
    false: forward, backward and communication as one, and no workers.jsonl."""
    metrics_port: Annotated[int, Field(ge=0, lt=65536)] | None = None
    """Serve metrics for Prometheus at this port, 0 for any free one; null: not at all. On Ray, its own metrics agent
    tells them in any case."""
    metrics_host: str = "127.0.0.1"
    """Where to listen; 0.0.0.0 lets other machines in."""
    profile: ProfileSection | None = None
    """Record some steps: `shoal train --profile`."""
