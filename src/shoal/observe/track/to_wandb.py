"""A run as Weights & Biases keeps it."""

import os
import shlex
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from shoal.core.storage import expand_home
from shoal.observe.track.facts import Facts
from shoal.observe.track.points import Point
from shoal.observe.track.section import WandbSection


def wandb_mode(section: WandbSection) -> Literal["online", "offline", "disabled"]:
    """As the section says, or else the environment."""
    if section.mode is not None:
        return section.mode
    told: dict[str | None, Literal["offline", "disabled"]] = {"offline": "offline", "disabled": "disabled"}
    return told.get(os.environ.get("WANDB_MODE"), "online")


def wandb_target(section: WandbSection) -> str:
    """Where the run goes."""
    names = (os.environ.get("WANDB_BASE_URL"), section.entity or os.environ.get("WANDB_ENTITY"))
    project = section.project or os.environ.get("WANDB_PROJECT")
    return " ".join(filter(None, (wandb_mode(section), *names, project)))


def wandb_dir(section: WandbSection, run_dir: Path) -> Path:
    """The folder in which it makes one called `wandb`."""
    return expand_home(section.dir).absolute() if section.dir is not None else run_dir.absolute()


def wandb_sync(section: WandbSection, run_dir: Path, key: str) -> str | None:
    """What to type to send what was written offline; None where it was not."""
    if wandb_mode(section) != "offline":
        return None
    # All of them: each time that the run was followed has left one, and they are one run.
    return f"wandb sync {shlex.quote(str(wandb_dir(section, run_dir) / 'wandb'))}/offline-run-*-{key}"


class WandbSink:
    """One run of Weights & Biases, by an id of its own, the same for all starts of a run.

    Its own process sends and repeats; steps that it has it does not take twice.
    """

    def __init__(self, section: WandbSection, run_dir: Path) -> None:
        self._section = section
        self._dir = wandb_dir(section, run_dir)
        self._run: Any = None
        self._told: dict[str, str] = {}
        self.keeps_at_once = wandb_mode(section) != "online"
        """Offline, what is logged is in a file; online, only its own process knows what was sent."""

    def tell(self, facts: Facts) -> None:
        """The recipe as its config, the tags as its summary."""
        if self._run is None:
            self._open(facts)
        if self._told != facts.tags:
            self._run.summary.update(facts.tags)
            self._told = facts.tags

    def log(self, points: list[Point]) -> None:
        """A row a step."""
        for step, row in groupby(sorted(points, key=lambda point: point.step), key=lambda point: point.step):
            some = list(row)
            values = {point.name: point.value for point in some}
            self._run.log(values | {"_timestamp": some[-1].time}, step=step)

    def end(self, facts: Facts) -> None:
        """Waits until all is sent, or, offline, written."""
        self._finish(0 if facts.status == "done" else 1)

    def close(self) -> None:
        """Without an end of the run: it may go on."""
        self._finish(None)

    def _finish(self, exit_code: int | None) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=exit_code)

    def _open(self, facts: Facts) -> None:
        import wandb

        self._dir.mkdir(parents=True, exist_ok=True)
        # Nothing of the machine, the program or its output is taken along: the folder says what there is to know.
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            save_code=False,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=60,
        )
        self._run = wandb.init(
            project=self._section.project or os.environ.get("WANDB_PROJECT") or facts.recipe_name,
            entity=self._section.entity,
            mode=wandb_mode(self._section),
            dir=str(self._dir),
            id=facts.key,
            name=self._section.name or facts.name,
            config=dict(facts.params),
            resume="allow",
            settings=settings,
        )
