"""What a recipe describes, built in memory: datasets, model, objective and training unit."""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from shoal.core.batch import StepBatch
from shoal.core.deferred import CannotDeferError, Deferred, check_others
from shoal.core.errors import UserError
from shoal.core.group import Group
from shoal.core.objective import Objective
from shoal.core.process import Process
from shoal.core.rng import capture_rng, derive_seed, restore_rng, seed_all
from shoal.core.spec import DataSpec
from shoal.data.build import build_datasets
from shoal.data.choose import files_hash
from shoal.data.dataset import Datasets, in_one_go
from shoal.data.iterable import IterableRows
from shoal.data.loader import Evaluation, train_batches
from shoal.data.order import Order
from shoal.data.ray_data import RayRows
from shoal.data.section import OF_TASK
from shoal.models.build import build_model
from shoal.parallel.build import CAN_FILL, Initial, build_unit, choose_strategy
from shoal.parallel.degrees import find_degrees
from shoal.parallel.unit import StepSettings, TrainUnit
from shoal.recipe.identity import fixed_fields
from shoal.recipe.schema import Recipe
from shoal.tasks.build import build_task, task_objective
from shoal.train.feeding import Feeding, plan_feeding
from shoal.train.hardware import for_workers
from shoal.train.initial import Described, describe
from shoal.train.state import Identity


@dataclass(frozen=True)
class Built:
    """What a recipe describes, in memory."""

    recipe: Recipe
    """With nothing left open."""
    unit: TrainUnit
    objective: Objective
    feeding: Feeding
    num_parameters: int
    described: list[Described]
    """Every tensor of the model, as it was before it was divided."""
    identity: Identity
    warnings: list[str]

    @property
    def datasets(self) -> Datasets:
        """Training and validation data."""
        return self.feeding.datasets

    @property
    def order(self) -> Order:
        """The order of the training samples."""
        return self.feeding.order

    @property
    def micro_batch(self) -> int:
        """Samples that a worker computes at once."""
        return self.recipe.micro_batch(self.unit.data_size)

    def batches(self, first: int, last: int) -> Generator[StepBatch]:
        """This worker's share of steps [first, last)."""
        return train_batches(
            self.datasets.train,
            self.order,
            first,
            last,
            rank=self.unit.data_rank,
            world_size=self.unit.data_size,
            micro_batch=self.micro_batch,
            loading=self.feeding.train,
        )

    def validation(self) -> Evaluation:
        """This worker's share of the validation set."""
        return Evaluation(
            self.datasets.val,
            rank=self.unit.data_rank,
            world_size=self.unit.data_size,
            batch=self.recipe.evaluate.batch or self.micro_batch,
            seed=self.recipe.train.seed,
            loading=self.feeding.val,
        )


def build(recipe: Recipe, process: Process) -> Built:
    """Build everything, with random numbers that depend on the seed and the rank alone."""
    recipe = for_workers(recipe, process)
    seed = recipe.train.seed
    seed_all(derive_seed(seed, 0))
    task = build_task(recipe.task)
    datasets = datasets_of(task, recipe, process.group)
    seed_all(derive_seed(seed, 1))
    warnings = _unused_sections(task, recipe)
    model, initial = _model_to_fill(task, recipe, datasets.spec, process, warnings)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    described = describe(model)
    objective = task_objective(task)
    settings = step_settings(recipe, process.world_size)
    unit = build_unit(recipe.parallel, model, objective, settings, process, initial)
    # From here on only the model draws, in the loop; each rank by itself, unless several compute the same.
    seed_all(derive_seed(seed, 2, unit.random_rank))
    feeding = plan_feeding(recipe, datasets, objective, process, unit.data_size)
    identity = Identity(len(datasets.train), fixed_fields(recipe), files_hash(datasets.train, feeding.order))
    return Built(recipe, unit, objective, feeding, num_parameters, described, identity, warnings)


def step_settings(recipe: Recipe, world_size: int = 1) -> StepSettings:
    """What of a recipe a strategy must know."""
    strategy = choose_strategy(recipe.parallel, world_size)
    num_shares = find_degrees(recipe.parallel, strategy, world_size).data
    return StepSettings(
        optim=recipe.optim,
        precision=recipe.train.precision,
        compile=recipe.train.compile is True,
        cuda_graphs=recipe.train.cuda_graphs,
        channels_last=recipe.train.channels_last is True,
        fp8=recipe.train.fp8,
        clip_norm=recipe.train.clip_norm,
        activation_checkpointing=recipe.train.activation_checkpointing,
        global_batch=recipe.train.global_batch,
        micro_batch=recipe.micro_batch(num_shares),
    )


