"""From a recipe, a space and settings to a search that can start: everything that can be wrong is found here."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.core.errors import UserError
from shoal.core.section import one_of
from shoal.recipe.identity import changed_field, fixed_fields
from shoal.recipe.load import LoadedRecipe, check_tree, load_recipe
from shoal.recipe.merge import merge, overlay_of, override_paths
from shoal.recipe.yaml_tree import Tree
from shoal.tasks.section import METRICS
from shoal.train.track import check_tracking
from shoal.tune.domains import Options, Range, as_text
from shoal.tune.proposals import Proposer, build_proposer
from shoal.tune.schedulers.build import POPULATIONS, build_scheduler
from shoal.tune.schedulers.moves import Scheduler
from shoal.tune.section import TuneSection
from shoal.tune.space import Config, Setting, Space, read_space
from shoal.tune.trial import END_METRICS, Objective

_OF_ALL = ("cluster.workers", "cluster.min_workers", "cluster.cpus_per_worker", "cluster.gpus_per_worker")
"""What trials need is the same for all, so that any place does for any."""
_LENGTHS = ("train.epochs", "train.steps")
_SETTINGS_OF = {
    "grace": ("asha", "hyperband", "median"),
    "reduction": ("asha", "hyperband"),
    "interval": POPULATIONS,
    "quantile": POPULATIONS,
    "resample": POPULATIONS,
}
"""Whose settings these are; those of none are for all."""
_USUAL_TRIALS, _USUAL_POPULATION = 16, 8
_MOST_POINTS = 100_000


@dataclass(frozen=True)
class Setup:
    """A search that can start."""

    base: LoadedRecipe
    space: Space
    section: TuneSection
    """With what it leaves open filled in."""
    objectives: tuple[Objective, ...]
    length: float
    """Epochs, or steps where the recipe counts those."""
    unit: str
    grace: float
    interval: float
    free: frozenset[str]
    """Fields of the space that may change while a run goes on."""

    @property
    def objective(self) -> Objective:
        """The first, which trials are ranked by."""
        return self.objectives[0]

    @property
    def num_trials(self) -> int:
        """How many there will be."""
        assert self.section.trials is not None
        return self.section.trials

    def length_of(self, config: Config) -> float:
        """How long a trial runs: it may be what is searched for."""
        return float(config.get(f"train.{self.unit}", self.length))

    def recipe_of(self, config: Config, extra: Mapping[str, Any] | None = None) -> LoadedRecipe:
        """The recipe of a trial; a `UserError` where these settings do not go together."""
        return with_config(self.base.tree(), {**config, **(extra or {})})

    def scheduler(self) -> Scheduler:
        """Who stops or replaces trials."""
        return build_scheduler(
            self.section, self.objective, self.length, self.unit, self.grace, self.interval, self.space, self.free
        )

    def proposer(self) -> Proposer:
        """Who proposes them."""
        assert self.section.search is not None
        return build_proposer(self.section.search, self.space, self.objectives, self.section.seed, self.num_trials)


def with_config(tree: Tree, config: Mapping[str, Any]) -> LoadedRecipe:
    """A recipe with settings laid over it."""
    paths = override_paths(dict(config))
    return check_tree(merge(tree, overlay_of(paths)), dict.fromkeys(paths, "space"))


def set_up(
    sources: Sequence[str | Path | Mapping[str, Any]],
    overrides: Iterable[str] | Mapping[str, Any],
    space: str | Path | Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Setup:
    """Read and check all of it. `settings`: fields of `TuneSection` that were said on the command line."""
    overrides = overrides if isinstance(overrides, Mapping) else list(overrides)
    base = load_recipe(sources, overrides)
    check_tracking(base, is_here=False)
    read = read_space(space)
    for path in override_paths(overrides):
        if (key := ".".join(path)) in read.keys:
            raise UserError(f"{key}: is searched over, and also set to one value; leave one of the two out")
    setup = make_setup(base, read, settings)
    _check_used(setup.section.scheduler, settings if "scheduler" in settings else {**read.tune, **settings})
    return setup


def make_setup(base: LoadedRecipe, space: Space, settings: Mapping[str, Any]) -> Setup:
    """The same, of a recipe and a space that have been read."""
    section = _section({**space.tune, **settings})
    objectives = _objectives(base, section)
    _check_space(base, space)
    free = _free_fields(base, space)
    section = _filled(section, space)
    _check_together(section, space, objectives, free)
    train = base.recipe.train
    length = float(train.epochs or train.steps or 0)
    shortest = 1.0 if train.epochs else max(1.0, length / 20)
    grace = section.grace or min(shortest, length)
    interval = section.interval or min(max(1.0, float(math.ceil(length / 10))), length)
    unit = "epochs" if train.epochs else "steps"
    name, value = ("interval", interval) if section.scheduler in POPULATIONS else ("grace", grace)
    if section.scheduler != "none" and value < (least := 1.0 if unit == "steps" else 0.001):
        raise UserError(f"tune.{name}: {value:g} {unit} is too short to compare trials after; give at least {least:g}")
    if section.scheduler != "none" and value >= length:
        raise UserError(
            f"tune.{name}: {value:g} {unit} is as long as a trial runs ({length:g}), so {section.scheduler} would "
            "never compare; make it smaller, or train longer: train.epochs or train.steps"
        )
    setup = Setup(base, space, section, objectives, length, unit, grace, interval, free)
    setup.proposer()  # whether what it needs is installed
    return setup


def _section(given: Mapping[str, Any]) -> TuneSection:
    try:
        return TuneSection.model_validate(given)
    except ValidationError as error:
        raise UserError("\n".join(dict.fromkeys(map(_line, error.errors(include_url=False))))) from None


def _line(detail: Any) -> str:
    name, given = str(detail["loc"][0]), detail["input"]
    if name not in TuneSection.model_fields:
        return f"tune.{name}: unknown key; {one_of(name, TuneSection.model_fields)}"
    if detail["type"] == "literal_error":
        allowed = detail["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"tune.{name}: {given!r} is not allowed; {one_of(str(given), allowed)}"
    words = "is not understood" if "pattern" in detail["type"] else str(detail["msg"]).removeprefix("Input ")
    meaning = " ".join((TuneSection.model_fields[name].description or "").split())
    return f"tune.{name}: {words} (given: {given!r}); {meaning}"


def _objectives(base: LoadedRecipe, section: TuneSection) -> tuple[Objective, ...]:
    recipe = base.recipe
    early = recipe.early_stop
    names = section.metric or [
        (
            f"{recipe.checkpoint.metric}:{recipe.checkpoint.mode}".removesuffix(":auto")
            if recipe.checkpoint.metric
            else ""
        )
        or (f"{early.metric}:{early.mode}".removesuffix(":auto") if early is not None else "")
        or "val_loss"
    ]
    found = []
    for text in names:
        _check_known(recipe.task.name, text.partition(":")[0])
        objective = Objective.from_text(text)
        if objective is None:
            raise UserError(f"tune.metric: {text!r} does not tell which way is better; write {text}:min or {text}:max")
        if objective.metric.startswith("val_"):
            _check_reported(base, objective)
        found.append(objective)
    if len({objective.metric for objective in found}) < len(found):
        raise UserError("tune.metric: the same metric is given twice")
    return tuple(found)


def _check_known(task: str, metric: str) -> None:
    """Of a task that ships it is known what it reports."""
    known = METRICS.get(task)
    if known is None or metric in (*known, "train_loss", *END_METRICS):
        return
    if f"val_{metric}" in known:
        raise UserError(f"tune.metric: {metric!r} is reported as val_{metric}; write that")
    names = one_of(metric, [*known, "train_loss", *END_METRICS])
    raise UserError(f"tune.metric: {metric!r} is not reported by task {task}; {names}")


def _check_reported(base: LoadedRecipe, objective: Objective) -> None:
    """Ask as for a checkpoint's metric: whether the recipe's task reports it."""
    mode = "min" if objective.is_less_better else "max"
    asked = {"checkpoint.metric": objective.metric, "checkpoint.mode": mode, "checkpoint.keep_best": 1}
    try:
        with_config(base.tree(), asked)
    except UserError as error:
        raise UserError(str(error).replace("checkpoint.metric", "tune.metric")) from None


def _check_space(base: LoadedRecipe, space: Space) -> None:
    """Every end of every range must be something that the recipe takes."""
    wrong: list[str] = []
    for setting in space:
        if setting.key in _OF_ALL:
            wrong.append(f"space: {setting.key}: is the same for all trials; set it in the recipe, or by --workers")
            continue
        where = _where_it_holds(space, setting)
        for value in setting.domain.extremes():
            try:
                with_config(base.tree(), {**where, setting.key: value})
            except UserError as error:
                wrong += _of_setting(str(error).splitlines(), setting.key, value)
                break
    if wrong:
        raise UserError("\n".join(dict.fromkeys(wrong)))


def _of_setting(lines: Sequence[str], key: str, value: Any) -> list[str]:
    """What is wrong with a value, as lines that name its field, or the section that it is in."""
    lines = [line.removesuffix(" [space]") for line in lines]
    if isinstance(value, float):  # of a range whose ends were written as whole numbers, perhaps
        lines = [f"{line}; use randint or lograndint" if "should be a whole number" in line else line for line in lines]
    own = [line for line in lines if line.startswith(key) or key.startswith(line.partition(":")[0])]
    return [f"space: {line}" for line in own] or [f"space: {key}: with {as_text(value)}, {line}" for line in lines]


def _where_it_holds(space: Space, setting: Setting) -> Config:
    """Settings with which a field's condition holds."""
    config: Config = {}
    condition = setting.condition
    while condition is not None:
        other = next(found for found in space if found.key == condition.key)
        assert isinstance(other.domain, Options)
        config[other.key] = next(value for value in other.domain.values if condition.holds({other.key: value}))
        condition = other.condition
    return config


