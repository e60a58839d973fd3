"""What a worker is asked for."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.records import Observer
from shoal.recipe.load import LoadedRecipe


@dataclass(frozen=True)
class RunRequest:
    """What to train, where to write, and who is watching."""

    loaded: LoadedRecipe
    run_dir: Path
    console: Observer
    resume: bool = False
    stop: Callable[[], str | None] = lambda: None
    """Why to stop after the present step, or None."""
    on_first_step: Callable[[], None] = lambda: None
    """Called on every worker when it has taken a step: until then there is nothing to save, and a `KeyboardInterrupt`
    may end it anywhere."""
    started: float = field(default_factory=time.time)
    """When the user asked, in unix seconds."""
    restarts: int = 0
    """How often the launcher has started the workers again."""
    supervised: bool = False
    """Whether a launcher watches over the workers: it then says how a run failed, because it sees all of them."""
    threads: int | None = None
    """CPU threads of this worker where the recipe leaves them open."""
    first_step_s: float | None = None
    """Seconds from `started` to the run's first step, where an earlier start of the workers has made it."""
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds from `started` to what was done before the worker began: connecting, forking, meeting."""
    launch: dict[str, str] = field(default_factory=dict)
    """Launcher and address that were asked for: a resume must be told them again."""
    pause_at: float | None = None
    """Evaluate, save and end when so many epochs are done, or steps where the recipe counts those."""
    on_saved: Callable[[Path, Mapping[str, float]], None] = lambda path, metrics: None
    """Called on every worker once it is known that a checkpoint is committed: where, and its validation metrics."""

    def hidden(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Facts of an event without what came from the environment: an address may hold a token."""
        return {name: _hidden(value, self.loaded.hide) for name, value in fields.items()}


def _hidden(value: Any, hide: Callable[[str], str]) -> Any:
    """The value with every text in it, however deep, as `hide` leaves it."""
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, Mapping):
        return {name: _hidden(item, hide) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hidden(item, hide) for item in value]
    return value
