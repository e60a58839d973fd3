"""Shoal's training step beside what one would use instead: every contender in a process of its own, in turns."""

import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.commands import Tell, in_turns
from shoal.bench.step_contenders import CONTENDERS, find_packages, parted, why_not
from shoal.bench.step_process import LeftOutError, Running, running
from shoal.bench.step_ratios import compile_s, differences, mean_of_last, ratios_of
from shoal.core.errors import RunError, UserError
from shoal.recipe.load import LoadedRecipe
from shoal.recipe.schema import Recipe


@dataclass(frozen=True)
class Settings:
    """How it is measured."""

    names: Sequence[str]
    rounds: int = 5
    """Of each start."""
    starts: int = 1
    """How often all begins anew, in fresh processes: on a CPU one and the same loop may take a quarter longer as long
    as its process lives, by how its memory happens to lie."""
    steps: int | None = None
    """Of every turn; None: so many that a turn takes `turn_s`."""
    turn_s: float = 2.0
    opening: int = 20
    """Steps before any turn, from the first weights; their losses are kept."""
    settle: int = 3
    """Steps before those of a turn that count: for caches, memory and clocks."""
    loader: str = "batches"
    loader_workers: int = 0
    made_data: bool = False
    cache: Path | None = None
    """Where what is compiled is kept; None: all is compiled anew."""


_FEWEST, _MOST = 10, 2000
"""Steps of a turn, where they are not said."""


def measure(
    loaded: LoadedRecipe, fast: LoadedRecipe | None, settings: Settings, tell: Tell = lambda line: None
) -> dict[str, Any]:
    """Seconds a step of everybody who can be measured here, `settings.rounds` times in turns."""
    check_recipe(loaded.recipe)
    packages = find_packages()
    reasons = {name: why_not(CONTENDERS[name], packages) for name in settings.names}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    names = [name for name in settings.names if name not in left_out]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-")))
        loaded, fast = _on_data(loaded, fast, settings, folder)
        _, peers = parted(names)
        job = {
            "loader": settings.loader,
            "loader_workers": settings.loader_workers,
            "packages": str(packages.absolute()) if packages is not None else None,
            "contenders": len(names),
        }
        jobs = {
            name: job
            | {
                "recipe": (fast if name == "shoal_fast" and fast is not None else loaded).tree(),
                "counts_flops": name in peers[:1],
            }
            for name in names
        }
        starts: list[dict[str, Any]] = []
        for _ in range(settings.starts):
            starts.append(_start(jobs, settings, left_out, tell))
            settings = dataclasses.replace(settings, steps=starts[0]["steps"])
            jobs = {name: own for name, own in jobs.items() if name not in left_out}
    return _result(loaded.recipe, settings, starts, left_out)


def _start(
    jobs: Mapping[str, Mapping[str, Any]], settings: Settings, left_out: dict[str, str], tell: Tell
) -> dict[str, Any]:
    """Everybody's rounds in processes that live for so long."""
    with contextlib.ExitStack() as stack:
        present = Present(tell, left_out)
        for name, job in jobs.items():
            # Each imports and builds while the others do: none of that is timed.
            present.processes[name] = stack.enter_context(running(name, job, settings.cache))
        return _measure(present, settings, tell)


def check_recipe(recipe: Recipe) -> None:
    """Refuse what cannot be compared."""
    if recipe.data is None or recipe.model is None:
        raise UserError(f"bench step: needs the recipe's own data: and model:, but task {recipe.task.name} brings them")
    if recipe.cluster.workers != 1:
        raise UserError(f"--peers: compares one worker on one device, and cluster.workers is {recipe.cluster.workers}")
    if recipe.parallel.strategy not in ("auto", "single"):
        raise UserError(
            f"--peers: compares one worker on one device, and parallel.strategy is {recipe.parallel.strategy}; "
            "take auto"
        )
    if not isinstance(recipe.train.micro_batch, int | None):
        raise UserError("train.micro_batch: auto is not known to the peers; say a number, or null for the whole batch")


class Present:
    """The contenders that are still there. A peer that fails is left out; without Shoal there is nothing to measure."""

    def __init__(self, tell: Tell, left_out: dict[str, str]) -> None:
        self.processes: dict[str, Running] = {}
        self.left_out = left_out
        self._tell = tell

    def each(self, order: Sequence[str], **command: Any) -> dict[str, dict[str, Any]]:
        """What everybody answers, one after the other."""
        answers = {}
        for name in order:
            with self._may_fail(name):
                answers[name] = self.processes[name].ask(**command)
        return answers

    def wait_until_built(self) -> None:
        """Until all could train."""
        for name in list(self.processes):
            with self._may_fail(name):
                self.processes[name].wait_until_built()

    @contextlib.contextmanager
    def _may_fail(self, name: str) -> Any:
        try:
            yield
        except LeftOutError as error:
            if CONTENDERS[name].is_shoal:
                raise RunError(f"{name} {error}") from None
            self.left_out[name] = str(error)
            self._tell(f"{name} is left out: {error}")
            self.processes.pop(name).close()