def _free_fields(base: LoadedRecipe, space: Space) -> frozenset[str]:
    """Those that do not make another run of it: what `--resume` lets be changed."""
    free = set()
    for setting in space:
        where = _where_it_holds(space, setting)
        ends = setting.domain.extremes()
        fields = [
            fixed_fields(with_config(base.tree(), {**where, setting.key: value}).recipe)
            for value in (ends[0], ends[-1])
        ]
        if len(ends) > 1 and changed_field(*fields) is None:
            free.add(setting.key)
    # What decides whether a field is there that may not change may not change either.
    for setting in reversed(space.settings):
        if setting.condition is not None and setting.key not in free:
            free.discard(setting.condition.key)
    return frozenset(free)


def _filled(section: TuneSection, space: Space) -> TuneSection:
    """With what is left open."""
    is_grid = all(isinstance(setting.domain, Options) and setting.domain.is_grid for setting in space)
    search = section.search or ("grid" if is_grid else "random")
    trials = section.trials
    if search == "grid":
        if ranges := [setting for setting in space if isinstance(setting.domain, Range)]:
            raise UserError(
                f"space: {ranges[0].key}: {ranges[0].domain.words()} has no end of values, which a grid search would "
                "try one by one; write grid(...), or search with --search random"
            )
        if math.prod(len(setting.domain.extremes()) for setting in space) > _MOST_POINTS:
            raise UserError(
                f"space: a grid of more than {_MOST_POINTS:,} points; leave some out, or use --search random"
            )
        points = len(space.grid())
        if space.first:
            raise UserError("space: first: a grid search tries every point; leave this out, or use --search random")
        if trials is not None and trials > points:
            raise UserError(f"tune.trials: {trials} is more than the {points} points of the grid; leave it out")
        trials = trials or points
    if trials is not None and trials < len(space.first):
        raise UserError(f"tune.trials: {trials} is fewer than the {len(space.first)} points of first; raise it")
    trials = trials or (_USUAL_POPULATION if section.scheduler in POPULATIONS else _USUAL_TRIALS)
    return section.model_copy(update={"search": search, "trials": max(trials, len(space.first))})


