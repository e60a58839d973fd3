"""The `checkpoint:` section. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.core.section import Section


class CheckpointSection(Section):
    """When state is saved and what is kept. The last step is always saved, and so is the step of an interruption."""

    every_steps: Annotated[int, Field(gt=0)] | None = None
    """Save every so many steps; null saves at the end of each epoch."""
    keep_last: Annotated[int, Field(gt=0)] = 2
    """Newest checkpoints to keep."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Best checkpoints to keep besides, by `metric`."""
    metric: str | None = None
    """What `keep_best` goes by, for example val_accuracy; needed when `keep_best` is above 0."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether less or more is better; `auto` goes by the metric's name where that tells."""
