"""`Search` with runs that take no time: whatever happens, and in whatever order, it ends, and with the same."""

import json
import math
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.core.errors import RunError
from shoal.tune.results import best_trial
from shoal.tune.segment import Message
from shoal.tune.setup import Setup, set_up
from shoal.tune.trial import SAME, fold
from tests.tiny import TINY
from tests.tune.fake_runs import Chance, KilledError, MadeJournal, World

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {"trials": 6},
    "hyperband": {"trials": 12, "grace": 3},
    "pbt": {"trials": 5, "interval": 4},
    "pb2": {"trials": 5, "interval": 8},
}


def made_setup(scheduler: str, seed: int = 0, train: Mapping[str, Any] | None = None, **settings: Any) -> Setup:
    recipe = TINY | {
        "train": {"global_batch": 16, **(train or {"steps": 27})},
        "evaluate": {} if train else {"every_steps": 2},
        "checkpoint": {},
    }
    said = {"scheduler": scheduler, "seed": seed, "max_failed": 1.0} | SETTINGS.get(scheduler, {}) | settings
    return set_up([recipe], {}, {"optim.lr": "loguniform(1e-4, 1e-1)"}, said)


def wild(seed: int) -> Chance:
    return Chance(seed, tuner_killed=0.02, worker_killed=0.05, place_lost=0.02, report_lost=0.5)


def breaks(config: Mapping[str, Any], step: int) -> str | None:
    """One in five settings diverges, one in ten raises; always at the same step."""
    place = math.log10(config["optim.lr"]) * 1000 % 1
    return "diverged" if place < 0.2 and step == 7 else "exception" if place > 0.9 and step == 11 else None


