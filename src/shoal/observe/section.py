"""The `observe:` section. Loads without torch."""

from typing import Annotated

from pydantic import Field

from shoal.core.section import Section


class ObserveSection(Section):
    """What is written down while training."""

    every_steps: Annotated[int, Field(gt=0)] = 10
    """A line in metrics.jsonl every so many steps."""
