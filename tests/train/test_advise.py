"""Which strategies fit, with which micro-batch, and what `auto` takes; on sizes made up for it."""

from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.parallel.sizes import LOSS, ROOT, Phase, Piece, Profile, Way, phase_words
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from shoal.train.advise import (
    USABLE,
    Choice,
    Outcome,
    TooFewSamplesError,
    divisors,
    num_moments,
    options_of,
    records,
    to_take,
    weigh_all,
)

MB = 1 << 20
WEIGHTS = 400 * MB
GPT: dict[str, Any] = {
    "task": "language_modelling",
    "model": {"name": "gpt", "layers": 8, "heads": 4, "dim": 64},
    "data": {"name": "tokens", "dir": "nowhere"},
    "optim": {"name": "adamw"},
    "train": {"steps": 1, "global_batch": 48, "precision": "fp32"},
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


def test_the_words_for_another_strategy_leave_out_what_is_for_the_recipes_own() -> None:
    offloaded = {"parallel.strategy": "fsdp", "parallel.fsdp.cpu_offload": True, "parallel.pipeline.stages": 2}
    outcomes, choice = weighed(recipe_of(1, **offloaded), 16)
    assert to_take(choice.outcome) == "parallel.strategy=single" and choice.outcome is outcomes["single"]
    assert outcomes["fsdp, offloaded"].option.is_own
    across = {"parallel.fsdp.reduce_dtype": "bf16", "parallel.tensor.across": "fsdp"}
    options = {option.name: option.parallel for option in options_of(recipe_of(4, **across))}
    assert options["tensor x fsdp"].fsdp.reduce_dtype == options["fsdp"].fsdp.reduce_dtype == "bf16"
    names = [option.sizes for option in options_of(recipe_of(4, **{"parallel.strategy": "tensor"}))]
    assert names.count("tensor 4") == 1, "though the recipe leaves its size open"


def test_the_largest_micro_batch_that_fits_is_found() -> None:
    outcomes, choice = weighed(recipe_of(1), 2)
    single = outcomes["single"]
    assert single.fits and (single.micro_batch, single.micro_batches) == (16, 3) and not single.is_own_micro_batch
    assert single.memory.total <= 2 << 30 and choice.outcome is single


def test_a_micro_batch_that_the_recipe_gives_and_that_fits_is_kept() -> None:
    outcomes, _ = weighed(recipe_of(1, **{"train.micro_batch": 4}), 16)
    assert outcomes["single"].micro_batch == 4 and outcomes["single"].micro_batches == 12
    assert outcomes["single"].is_own_micro_batch


def test_one_worker_takes_single_even_if_it_does_not_fit_and_is_told_what_would() -> None:
    outcomes, choice = weighed(recipe_of(1), 1.25)
    assert choice.outcome is outcomes["single"] and not choice.outcome.fits and outcomes["fsdp, offloaded"].fits
    assert choice.why == "there is one worker; it can use 1.25 GiB, and needs 1.70 GiB"
    assert choice.hint is not None and "parallel.strategy=fsdp parallel.fsdp.cpu_offload=true, which" in choice.hint


def test_a_model_that_cannot_be_trained_with_one_sample_takes_more_or_does_not_fit() -> None:
    def normed(way: Way, micro_batch: int, recompute: bool) -> Profile:
        if micro_batch == 1:
            raise TooFewSamplesError("batch norm")
        return profile_of(way, micro_batch, recompute)

    def single(gib: float, **overrides: Any) -> Outcome:
        recipe = recipe_of(1, **overrides)
        return weigh_all(recipe, normed, int(gib * 2**30 / USABLE), on_gpu=True)[0][0]

    assert single(1.75).fits and single(1.75).micro_batch == 3
    assert single(0.1).problem is None and not single(0.1).fits and single(0.1).micro_batch == 2
    prime = single(0.1, **{"train.global_batch": 3})
    assert not prime.fits and prime.micro_batch == 3, "one is the only smaller one that divides it"
    with pytest.raises(UserError, match="batch norm"):
        single(16, **{"train.micro_batch": 1})


def test_a_micro_batch_that_is_right_for_the_recipes_strategy_is_changed_for_others() -> None:
    outcomes, _ = weighed(recipe_of(4, **{"parallel.strategy": "tensor", "train.micro_batch": 16}), 16)
    assert outcomes["tensor"].micro_batch == 16 and outcomes["tensor"].is_own_micro_batch
    assert outcomes["ddp"].micro_batch == 12 and not outcomes["ddp"].is_own_micro_batch
    elastic, _ = weighed(recipe_of(4, **{"cluster.min_workers": 1, "train.micro_batch": 48}), 16)
    assert elastic["ddp"].micro_batch == 12 and elastic["ddp"].is_own_micro_batch, "never more than there are"


def test_a_batch_that_cannot_be_divided_is_a_problem_of_that_strategy() -> None:
    recipe = recipe_of(3, **{"parallel.strategy": "pipeline", "train.global_batch": 64})
    outcomes, choice = weighed(recipe, 16)
    assert outcomes["pipeline"].problem is None and outcomes["pipeline"].is_own_micro_batch
    message = "train.global_batch: 64 is not divisible by cluster.workers 3; nearest that is: 63"
    assert outcomes["ddp"].problem == outcomes["fsdp"].problem == choice.why == message
    assert choice.outcome.problem is not None and not choice.outcome.fits


def test_auto_keeps_to_the_recipes_micro_batch_where_something_fits_with_it() -> None:
    def heavy(way: Way, micro_batch: int, recompute: bool) -> Profile:
        return profile_of(way, micro_batch * 10, recompute)

    def chosen(**overrides: Any) -> tuple[dict[str, Outcome], Choice]:
        outcomes, choice = weigh_all(recipe_of(4, **overrides), heavy, int(3.5 * 2**30 / USABLE), on_gpu=True)
        return {outcome.option.name: outcome for outcome in outcomes}, choice

    outcomes, choice = chosen(**{"train.micro_batch": 12})
    ddp, fsdp = outcomes["ddp"], outcomes["fsdp"]
    assert ddp.fits and not ddp.is_own_micro_batch and fsdp.fits and fsdp.is_own_micro_batch
    assert choice.outcome is fsdp and choice.why.startswith("ddp would need train.micro_batch=6, which is not")
    assert chosen()[1].outcome.option.name == "ddp", "where the recipe leaves it open"


def test_several_workers_take_ddp_if_it_fits() -> None:
    outcomes, choice = weighed(recipe_of(4), 16)
    assert choice.outcome is outcomes["ddp"] and choice.why.endswith("GiB that it can use")
    assert all(outcome.fits for outcome in outcomes.values() if outcome.problem is None)
    sent = {name: outcome.sent for name, outcome in outcomes.items() if outcome.problem is None}
    assert sent["ddp"] < sent["fsdp"] and sent["pipeline"] < sent["ddp"]


def test_fsdp_is_next_and_the_reason_is_told() -> None:
    outcomes, choice = weighed(recipe_of(4), 1.25)
    assert not outcomes["ddp"].fits and outcomes["ddp"].micro_batch == 1
    assert choice.outcome is outcomes["fsdp"] and outcomes["fsdp"].fits
    assert choice.why.startswith(
        "ddp would need 2.09 GiB and a worker can use 1.25 GiB; fsdp is the fastest that fits, "
    )


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


@pytest.mark.parametrize(
    ("num_blocks", "piece", "expected"),
    [
        (0, LOSS, "the loss"),
        (0, ROOT, "the model"),
        (1, LOSS, "the loss"),
        (1, ROOT, "what surrounds the blocks"),
        (2, 1, "blocks.1"),
    ],
)
def test_moments_have_names(num_blocks: int, piece: int, expected: str) -> None:
    pieces = (*(Piece(f"blocks.{number}", 0, 0, 0, 0) for number in range(num_blocks)), Piece("", 0, 0, 0, 0))
    profile = Profile(1, pieces, (), 0, 0)
    assert phase_words(profile, Phase(piece, True, 0, 0, 0, 0)) == f"backward pass of {expected}"


def test_divisors() -> None:
    assert divisors(1) == [1] and divisors(12) == [1, 2, 3, 4, 6, 12] and divisors(49) == [1, 7, 49]
