"""Population based training on made-up trials: who takes over from whom, and with which settings."""

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.tune.domains import Options, Range
from shoal.tune.schedulers.moves import Exploit, Go, Move
from shoal.tune.schedulers.pb2 import Pb2
from shoal.tune.schedulers.pbt import Pbt, moved
from shoal.tune.space import Config, Space, parse_space
from shoal.tune.trial import Objective, Trial
from tests.tune.made_trials import ACCURACY, LOSS, MadeSearch, by_number, made

SPACE = parse_space(
    {
        "optim.lr": "loguniform(1e-5, 1e-1)",
        "optim.schedule": "choice(cosine, constant, linear)",
        "optim.warmup_steps": "randint(0, 50) if optim.schedule != constant",
        "model.hidden": "choice(8, null, [16, 16])",
        "train.seed": "randint(1, 99)",
    }
)
FREE = {"optim.lr", "optim.schedule", "optim.warmup_steps"}
FIXED = {"model.hidden", "train.seed"}


def pbt(
    objective: Objective = LOSS,
    quantile: float = 0.25,
    resample: float = 0.25,
    seed: int = 0,
    interval: float = 1.0,
    space: Space = SPACE,
    kind: type[Pbt] = Pbt,
) -> Pbt:
    return kind(objective, 10.0, interval, quantile, resample, seed, space, FREE)


def config_of(number: int) -> Config:
    config: Config = {"optim.lr": 10.0 ** -(1 + number % 4), "optim.schedule": ("cosine", "constant")[number % 2]}
    if config["optim.schedule"] == "cosine":
        config["optim.warmup_steps"] = number
    return {**config, "model.hidden": (8, None, [16, 16])[number % 3], "train.seed": number + 1}


def population(values: list[float | None], objective: Objective = LOSS) -> dict[int, Trial]:
    """Trials that wait to be compared."""
    return by_number(
        *(made(number, [value], "paused", config_of(number), objective) for number, value in enumerate(values))
    )


def exploits(moves: list[Move]) -> dict[int, Exploit]:
    return {move.trial: move for move in moves if isinstance(move, Exploit)}


@pytest.mark.parametrize(
    ("progress", "until"), [(0, 2), (1, 2), (2, 4), (2.1, 4), (3.999, 4), (7, 8), (8, None), (9, None)]
)
def test_trials_pause_at_every_comparison_before_the_end(progress: float, until: float | None) -> None:
    trial = made(0, [1.0])
    trial.results[0] = type(trial.results[0])(1, progress, {})
    assert pbt(interval=2.0).until(trial) == until
    assert pbt(interval=2.0).verdict(trial, {}) is None


def test_nothing_happens_until_all_are_there() -> None:
    trials = population([1.0, 2.0, 3.0, 4.0])
    assert pbt().moves(trials, expects_more=True) == []
    for status in ("running", "waiting"):
        late = {**trials, 1: made(1, [1.0], status)}
        assert pbt().moves(late, expects_more=False) == []
    for status in ("done", "failed", "stopped"):
        gone = {**trials, 1: made(1, [9.0], status)}  # type: ignore[arg-type]
        moves = pbt().moves(gone, expects_more=False)
        assert [move.trial for move in moves] == [0, 2, 3], "who has ended is not waited for, and stays ended"
    assert pbt().moves({}, expects_more=False) == []


@pytest.mark.parametrize("objective", [LOSS, ACCURACY])
@pytest.mark.parametrize(
    ("values", "quantile", "donors", "heirs"),
    [
        ([4.0, 3.0, 2.0, 1.0], 0.25, {3}, {0}),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 0.25, {0, 1}, {6, 7}),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], 0.5, {0, 1, 2, 3}, {4, 5, 6, 7}),
        ([1.0, 2.0], 0.25, {0}, {1}),
        ([1.0, 2.0, 3.0], 0.5, {0}, {2}),
        ([2.0, None, 1.0, math.nan], 0.25, {2}, {3}),
        ([2.0, None, 1.0, math.nan], 0.5, {2, 0}, {1, 3}),
        ([None, None, None, 5.0], 0.5, {3}, {1, 2}),  # who has no number gives nothing
    ],
)
def test_the_worst_take_over_from_the_best(
    objective: Objective, values: list[float | None], quantile: float, donors: set[int], heirs: set[int]
) -> None:
    sign = 1 if objective.is_less_better else -1
    trials = population([None if value is None else sign * value for value in values], objective)
    for seed in range(5):
        moves = pbt(objective, quantile, seed=seed).moves(trials, expects_more=False)
        found = exploits(moves)
        assert [move.trial for move in moves] == list(trials), "each goes on, one way or the other"
        assert set(found) == heirs and {move.donor for move in found.values()} <= donors
        assert all(move.progress == 1.0 for move in found.values())


def test_every_one_of_the_best_may_be_taken_over_from() -> None:
    trials = population([float(number) for number in range(16)])
    found = Counter(move.donor for seed in range(20) for move in exploits(pbt(seed=seed).moves(trials, False)).values())
    assert set(found) == {0, 1, 2, 3}


