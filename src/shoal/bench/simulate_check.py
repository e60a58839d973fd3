"""Whether the simulation is right: real steps of two and of four workers of this machine, beside what it says of them.

A prediction knows what workers compute that send nothing, as many at the same time as there will be, and what
collectives cost between stretches of arithmetic. It knows nothing of the run that it is compared with. All three are
measured anew in every round, and the error is taken within a round: what else the machine does hits them alike.
"""

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shoal.bench.commands import Tell, in_turns
from shoal.bench.others import QUIET, quietly
from shoal.bench.simulate_events import run
from shoal.bench.simulate_measured import Loopback
from shoal.bench.simulate_plan import Place, Rules, tasks_of
from shoal.bench.simulate_recipes import one_micro_batch, recipe_for, rules_of
from shoal.bench.simulate_work import Phases, Shape, from_record
from shoal.bench.workers import run_job
from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores
from shoal.recipe.load import LoadedRecipe, load_recipe

ALLOWED = 0.15
"""How far a prediction may be off."""
_FLAT = ("ddp", "fsdp", "ddp_bf16", "ddp_powersgd")
CHECKED: dict[int, tuple[str, ...]] = {2: _FLAT, 4: (*_FLAT, "hsdp")}
"""Strategies by the number of workers; hsdp divides the model among two, and has two copies of it."""
_ON_NODE = 2
_SIZES = tuple((16 << 10) * 4**power for power in range(6))
_LIMIT_S = 1800.0


@dataclass(frozen=True)
class CheckSettings:
    """What to check."""

    rounds: int = 5
    steps: int = 6
    """Of every strategy in a round."""
    workers: tuple[int, ...] = tuple(CHECKED)
    strategies: tuple[str, ...] | None = None
    """None: all."""

    def checked(self, workers: int) -> list[str]:
        """Strategies that are checked with so many workers."""
        return [name for name in CHECKED[workers] if self.strategies is None or name in self.strategies]