def _measure(present: Present, settings: Settings, tell: Tell) -> dict[str, Any]:
    tell("starting " + ", ".join(present.processes))
    present.wait_until_built()
    openings: dict[str, dict[str, Any]] = {}
    for name in list(present.processes):
        for answer in present.each([name], opening=settings.opening).values():
            openings[name] = answer
            tell(f"{name}: first step {answer['first_s']:.1f} s, first {settings.opening} {answer['opening_s']:.1f} s")
    names = list(present.processes)
    facts = {name: present.processes[name].facts for name in names}
    wrong, notes = differences(facts, {name: openings[name]["losses"][0][0] for name in names})
    if wrong:
        raise RunError("not all contenders train the same, so their times are not comparable: " + "; ".join(wrong))
    steps = settings.steps or _steps_of_a_turn(present, names, settings)
    tell(f"{settings.rounds} rounds of {steps} steps")
    present.each(names, steps=steps, settle=settings.settle)  # which counts for nothing
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in present.processes}
    for number in range(settings.rounds):
        answers = present.each(in_turns(list(present.processes), number), steps=steps, settle=settings.settle)
        for name, answer in answers.items():
            turns[name].append(answer)
        told = ", ".join(f"{name} {1e3 * answers[name]['seconds'] / steps:.3f}" for name in turns if name in answers)
        tell(f"round {number + 1} of {settings.rounds}, ms a step: {told}")
    whole = {name: each for name, each in turns.items() if name in present.processes}
    return {"facts": facts, "openings": openings, "turns": whole, "steps": steps, "notes": notes}


def _steps_of_a_turn(present: Present, names: Sequence[str], settings: Settings) -> int:
    """As many as the fastest needs for a turn to last long enough."""
    tried = present.each(names, steps=_FEWEST, settle=settings.settle)
    fastest = min(answer["seconds"] for answer in tried.values()) / _FEWEST
    return min(max(_FEWEST, int(settings.turn_s / fastest)), _MOST)


def _on_data(
    loaded: LoadedRecipe, fast: LoadedRecipe | None, settings: Settings, folder: Path
) -> tuple[LoadedRecipe, LoadedRecipe | None]:
    """The recipes on made-up data, where that is asked for."""
    if not settings.made_data:
        return loaded, fast
    from shoal.bench.made_data import with_made_data
    from shoal.bench.step_recipes import with_data

    recipe, is_made = with_made_data(loaded.recipe, folder)
    if not is_made:
        name = loaded.recipe.data.name if loaded.recipe.data is not None else "none"
        raise UserError(f"--made-data: it is not known what {name} looks like; leave this out, or give other data")
    return with_data(loaded, recipe), with_data(fast, recipe) if fast is not None else None


def _result(
    recipe: Recipe, settings: Settings, starts: Sequence[Mapping[str, Any]], left_out: Mapping[str, str]
) -> dict[str, Any]:
    found = starts[0]
    steps = found["steps"]
    names = [name for name in found["turns"] if name not in left_out]
    turns = {name: [turn for start in starts for turn in start["turns"][name]] for name in names}
    step_s = {name: [turn["seconds"] / steps for turn in each] for name, each in turns.items()}
    first = next(iter(found["facts"].values()))
    per_step = _items_of_step(recipe, first["items"])
    flops = next((facts["flops"] for facts in found["facts"].values() if facts.get("flops")), None)
    rows = {
        name: _row(name, step_s[name], steps, each, found["facts"][name], found["openings"][name], per_step, flops)
        for name, each in turns.items()
    }
    _add_losses(rows, found["openings"])
    about = dataclasses.asdict(settings) | {"cache": str(settings.cache) if settings.cache else None, "steps": steps}
    del about["names"]
    return {
        "recipe": recipe.name,
        "device": first["device"],
        "threads": first["threads"],
        "parameters": first["parameters"],
        "global_batch": recipe.train.global_batch,
        "micro_batch": recipe.micro_batch(1),
        "unit": "tokens/s" if first["items"] == "tokens" else "samples/s",
        "flops_per_step": flops,
        **about,
        "contenders": rows,
        "ratios": ratios_of(step_s, settings.starts),
        "not_measured": dict(left_out),
        "notes": found["notes"],
    }


def _items_of_step(recipe: Recipe, items: str) -> int:
    context = getattr(recipe.data, "context", 1) if items == "tokens" else 1
    return recipe.train.global_batch * int(context)


def _row(
    name: str,
    step_s: Sequence[float],
    steps: int,
    turns: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    opening: Mapping[str, Any],
    per_step: int,
    flops: float | None,
) -> dict[str, Any]:
    from shoal.bench.step_facts import peak_flops

    median = statistics.median(step_s)
    peak = peak_flops(facts["device"], facts["precision"])
    return {
        "title": CONTENDERS[name].title,
        "precision": facts["precision"],
        "compiles": facts["compiles"],
        "versions": facts["versions"],
        "step_ms": 1e3 * median,
        "step_ms_by_round": [1e3 * each for each in step_s],
        "cpu_ms": 1e3 * statistics.median(turn["cpu_s"] for turn in turns) / steps,
        "rate": per_step / median,
        "peak_bytes": max(turn["peak_bytes"] for turn in turns),
        "reserved_bytes": max((turn["reserved_bytes"] for turn in turns if "reserved_bytes" in turn), default=None),
        "first_step_s": opening["first_s"],
        "compile_s": compile_s(opening, median),
        "mfu": flops / median / peak if flops and peak else None,
    }


def _add_losses(rows: dict[str, dict[str, Any]], openings: Mapping[str, Mapping[str, Any]]) -> None:
    """The first loss of each, that at the end of the opening, and its difference to that of the loop by hand."""
    reference = next((name for name in ("plain_compiled", "plain", *rows) if name in rows), None)
    for name, row in rows.items():
        losses = openings[name]["losses"]
        row |= {"first_loss": losses[0][0], "last_loss": mean_of_last(losses), "num_losses": len(losses)}
    for row in rows.values():
        if reference is not None:
            row["loss_difference"] = row["last_loss"] - rows[reference]["last_loss"]
            row["loss_reference"] = reference
