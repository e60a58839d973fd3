"""Which strategies fit, with which micro-batch, and what `auto` takes; on sizes made up for it."""

from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.parallel.sizes import ROOT, Phase, Piece, Profile, Way
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from shoal.train.advise import USABLE, Choice, Outcome, divisors, num_moments, options_of, records, weigh_all

MB = 1 << 20
WEIGHTS = 400 * MB
GPT: dict[str, Any] = {
    "task": "language_modelling",
    "model": {"name": "gpt", "layers": 8, "heads": 4, "dim": 64},
    "data": {"name": "tokens", "dir": "nowhere"},
    "optim": {"name": "adamw"},
    "train": {"steps": 1, "global_batch": 48},
}


def recipe_of(workers: int, **overrides: Any) -> Recipe:
    return load_recipe([GPT], {"cluster.workers": workers, **overrides}).recipe


def profile_of(way: Way, micro_batch: int, recompute: bool) -> Profile:
    """A model of eight blocks; every sample keeps 20 MB, or 5 MB where activations are computed again."""
    block = WEIGHTS // 8 // way.degrees.tensor
    pieces = [Piece(f"blocks.{n}", block // 4, block, block, 0, largest=block) for n in range(8)]
    rest = Piece("", 0, 0, 0, 0)
    alive = micro_batch * (5 if recompute else 20) * MB // way.degrees.tensor
    forward = [Phase(n, False, alive, 0, alive, alive * (n + 1) // 8) for n in range(8)]
    backward = [Phase(n, True, alive + block, block, alive + block, 0, ((n, block),)) for n in reversed(range(8))]
    entry = Phase(ROOT, False, 0, 0, 0, 0)
    return Profile(micro_batch, (*pieces, rest), (entry, *forward, *backward), MB, MB, ends=(rest, rest))


def weighed(recipe: Recipe, gib: float) -> tuple[dict[str, Outcome], Choice]:
    outcomes, choice = weigh_all(recipe, profile_of, int(gib * 2**30 / USABLE), on_gpu=True)
    return {outcome.option.name: outcome for outcome in outcomes}, choice


def test_one_worker_takes_single_if_it_fits() -> None:
    outcomes, choice = weighed(recipe_of(1), 16)
    assert set(outcomes) == {"single", "fsdp, offloaded"} and choice.outcome is outcomes["single"]
    assert choice.why == "the whole model fits on one worker: 2.56 GiB of the 16.00 GiB that it can use"
    assert outcomes["single"].micro_batch == 48 and outcomes["single"].micro_batches == 1 and choice.hint is None


def test_the_largest_micro_batch_that_fits_is_found() -> None:
    outcomes, choice = weighed(recipe_of(1), 2)
    single = outcomes["single"]
    assert single.fits and (single.micro_batch, single.micro_batches) == (16, 3) and not single.is_own_micro_batch
    assert single.memory.total <= 2 << 30 and choice.outcome is single


def test_a_micro_batch_that_the_recipe_gives_and_that_fits_is_kept() -> None:
    outcomes, _ = weighed(recipe_of(1, **{"train.micro_batch": 4}), 16)
    assert outcomes["single"].micro_batch == 4 and outcomes["single"].micro_batches == 12
    assert outcomes["single"].is_own_micro_batch


def test_several_workers_take_ddp_if_it_fits() -> None:
    outcomes, choice = weighed(recipe_of(4), 16)
    assert choice.outcome is outcomes["ddp"] and choice.why.endswith("that it can use, and nothing sends less")
    assert all(outcome.fits for outcome in outcomes.values() if outcome.problem is None)
    sent = {name: outcome.sent for name, outcome in outcomes.items() if outcome.problem is None}
    assert sent["ddp"] < sent["fsdp"] and sent["pipeline"] < sent["ddp"]


def test_fsdp_is_next_and_the_reason_is_told() -> None:
    outcomes, choice = weighed(recipe_of(4), 1.25)
    assert not outcomes["ddp"].fits and outcomes["ddp"].micro_batch == 1
    assert choice.outcome is outcomes["fsdp"] and outcomes["fsdp"].fits
    assert choice.why.startswith("ddp would need 2.09 GiB and a worker can use 1.25 GiB; fsdp needs ")


def test_recomputing_activations_is_hinted_at_where_ddp_would_then_fit() -> None:
    def heavy(way: Way, micro_batch: int, recompute: bool) -> Profile:
        return profile_of(way, micro_batch * 50, recompute)

    _, choice = weigh_all(recipe_of(4), heavy, int(2.5 * 2**30 / USABLE), on_gpu=True)
    assert choice.outcome.option.name == "fsdp"
    assert choice.hint is not None and choice.hint.startswith("with train.activation_checkpointing=true, ddp would fit")


def test_where_nothing_fits_the_least_is_told_with_what_would_help() -> None:
    outcomes, choice = weighed(recipe_of(2), 0.01)
    assert not any(outcome.fits for outcome in outcomes.values())
    assert choice.why.startswith("nothing fits into the 10 MiB that a worker can use; fsdp, offloaded needs least")
    assert choice.hint == "what would help: more workers, a smaller model or shorter samples"


def test_a_recipes_own_strategy_comes_first_and_only_once() -> None:
    names = [(option.name, option.is_own) for option in options_of(recipe_of(4, **{"parallel.strategy": "fsdp"}))]
    assert names[0] == ("fsdp", True) and [name for name, _ in names].count("fsdp") == 1
    own = options_of(recipe_of(4, **{"parallel.strategy": "deepspeed", "parallel.deepspeed.stage": 3}))[0]
    assert own.name == "zero-3" and own.is_own


def test_what_is_for_ddp_alone_is_not_asked_of_others() -> None:
    outcomes, _ = weighed(recipe_of(4, **{"parallel.strategy": "ddp", "parallel.compress": "bf16"}), 16)
    assert outcomes["ddp"].option.parallel.compress == "bf16" and outcomes["fsdp"].problem is None


def test_what_is_not_possible_is_told_with_the_reason() -> None:
    resnet = {"task": "image_classification", "model": {"name": "resnet18"}, "data": {"name": "synthetic"}}
    recipe = load_recipe([GPT | resnet], {"cluster.workers": 4}).recipe
    outcomes, _ = weighed(recipe, 16)
    assert "pipeline needs a model with repeated blocks" in (outcomes["pipeline"].problem or "")
    assert not outcomes["pipeline"].fits

    def refuse(way: Way, micro_batch: int, recompute: bool) -> Profile:
        raise UserError("model: is odd")

    with pytest.raises(UserError, match="model: is odd"):
        weigh_all(recipe_of(4), refuse, 16 << 30, on_gpu=True)


@pytest.mark.parametrize(
    ("workers", "heads", "expected"), [(4, 4, {4, 2}), (8, 12, {4}), (2, 4, {2}), (4, 3, {None}), (6, 4, {2})]
)
def test_as_many_workers_share_layers_as_can(workers: int, heads: int, expected: set[int | None]) -> None:
    recipe = recipe_of(workers, **{"model.heads": heads, "model.dim": 12 * heads})
    sizes = {option.parallel.tensor.size for option in options_of(recipe) if option.parallel.strategy == "tensor"}
    assert sizes == expected


def test_records_hold_what_a_script_wants() -> None:
    outcomes, _ = weigh_all(recipe_of(4), profile_of, 16 << 30, on_gpu=True)
    found = {record["name"]: record for record in records(outcomes)}
    ddp = found["ddp"]
    parts = ("weights", "gradients", "optimizer", "activations", "buffers")
    assert ddp["memory_bytes"]["total"] == sum(ddp["memory_bytes"][part] for part in parts)
    assert ddp["possible"] and ddp["fits"] and ddp["accumulation"] == 1 and ddp["micro_batch"] == 12
    assert ddp["sent_bytes_per_step"] == 2 * WEIGHTS * 3 // 4 and ddp["parallel"] == {"strategy": "ddp"}


@pytest.mark.parametrize(
    ("optim", "expected"),
    [({"name": "adamw"}, 2), ({"name": "adam"}, 2), ({"name": "sgd"}, 0), ({"name": "sgd", "momentum": 0.9}, 1)],
)
def test_what_an_optimizer_keeps(optim: dict[str, Any], expected: int) -> None:
    assert num_moments(load_recipe([GPT | {"optim": optim}]).recipe.optim) == expected


def test_divisors() -> None:
    assert divisors(1) == [1] and divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(49) == [1, 7, 49]