def check(loaded: LoadedRecipe, settings: CheckSettings, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Predicted and measured steps, and how far they are apart."""
    loaded = _on_cpu(loaded)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as temporary:
        crew = _Crew(loaded, settings, Path(temporary))
        shape = crew.shape()
        rows: list[dict[str, Any]] = []
        links: dict[int, list[dict[str, Any]]] = {workers: [] for workers in settings.workers}
        for number in range(settings.rounds):
            for workers in settings.workers:
                found = crew.round(workers, shape, number)
                links[workers] += found["links"]
                rows += _rows(number, workers, settings, shape, rules_of(loaded), found)
            tell(f"round {number + 1} of {settings.rounds}: " + _in_short(rows, number))
    return {
        "recipe": loaded.recipe.name,
        "rounds": settings.rounds,
        "steps": settings.steps,
        "cores": usable_cores(),
        "threads_per_worker": crew.threads,
        "allowed": ALLOWED,
        "network": {str(workers): Loopback(workers, records).summary() for workers, records in links.items()},
        "measurements": rows,
        "checks": [_summed(workers, name, rows) for workers in settings.workers for name in settings.checked(workers)],
    }


def _on_cpu(loaded: LoadedRecipe) -> LoadedRecipe:
    """Workers of one machine that talk by Gloo."""
    if usable_cores() < 2:
        raise UserError("--check: needs two cores or more; this machine has one")
    if loaded.recipe.parallel.backend == "nccl":
        raise UserError("--check: runs on CPUs, which do not talk by nccl; set parallel.backend=auto")
    return load_recipe([loaded.tree()], {"cluster.gpus_per_worker": 0, "cluster.pin_cores": False})


class _Crew:
    """Has workers measure."""

    def __init__(self, loaded: LoadedRecipe, settings: CheckSettings, temporary: Path) -> None:
        self.loaded, self.settings, self.temporary = loaded, settings, temporary
        self.threads = loaded.recipe.cluster.threads_per_worker or 1
        self.number = 0

    def _job(self, what: str, workers: int, **fields: Any) -> list[dict[str, Any]]:
        self.number += 1
        folder = self.temporary / f"{self.number} {what}"
        folder.mkdir()
        records: list[dict[str, Any]] = []
        job = {"what": what, "backend": "gloo", "gpus_per_worker": 0, "threads": self.threads, **fields}
        if failure := run_job(job, workers, folder, {"CUDA_VISIBLE_DEVICES": ""}, records.append, _LIMIT_S):
            if failure.is_refused:
                raise UserError(failure.message)
            raise RunError(f"{workers} workers could not be measured ({what}): {failure.message}")
        return records

    def shape(self) -> Shape:
        """The model's."""
        recipe = one_micro_batch(self.loaded)
        (record,) = self._job("shape", 1, recipe=recipe.tree(), steps=self.settings.steps)
        return from_record(record)

    def round(self, workers: int, shape: Shape, number: int) -> dict[str, Any]:
        """The three measurements, every other time in reverse."""
        names = self.settings.checked(workers)
        alone = dict.fromkeys(["ddp", *("fsdp" if name == "hsdp" else name for name in names)])
        largest = 4 * shape.numel
        sizes = [size for number, size in enumerate(_SIZES) if number < 2 or size < 4 * largest]
        jobs: dict[str, dict[str, Any]] = {
            "alone": {"recipes": {name: recipe_for(self.loaded, name, 1).tree() for name in alone}},
            "links": {"sizes": sizes, "rounds": 1},
            "together": {"recipes": {n: recipe_for(self.loaded, n, workers, _ON_NODE).tree() for n in names}},
        }
        found: dict[str, Any] = {}
        others = []
        for what in in_turns(jobs, number):
            fields = {"steps": self.settings.steps, **jobs[what]}
            found[what], share = quietly(partial(self._job, what, workers, **fields))
            others.append(share)
        return found | {"others": max(others)}


def _rows(
    number: int, workers: int, settings: CheckSettings, shape: Shape, rules: Rules, found: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """What was predicted and measured in a round."""
    alone = {record["name"]: Phases.of(record["phases_s"]) for record in found["alone"]}
    wires = Loopback(workers, found["links"])
    measured = {record["name"]: record["step_s"] for record in found["together"]}
    rows = []
    for name in settings.checked(workers):
        place = Place(workers, _ON_NODE if name == "hsdp" else workers)
        own = divided(name, alone["fsdp" if name == "hsdp" else name], alone["ddp"], place)
        line = run(tasks_of(name, shape, own, rules, place, wires))
        rows.append(
            {
                "round": number,
                "others_share": found["others"],
                "workers": workers,
                "strategy": name,
                "alone_ms": 1e3 * own.total_s,
                "predicted_ms": 1e3 * line.total_s,
                "exposed_ms": 1e3 * line.exposed_s,
                "measured_ms": 1e3 * measured[name],
            }
        )
    return rows


def divided(strategy: str, own: Phases, whole: Phases, place: Place) -> Phases:
    """What a worker computes by itself, with the optimizer on its part alone.

    `whole`: under ddp, whose optimizer updates all weights; what fsdp's takes longer for that is not divided.
    """
    shards = {"fsdp": place.workers, "hsdp": place.on_node}.get(strategy, 1)
    fixed = max(0.0, own.optimizer_s - whole.optimizer_s)
    optimizer = fixed + (own.optimizer_s - fixed) / shards
    return Phases(own.forward_s, own.backward_s, optimizer)


def _summed(workers: int, name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians over the rounds, and the error of each."""
    own = [row for row in rows if row["workers"] == workers and row["strategy"] == name]
    errors = [row["predicted_ms"] / row["measured_ms"] - 1 for row in own]
    medians = {
        key: statistics.median(row[key] for row in own)
        for key in ("alone_ms", "predicted_ms", "exposed_ms", "measured_ms")
    }
    error = statistics.median(errors)
    return {
        "workers": workers,
        "strategy": name,
        "others_share": max(row["others_share"] for row in own),
        **medians,
        "error": error,
        "errors": errors,
        "ok": abs(error) <= ALLOWED,
    }


def _in_short(rows: list[dict[str, Any]], number: int) -> str:
    errors = {
        f"{row['strategy']} of {row['workers']} workers": abs(row["predicted_ms"] / row["measured_ms"] - 1)
        for row in rows
        if row["round"] == number
    }
    worst = max(errors, key=errors.__getitem__)
    others = max(row["others_share"] for row in rows if row["round"] == number)
    least = f"off by {statistics.median(errors.values()):.1%}, at most {errors[worst]:.1%}: {worst}"
    return least + (f"; others took {others:.0%} of the cores" if others > QUIET else "")


def check_table(result: Mapping[str, Any]) -> list[list[str]]:
    """Measured and predicted steps as rows of text, headed."""
    lines = [["check", "sends nothing", "predicted", "measured", "error", "rounds"]]
    for row in result["checks"]:
        spread = f"{min(row['errors']):+.1%} to {max(row['errors']):+.1%}"
        lines.append(
            [
                f"{row['strategy']}, {row['workers']} workers",
                *(f"{row[key]:.0f} ms" for key in ("alone_ms", "predicted_ms", "measured_ms")),
                f"{row['error']:+.1%}" + ("" if row["ok"] else " !"),
                spread,
            ]
        )
    return lines


def check_notes(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The network as it was measured, and whether all is well."""
    rows = []
    for workers, network in result["network"].items():
        told = [
            f"{name} {network['latency_us'][name]:.0f} us + {f'{rate:.2f} GB/s' if rate else 'nothing a byte'}"
            for name, rate in network["gb_per_s"].items()
        ]
        rows.append((f"{workers} workers", ", ".join(told)))
    wrong = [f"{row['strategy']} with {row['workers']} workers" for row in result["checks"] if not row["ok"]]
    limit = f"{result['allowed']:.0%}"
    others = max(row["others_share"] for row in result["checks"])
    rows.append(("others", f"took at most {others:.1%} of the cores beside a measurement"))
    rows.append(("verdict", f"off by over {limit}: {', '.join(wrong)}" if wrong else f"all within {limit}"))
    return rows