def datasets_of(task: Any, recipe: Recipe, group: Group | None = None) -> Datasets:
    """The task's own datasets, or those of the data section. Every worker of `group` must call this."""
    if not hasattr(task, "datasets"):
        if recipe.data is None or recipe.data.name == OF_TASK:
            raise UserError(f"data: is required, because {recipe.task.name} has no method datasets()")
        found = build_datasets(recipe.data, recipe.train.seed)
    else:
        parts = task.datasets()
        if not isinstance(parts, Mapping) or "train" not in parts:
            raise UserError(f"task.name: datasets() of {recipe.task.name} should return {{'train': ..., 'val': ...}}")
        found = Datasets(parts["train"], parts.get("val"), DataSpec())
    seed = recipe.train.seed
    found = Datasets(_adapted(found.train, seed), _adapted(found.val, seed), found.spec)
    _check_part("train", found.train, group or Group())
    if found.val is not None:
        _check_part("val", found.val, group or Group())
    if found.val is None:
        for name, watched in (("early_stop", recipe.early_stop), ("checkpoint.metric", recipe.checkpoint.metric)):
            if watched is not None:
                raise UserError(f"{name}: needs a validation dataset, and there is none; add one or remove this")
    return found


def _check_part(name: str, part: Any, group: Group) -> None:
    if isinstance(part, RayRows):
        part.count_once(group)
    elif not hasattr(part, "__len__") or not (hasattr(part, "batch") or hasattr(part, "__getitem__")):
        raise UserError(f"data: the {name} dataset ({type(part).__name__}) needs __len__ and __getitem__")
    if len(part) == 0:
        raise UserError(f"data: the {name} dataset is empty")


def _adapted(dataset: Any, seed: int) -> Any:
    """A dataset of the user's as one that the loaders read."""
    if type(dataset).__module__.startswith("ray.data."):
        return RayRows(dataset)
    if isinstance(dataset, RayRows):
        return dataset
    by_number = hasattr(dataset, "__getitem__") or hasattr(dataset, "batch")
    if isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not by_number):
        if not hasattr(dataset, "__len__"):
            raise UserError(
                f"data: {type(dataset).__name__} can be gone through but has no __len__; say by that how many samples "
                "an epoch has"
            )
        return IterableRows(dataset, seed)
    return in_one_go(dataset)


def _model_to_fill(
    task: Any, recipe: Recipe, spec: DataSpec, process: Process, warnings: list[str]
) -> tuple[nn.Module, Initial | None]:
    """The model; where workers hold parts of it, without memory, and the weights that it begins with one at a time."""
    if choose_strategy(recipe.parallel, process.world_size) not in CAN_FILL:
        return model_of(task, recipe, spec), None
    state = capture_rng(torch.device("cpu"))
    try:
        deferred = Deferred(lambda: model_of(task, recipe, spec))
        check_others(vars(task) if hasattr(task, "__dict__") else {})
    except CannotDeferError as error:
        restore_rng(state, torch.device("cpu"))
        why = f"because building it needs values ({error})"
        warnings.append(f"model: is built whole in the memory of every worker before it is divided, {why}")
        return model_of(task, recipe, spec), None
    return deferred.model, deferred.weights()


def model_of(task: Any, recipe: Recipe, spec: DataSpec) -> nn.Module:
    """The task's own model, or that of the model section."""
    if hasattr(task, "model"):
        model = task.model()
    elif recipe.model is not None:
        model = build_model(recipe.model, spec)
    else:
        raise UserError(f"model: is required, because {recipe.task.name} has no method model()")
    if not isinstance(model, nn.Module):
        raise UserError(f"task.name: model() of {recipe.task.name} returned {type(model).__name__}, not an nn.Module")
    if any(nn.parameter.is_lazy(parameter) for parameter in model.parameters()):
        raise UserError("model: has lazy modules, whose shapes are not known yet; send one batch through it first")
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            raise UserError(f"model: {name} is extra state that a checkpoint cannot hold; keep it in a buffer")
    if not model.training:  # as `from_pretrained` hands models out; single modules in evaluation mode stay so
        model.train()
    return model


def _unused_sections(task: Any, recipe: Recipe) -> list[str]:
    """Sections that a task of the user's own makes idle, which they may not expect."""
    idle = []
    if hasattr(task, "datasets") and recipe.data is not None and recipe.data.name != OF_TASK:
        idle.append(f"data: {recipe.data.name} is not used, because {recipe.task.name} has datasets() of its own")
    if hasattr(task, "model") and recipe.model is not None:
        idle.append(f"model: {recipe.model.name} is not used, because {recipe.task.name} has model() of its own")
    return idle