def _check_used(scheduler: str, given: Mapping[str, Any]) -> None:
    """Nothing is said in vain; what a file says for its own scheduler may stand there when another is asked for."""
    for name, whose in _SETTINGS_OF.items():
        if given.get(name) is not None and scheduler not in whose:
            others = ", ".join(whose)
            raise UserError(
                f"tune.{name}: scheduler {scheduler} does not go by it, only {others}; leave it out, or choose another "
                "--scheduler"
            )


def _check_together(section: TuneSection, space: Space, objectives: Sequence[Objective], free: frozenset[str]) -> None:
    """What no single setting can tell."""
    if section.keep_checkpoints is not None and len(objectives) > 1:
        raise UserError("tune.keep_checkpoints: which are best is not known with several metrics; leave it out")
    if section.scheduler == "none":
        return
    if objectives[0].is_of_end:
        raise UserError(
            f"tune.metric: {objectives[0].metric} is known when a trial ends, and {section.scheduler} compares on the "
            "way; use --scheduler none"
        )
    if len(objectives) > 1:
        raise UserError(f"tune.scheduler: {section.scheduler} goes by one metric; with several, use --scheduler none")
    if lengths := [key for key in space.keys if key in _LENGTHS]:
        raise UserError(
            f"space: {lengths[0]}: {section.scheduler} compares trials of the same length; leave it out, or use "
            "--scheduler none"
        )
    if section.scheduler in POPULATIONS:
        if not free:
            raise UserError(
                f"tune.scheduler: {section.scheduler} changes settings while runs go on, and none of "
                f"{', '.join(space.keys)} may change then; add one that may, such as optim.lr"
            )
        if (section.trials or 0) < 2:
            raise UserError(f"tune.trials: {section.scheduler} needs a population of at least 2")