def test_nobody_takes_over_from_an_equal() -> None:
    moves = pbt(quantile=0.5).moves(population([1.0, 1.0, 1.0, 1.0]), expects_more=False)
    assert moves == [Go(number) for number in range(4)]
    assert set(exploits(pbt(quantile=0.5).moves(population([1.0, 1.0, 1.0, 2.0]), False))) == {3}


def test_one_alone_goes_on() -> None:
    assert pbt().moves(population([1.0]), expects_more=False) == [Go(0)]


def diverged(number: int, values: list[float | None], kind: str = "diverged") -> Trial:
    return made(number, values, "failed", config_of(number), kind=kind)


def test_who_diverged_lives_again_and_who_failed_otherwise_does_not() -> None:
    trials = population([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    trials |= by_number(diverged(2, []), diverged(5, [1.0], "exception"))
    found = exploits(pbt().moves(trials, expects_more=False))
    assert set(found) == {2}, "it takes the place of the worst"
    assert found[2].donor == 0 and found[2].progress == 1.0
    many = trials | by_number(*(diverged(number, []) for number in (3, 4, 6, 7)))
    assert set(exploits(pbt().moves(many, expects_more=False))) == {2, 3, 4, 6, 7}, "however many they are"


def test_where_none_has_a_number_nothing_moves() -> None:
    assert pbt().moves(by_number(*(diverged(number, []) for number in range(4))), expects_more=False) == []
    moves = pbt().moves(population([None, math.nan]) | {2: diverged(2, [])}, expects_more=False)
    assert moves == [Go(0), Go(1)], "those without a number go on until they fail"


def test_who_pauses_a_little_later_is_compared_with_the_others() -> None:
    """Where batches do not divide an epoch, each pauses elsewhere."""
    trials = population([1.0, 2.0, 3.0, 4.0])
    for trial in trials.values():
        trial.results[0] = type(trial.results[0])(10, 1.0 + trial.number / 50, trial.results[0].metrics)
    found = exploits(pbt().moves(trials, expects_more=False))
    assert set(found) == {3} and found[3].donor == 0 and found[3].progress == 1.0


def check(space: Space, config: Config) -> None:
    assert set(config) == {setting.key for setting in space.open_settings(config)}
    assert all(space.domain(key).holds(value) for key, value in config.items())


@pytest.mark.parametrize("kind", [Pbt, Pb2])
@given(
    seed=st.integers(0, 2**32 - 1),
    resample=st.floats(0, 1),
    donor=st.integers(0, 20),
    trial=st.integers(0, 20),
    epochs=st.integers(1, 9),
)
def test_settings_of_an_heir_are_in_the_space_and_what_may_not_change_is_the_donors(
    kind: type[Pbt], seed: int, resample: float, donor: int, trial: int, epochs: int
) -> None:
    trials = {n: made(n, [n + 1 / e for e in range(1, epochs + 1)], "paused", config_of(n)) for n in range(21)}
    scheduler = pbt(seed=seed, resample=resample, kind=kind)
    before = repr(trials)
    config = scheduler.explore(trials[donor], trials[trial], float(epochs), trials, [])
    check(SPACE, config)
    assert {key: config[key] for key in FIXED} == {key: trials[donor].config[key] for key in FIXED}
    assert scheduler.explore(trials[donor], trials[trial], float(epochs), trials, []) == config
    assert repr(trials) == before


def test_an_heir_moves_a_little_or_draws_anew() -> None:
    donor, trial = made(0, [1.0], "paused", config_of(0)), made(1, [2.0], "paused", config_of(1))
    moves = {pbt(resample=0.0, seed=s).explore(donor, trial, 1.0, {}, [])["optim.lr"] for s in range(40)}
    assert sorted(moves) == [pytest.approx(0.08), 0.1], "a fifth up or down, not over the end"
    drawn = {pbt(resample=1.0, seed=s).explore(donor, trial, 1.0, {}, [])["optim.lr"] for s in range(40)}
    assert len(drawn) == 40 and min(drawn) < 1e-4


def test_a_field_that_opens_is_drawn_and_one_that_closes_goes() -> None:
    seen = set()
    for seed in range(60):
        for number in (0, 1):
            donor = made(number, [1.0], "paused", config_of(number))
            config = pbt(resample=0.5, seed=seed).explore(donor, made(5, [2.0]), 1.0, {}, [])
            check(SPACE, config)
            seen.add(("optim.warmup_steps" in donor.config, "optim.warmup_steps" in config))
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize(
    ("domain", "value", "down", "up"),
    [
        (Range(0.0, 1.0), 0.5, 0.4, 0.6),
        (Range(0.0, 1.0), 1.0, 0.8, 1.0),
        (Range(0.45, 1.0), 0.5, 0.45, 0.6),
        (Range(0.0, 1.0), 0.0, 0.0, 0.1),  # from nothing there is no fifth
        (Range(1.0, 9.0, is_whole=True), 5, 4, 6),
        (Range(1.0, 9.0, is_whole=True), 2, 1, 3),  # a fifth of which would round to none
        (Range(1.0, 9.0, is_whole=True), 1, 1, 2),
        (Range(1.0, 9.0, is_whole=True), 9, 7, 9),
        (Range(1.0, 100.0, is_log=True, is_whole=True), 50, 40, 60),
        (Options(("a", "b", "c")), "b", "a", "c"),
        (Options(("a", "b", "c")), "a", "a", "b"),
        (Options(("a", "b", "c")), "c", "b", "c"),
        (Options((None, True, 1)), True, None, 1),
        (Options(([1], [2])), [1], [1], [2]),
    ],
)
def test_a_value_is_moved_to_its_neighbours(domain: Any, value: Any, down: Any, up: Any) -> None:
    for is_up, wanted in ((False, down), (True, up)):
        found = moved(domain, value, is_up)
        assert type(found) is type(wanted) and domain.holds(found)
        assert found == (pytest.approx(wanted) if isinstance(wanted, float) else wanted)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    num_trials=st.integers(2, 12),
    slots=st.lists(st.integers(1, 12), min_size=2, max_size=2),
    interval=st.integers(1, 5),
    quantile=st.floats(0.05, 0.5),
    fails=st.dictionaries(st.integers(0, 11), st.integers(1, 9), max_size=6),
    late=st.booleans(),
)
@pytest.mark.parametrize("kind", [Pbt, Pb2])
def test_the_order_changes_nothing_and_every_search_ends(
    kind: type[Pbt],
    seed: int,
    num_trials: int,
    slots: list[int],
    interval: int,
    quantile: float,
    fails: dict[int, float],
    late: bool,
) -> None:
    def value_of(trial: Trial, progress: float) -> float | None:
        mixed = (trial.number * 7919 + seed + int(progress) * 13 + int(1e6 * trial.config["optim.lr"])) % 23
        return None if mixed == 0 else mixed / 10

    outcomes = []
    for index, places in enumerate(slots):
        search = MadeSearch(
            pbt(interval=float(interval), quantile=quantile, seed=seed, kind=kind),
            num_trials,
            10,
            value_of,
            config_of,
            fails,
            places,
            seed + index,
            overshoot=lambda number: number % 4 / 50 if late else 0.0,
        )
        trials = search.run()
        assert all(trial.status in ("done", "failed") for trial in trials.values())
        for trial in trials.values():
            check(SPACE, trial.config)
        outcomes.append([(t.status, t.config, t.lineage, t.results) for t in trials.values()])
    assert outcomes[0] == outcomes[1]
    if len(fails) == 0:
        assert all(trial.status == "done" for trial in trials.values())


def test_a_population_gets_better_by_taking_over() -> None:
    def value_of(trial: Trial, progress: float) -> float:
        before = trial.results[-1].metrics["val_loss"] if trial.results else 100.0
        return before - 10 ** -abs(math.log10(trial.config["optim.lr"]) + 2)

    def propose(number: int) -> Config:
        return config_of(number) | {"optim.lr": 1e-5 * 1.5**number}

    found = MadeSearch(pbt(), 8, 10, value_of, propose).run()
    alone = MadeSearch(pbt(), 8, 10, value_of, propose)
    alone.scheduler = pbt(interval=20.0)
    assert max(t.results[-1].metrics["val_loss"] for t in found.values()) < max(
        t.results[-1].metrics["val_loss"] for t in alone.run().values()
    )
    assert sum(trial.generation for trial in found.values()) >= 8


def test_two_that_take_over_from_the_same_get_other_settings() -> None:
    space = parse_space({"optim.lr": "loguniform(1e-5, 1e-1)"})
    for seed in range(20):
        trials = by_number(*(made(n, [float(n > 0) * (n + 1)], "paused", {"optim.lr": 1e-3}) for n in range(8)))
        scheduler = Pbt(LOSS, 10.0, 1.0, 0.5, 0.0, seed, space, {"optim.lr"})
        taken = [
            (m.donor, m.config["optim.lr"]) for m in exploits(scheduler.moves(trials, expects_more=False)).values()
        ]
        # Without drawing anew there are two ways to move: more than two heirs of one donor cannot all differ.
        for donor in {donor for donor, _ in taken}:
            rates = [rate for other, rate in taken if other == donor]
            assert len(set(rates)) >= min(len(rates), 2)


def test_trials_are_compared_where_all_have_been() -> None:
    ahead = made(0, [9.0, 5.0], "paused", config_of(0))
    others = [made(number, [0.1 * number], "paused", config_of(number)) for number in (1, 2, 3)]
    # Who has failed and was started again is behind: the others wait.
    assert pbt().moves(by_number(ahead, *others), expects_more=False) == [Go(1), Go(2), Go(3)]
    others = [made(number, [0.1 * number] * 2, "paused", config_of(number)) for number in (1, 2, 3)]
    found = exploits(pbt().moves(by_number(ahead, *others), expects_more=False))
    assert set(found) == {0} and found[0].progress == 2.0
