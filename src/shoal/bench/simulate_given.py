"""A step that was measured elsewhere, and a model that is looked at without being run."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from shoal.bench.gate import read_timing
from shoal.bench.simulate_steps import weights_of
from shoal.bench.simulate_work import Phases, Shape, Weight, by_weights
from shoal.core.errors import UserError
from shoal.core.rng import isolated_rng
from shoal.models.blocks import repeated_blocks
from shoal.observe.runs import find_run, read_events, read_run
from shoal.recipe.schema import Recipe
from shoal.train.build import model_of
from shoal.train.trace import Tracer


@dataclass(frozen=True)
class GivenStep:
    """What a step of one worker takes, and who says so."""

    phases: Phases
    source: str


def from_words(text: str) -> GivenStep:
    """`130.3`, or `40,80,10`: the forward pass, the backward pass and the optimizer, in milliseconds."""
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3) or not all(0 <= number < 1e9 for number in numbers) or not sum(numbers):
        raise UserError(
            f"--step-ms: {text!r} should be the milliseconds of a step, or of its forward pass, backward pass and "
            "optimizer: 130.3 or 40,80,10"
        )
    if len(numbers) == 3:
        return GivenStep(Phases.of(1e-3 * number for number in numbers), f"given: {text} ms by phase")
    return GivenStep(in_passes(1e-3 * numbers[0]), f"given: {text} ms, of which the forward pass is taken for a third")


def in_passes(seconds: float) -> Phases:
    """A step of which only the whole is known: a backward pass computes twice what a forward pass does."""
    return Phases(seconds / 3, 2 * seconds / 3, 0.0)


def from_place(name: str) -> GivenStep:
    """The step of a run of one worker, or of a result of `shoal bench step`."""
    if name.endswith(".json") and Path(name).is_file():
        return _from_result(Path(name))
    path = find_run(name)
    run, events = read_run(path), read_events(path)
    sizes = {event.get("world_size") for event in events if event["event"] == "start"}
    if sizes != {1}:
        raise UserError(
            f"--step-from: run {run.name!r} had several workers, who waited for each other; give one of one"
        )
    phases = read_timing(run, events).phases_s
    names = (("data", "h2d", "forward"), ("backward", "forward_backward", "comm"), ("optimizer",))
    found = Phases.of(sum(phases.get(name, 0.0) for name in part) for part in names)
    return GivenStep(found, f"measured by run {run.name} on {_device_of(events)}")


def _device_of(events: Sequence[dict[str, Any]]) -> str:
    groups = [event.get("workers") for event in events if event["event"] == "workers"]
    workers = [worker for worker in (groups[-1] if groups else None) or [] if isinstance(worker, dict)]
    return str(workers[0].get("device_name") or workers[0].get("device")) if workers else "an unknown device"


def _from_result(path: Path) -> GivenStep:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        step_ms, device = float(record["shoal_step_ms"]), record["machine"]["device"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--step-from: {path} is no result of shoal bench step") from error
    if step_ms <= 0:
        raise UserError(f"--step-from: {path} tells of steps of {step_ms:g} ms")
    return GivenStep(in_passes(1e-3 * step_ms), f"measured by {path.name} on {device}; a third is taken for forward")


def traced_shape(recipe: Recipe, micro_batch: int) -> Shape:
    """A model's shape by the arithmetic that its blocks do, without memory or time; by its weights where that cannot be
    seen."""
    tracer = Tracer(recipe, on_gpu=False)
    with isolated_rng(recipe.train.seed), FakeTensorMode(allow_non_fake_inputs=True):
        model = model_of(tracer.task, recipe, tracer.shapes.spec)
        weights = [Weight(*numbers) for numbers in weights_of(model)]
        buffers = sum(b.numel() * b.element_size() for b in model.buffers() if b.is_floating_point())
        try:
            flops = _flops(model, tracer, micro_batch)
        except UserError:
            raise
        except Exception:  # noqa: BLE001 - whatever a model's code does that fake tensors cannot
            flops = None
    return by_weights(weights, flops, buffers)


def _flops(model: torch.nn.Module, tracer: Tracer, micro_batch: int) -> list[float] | None:
    """Before the first block, of every block, after the last."""
    blocks = [block for _, block in repeated_blocks(model)]
    counts: list[float] = []
    with FlopCounterMode(display=False) as counter:

        def mark(*_: object) -> None:
            counts.append(float(counter.get_total_flops()))

        for block in blocks:
            block.register_forward_pre_hook(mark)
        if blocks:
            blocks[-1].register_forward_hook(mark)
        tracer.objective.loss(model, tracer.shapes.make(micro_batch))
        counts.append(float(counter.get_total_flops()))
    if len(counts) != len(blocks) + 1 + bool(blocks):
        return None
    points = [0.0, *counts] if blocks else [0.0, 0.0, *counts]
    return [later - sooner for sooner, later in itertools.pairwise(points)]