@pytest.mark.parametrize("scheduler", SETTINGS)
def test_whatever_is_killed_and_whoever_is_faster_the_same_comes_of_it(
    monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    kills = 0
    for seed in range(4 if scheduler == "pb2" else 12):
        found = []
        for places, chance in ((1, Chance(seed)), (4, wild(seed)), (2, wild(seed + 1000))):
            world = World(monkeypatch, made_setup(scheduler, seed), places, fails=breaks)
            search, killed = world.search(chance)
            assert search.failure is None and all(trial.is_ended for trial in search.trials.values())
            kills += killed
            found.append(world.came_of())
        assert found[0] == found[1] == found[2]
    assert kills > 20


@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_who_decides_as_results_come_in_comes_to_an_end_too(monkeypatch: pytest.MonkeyPatch, scheduler: str) -> None:
    for seed in range(10):
        world = World(monkeypatch, made_setup(scheduler, seed, trials=8, grace=3), fails=breaks)
        search, _ = world.search(wild(seed))
        assert search.failure is None and all(trial.is_ended for trial in search.trials.values())


def test_one_that_still_saves_while_another_goes_on_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its result is known, so the better one goes on, and pauses again before it pauses itself: then nothing runs."""
    world = World(monkeypatch, made_setup("hyperband", trials=2), places=2)
    search = world.make()

    def reports(trial: int, step: int, value: float) -> None:
        report: Any = SimpleNamespace(step=step, epoch=step / 6, metrics={"val_loss": value})
        search._take(Message(trial, "report", {"report": report}))

    def pauses(trial: int, step: int, value: float) -> None:
        summary = {"step": step, "epoch": step / 6, "metrics": {"val_loss": value}}
        search._take(Message(trial, "ended", {"status": "interrupted", "ended_by": "pause", "summary": summary}))

    assert search._go_on() and set(search.segments) == {0, 1}
    reports(0, 3, 0.1)
    pauses(0, 3, 0.1)
    reports(1, 3, 0.9)
    assert search._go_on() and search.trials[0].until == 9
    reports(0, 9, 0.05)
    pauses(0, 9, 0.05)
    assert search._go_on() and search.trials[0].status == "paused"
    pauses(1, 3, 0.9)
    assert search._go_on() and search.failure is None
    assert (search.trials[0].status, search.trials[1].status) == ("running", "stopped")


def test_a_trial_that_cannot_start_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.core.errors import UserError
    from shoal.tune import search as search_module

    world = World(monkeypatch, made_setup("hyperband", trials=5), places=1)
    prepare = world._prepare

    def refuse_the_last(setup: Setup, trial: Any, run_dir: Any, extra: Any) -> Any:
        if trial.number == 4:
            raise UserError("such settings do not go together")
        return prepare(setup, trial, run_dir, extra)

    monkeypatch.setattr(search_module, "prepared_run", refuse_the_last)
    search, _ = world.search(Chance())
    assert search.failure is None and all(trial.is_ended for trial in search.trials.values())
    assert search.trials[4].kind == "refused"


@pytest.mark.parametrize("event", ["result", "paused", "moves", "run", "trial", "ended"])
def test_a_line_that_has_no_room_ends_the_search_which_then_goes_on_to_the_same_end(
    monkeypatch: pytest.MonkeyPatch, event: str
) -> None:
    calm = World(monkeypatch, made_setup("hyperband", 1))
    calm.search(Chance())
    world = World(monkeypatch, made_setup("hyperband", 1))
    journal, seen = MadeJournal(world.lines, world.chance), 0

    def has_room(what: str, fields: Mapping[str, Any]) -> bool:
        nonlocal seen
        seen += what == event
        return not (what == event and seen == 2)

    journal.has_room = has_room
    search = world.make(journal=journal)
    del search._end_all  # type: ignore[attr-defined] # the real one: what still comes is taken, and not written
    with pytest.raises(RunError, match="no room"):
        search.run()
    assert not search.segments, "all have ended"
    world.search(Chance(1))
    assert world.came_of() == calm.came_of()


@pytest.mark.parametrize("epochs", [{"interval": 0.5}, {"interval": 1}])
def test_what_a_donor_had_is_not_the_heirs(monkeypatch: pytest.MonkeyPatch, epochs: dict[str, float]) -> None:
    """Also where trials pause a little after the comparison, because batches do not divide it."""
    heirs = 0
    for seed in range(10):
        setup = made_setup("pbt", seed, {"epochs": 4}, trials=6, **epochs)
        world = World(monkeypatch, setup, steps_per_epoch=7)
        search, _ = world.search(Chance(seed))
        steps = {heir: step for _, step, heir in world.adopted}
        for trial in search.trials.values():
            if trial.lineage:
                heirs += 1
                assert all(result.step > steps[trial.name] for result in trial.own_results)
                assert trial.since == pytest.approx(steps[trial.name] / 7, abs=SAME)
        best = best_trial(search.trials, setup.objective)
        assert best is not None and best.best(setup.objective).step > steps.get(best.name, 0)  # type: ignore[union-attr]
    assert heirs > 10


def test_members_that_failed_and_are_started_again_are_compared_where_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    takeovers = 0
    for seed in range(10):
        dice = random.Random(seed)
        world = World(monkeypatch, made_setup("pbt", seed, trials=5))
        world.fails = lambda config, step, dice=dice: "exception" if step == 9 and dice.random() < 0.4 else None
        world.search(Chance(seed))
        world.fails = lambda config, step: None
        search, _ = world.search(Chance(seed), retry_failed=True)
        assert all(trial.status == "done" for trial in search.trials.values())
        events = map(json.loads, world.lines)
        moves = [move for event in events if event["event"] == "moves" for move in event["moves"]]
        taken = [move["progress"] for move in moves if move["move"] == "exploit"]
        assert taken == [step for _, step, _ in world.adopted], "the journal says what was taken over"
        takeovers += len(taken)
    assert takeovers > 20


def test_a_tuner_killed_at_every_line_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    calm = World(monkeypatch, made_setup("pbt", 2, trials=4))
    calm.search(Chance(2))
    for line in range(0, len(calm.lines), 3):
        world = World(monkeypatch, made_setup("pbt", 2, trials=4))
        journal = MadeJournal(world.lines, world.chance)

        def has_room(what: str, fields: Mapping[str, Any], line: int = line, lines: list[str] = world.lines) -> bool:
            if len(lines) >= line:
                raise KilledError
            return True

        journal.has_room = has_room
        with pytest.raises(KilledError):
            world.make(journal=journal).run()
        world.search(Chance(line))
        assert fold(map(json.loads, world.lines)).keys() == fold(map(json.loads, calm.lines)).keys()
        assert world.came_of() == calm.came_of()
