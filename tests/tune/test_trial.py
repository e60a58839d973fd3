"""Trials are what their events make of them, whichever of these were the last to be written down."""

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.tune.schedulers.asha import Asha
from shoal.tune.schedulers.hyperband import Hyperband
from shoal.tune.schedulers.moves import Scheduler
from shoal.tune.schedulers.pbt import Pbt
from shoal.tune.space import parse_space
from shoal.tune.trial import Objective, Result, Trial, apply, fold
from tests.tune.made_trials import ACCURACY, LOSS, MadeSearch, made

NEW = {"event": "trial", "trial": 0, "config": {"optim.lr": 0.1}}
RUN = {"event": "run", "trial": 0, "until": None}


def result(step: int, value: float | None, trial: int = 0, **fields: Any) -> dict[str, Any]:
    metrics = {"val_loss": value}
    return {"event": "result", "trial": trial, "step": step, "progress": step / 10, "metrics": metrics, **fields}


def recorded() -> list[list[dict[str, Any]]]:
    """What whole searches would have written down."""
    space = parse_space({"optim.lr": "loguniform(1e-9, 1)", "model.hidden": "choice(8, 16)"})
    schedulers: list[Scheduler] = [
        Asha(LOSS, 9.0, 1.0, 3),
        Hyperband(LOSS, 9.0, 1.0, 3),
        Pbt(LOSS, 9.0, 2.0, 0.25, 0.25, 0, space, {"optim.lr"}),
    ]
    found = []
    for scheduler in schedulers:
        search = MadeSearch(
            scheduler,
            8,
            9,
            lambda trial, progress: None if trial.number == 3 else trial.number + 1 / progress,
            lambda number: {"optim.lr": 10.0**-number, "model.hidden": 8},
            fails={2: 2, 5: 4},
        )
        search.run()
        assert all(trial.is_ended for trial in search.trials.values())
        found.append(json.loads(json.dumps(search.events)))
    return found


RECORDED = recorded()

SPEED = "samples_per_s"


@pytest.mark.parametrize("events", RECORDED)
def test_the_beginning_of_a_journal_is_always_a_search(events: list[dict[str, Any]]) -> None:
    assert {event["event"] for event in events} >= {"trial", "run", "result", "ended"}
    for count in range(len(events) + 1):
        trials = fold(events[:count])
        assert list(trials) == list(range(len(trials)))
        again = fold([*events[:count], {"event": "start"}])
        assert all(trial.status != "running" for trial in again.values())
        assert all(len(trial.lineage) == trial.generation == len(trial.past) for trial in trials.values())
        assert all(sorted({r.step for r in t.results}) == [r.step for r in t.results] for t in trials.values())


@given(data=st.data())
def test_no_order_of_prefixes_and_restarts_raises(data: st.DataObject) -> None:
    events = data.draw(st.sampled_from(RECORDED))
    begin = events[: data.draw(st.integers(0, len(events)))]
    restarts = data.draw(st.lists(st.integers(0, len(begin)), max_size=3))
    for place in sorted(restarts, reverse=True):
        begin = [*begin[:place], {"event": "start"}, *begin[place:]]
    fold(begin)


@pytest.mark.parametrize("events", RECORDED)
def test_folding_changes_no_event_and_gives_the_same_again(events: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(events)
    assert fold(events) == fold(events) and events == before


def test_what_runs_when_the_search_is_killed_waits_when_it_goes_on() -> None:
    events = [NEW, {**NEW, "trial": 1}, RUN, {**RUN, "trial": 1}, result(20, 1.0), {"event": "paused", "trial": 1}]
    trials = fold(events)
    assert [trial.status for trial in trials.values()] == ["running", "paused"]
    apply(trials, {"event": "start"})
    assert [trial.status for trial in trials.values()] == ["waiting", "paused"]
    assert trials[0].made == 2.0, "what it had trained was trained"
    apply(trials, RUN)
    assert (trials[0].status, trials[0].starts, trials[0].began_at) == ("running", 2, 2.0)


def test_a_step_that_was_heard_of_is_not_heard_twice() -> None:
    events = [NEW, RUN, result(10, 1.0), result(20, 0.5), result(20, 0.4, stop="late"), result(10, 9.0, stop="late")]
    trial = fold(events)[0]
    assert [(r.step, r.metrics["val_loss"]) for r in trial.results] == [(10, 1.0), (20, 0.5)]
    assert trial.stop is None and trial.progress == 2.0
    assert fold([*events, result(30, 0.1, stop="now")])[0].stop == "now"


@pytest.mark.parametrize(
    ("event", "status"),
    [
        ({"event": "left", "reason": "no room"}, "waiting"),
        ({"event": "paused"}, "paused"),
        ({"event": "ended", "status": "done", "summary": {"step": 3}}, "done"),
        ({"event": "ended", "status": "stopped", "reason": "place 3 of 3"}, "stopped"),
        ({"event": "ended", "status": "failed", "reason": "no number", "kind": "diverged"}, "failed"),
        ({"event": "note", "name": "restart", "fields": {}}, "running"),
        ({"event": "first_step", "seconds": 1.5}, "running"),
    ],
)
def test_what_each_event_makes_of_a_trial(event: dict[str, Any], status: str) -> None:
    trial = fold([NEW, RUN, {**event, "trial": 0, "busy_s": 2.0, "made": 0.5}, {"event": "end", "status": "done"}])[0]
    assert trial.status == status and (trial.busy_s, trial.made) == (2.0, 0.5)
    assert trial.is_ended is (status in ("done", "stopped", "failed"))
    if trial.is_ended:
        assert trial.reason == event.get("reason", "") and trial.kind == event.get("kind", "")
        assert trial.summary == event.get("summary", {})
    assert trial.first_step_s == ([1.5] if event["event"] == "first_step" else [])


def test_moves_let_go_stop_and_take_over() -> None:
    events = [
        *({**NEW, "trial": number, "config": {"optim.lr": number}} for number in range(3)),
        *(result(10, float(number), number) for number in range(3)),
        *({"event": "paused", "trial": number} for number in range(3)),
    ]
    exploit = {"move": "exploit", "trial": 2, "from": 0, "progress": 1.0, "config": {"optim.lr": 0.8}}
    stop = {"move": "stop", "trial": 1, "reason": "place 2 of 3"}
    trials = fold([*events, {"event": "moves", "moves": [{"move": "go", "trial": 0}, stop, exploit]}])
    assert [trial.status for trial in trials.values()] == ["waiting", "stopped", "waiting"]
    assert trials[1].reason == "place 2 of 3" and (trials[0].name, trials[2].name) == ("0000", "0002-1")
    heir = trials[2]
    assert heir.config == {"optim.lr": 0.8} and heir.results == trials[0].results and heir.since == 1.0
    assert heir.lineage == [{"from": 0, "progress": 1.0, "config": {"optim.lr": 0.8}}]
    assert [(config, since, len(results)) for config, since, results in heir.past] == [({"optim.lr": 2}, 0.0, 1)]
    apply(trials, result(20, 0.1, 2))
    assert len(heir.results) == 2 and len(trials[0].results) == 1, "the history of the other stays its own"


def test_one_that_diverged_lives_again_after_it_took_over() -> None:
    ended = {"event": "ended", "trial": 1, "status": "failed", "kind": "diverged", "reason": "no number"}
    exploit = {"move": "exploit", "trial": 1, "from": 0, "progress": 1.0, "config": {}}
    events = [NEW, {**NEW, "trial": 1}, result(10, 1.0), ended, {"event": "moves", "moves": [exploit]}]
    trial = fold(events)[1]
    assert (trial.status, trial.reason, trial.kind, trial.stop) == ("waiting", "", "", None)


@pytest.mark.parametrize(
    ("objective", "value", "loss"),
    [
        (LOSS, 2.0, 2.0),
        (ACCURACY, 2.0, -2.0),
        (LOSS, None, math.inf),
        (ACCURACY, None, math.inf),
        (LOSS, math.nan, math.inf),
        (ACCURACY, math.nan, math.inf),
        # The journal has null for these: what is decided may not depend on whether it has been read back.
        (LOSS, -math.inf, math.inf),
        (LOSS, math.inf, math.inf),
        (ACCURACY, math.inf, math.inf),
        (ACCURACY, -math.inf, math.inf),
    ],
)
def test_less_is_better_and_what_is_no_number_is_worst(objective: Objective, value: float | None, loss: float) -> None:
    assert objective.loss(value) == loss


@pytest.mark.parametrize(
    ("text", "objective"),
    [
        ("val_loss", LOSS),
        ("val_loss:min", LOSS),
        ("val_accuracy", ACCURACY),
        ("speed:max", Objective("speed", False)),
        ("val_loss:max", Objective("val_loss", False)),
        ("speed", None),
    ],
)
def test_an_objective_is_read_from_its_text(text: str, objective: Objective | None) -> None:
    assert Objective.from_text(text) == objective
    assert objective is None or Objective.from_text(objective.to_text()) == objective


def test_how_good_a_trial_was_somewhere() -> None:
    trial = made(0, [3.0, None, 1.0, 2.0])
    assert [trial.loss_at(place, LOSS) for place in (0.5, 1, 2, 2.5, 4, 4.5)] == [
        3.0,
        3.0,
        math.inf,
        1.0,
        2.0,
        math.inf,
    ]
    assert trial.at(1.000004) is trial.results[0], "reports round"
    assert trial.at(1.001) is trial.results[1] and trial.at(1.0000000001) is trial.results[0] and trial.at(5) is None
    assert trial.value(LOSS) == 1.0 and trial.last_value(LOSS) == 2.0
    assert trial.best(LOSS) is trial.results[2]
    high = made(0, [0.5, 0.9, math.nan], objective=ACCURACY)
    assert high.value(ACCURACY) == high.last_value(ACCURACY) == 0.9
    assert high.value(LOSS) is None and high.best(LOSS) is None


@pytest.mark.parametrize(
    ("summary", "value"), [({}, None), ({SPEED: 2}, 2.0), ({SPEED: "x"}, None), ({SPEED: math.nan}, None)]
)
def test_what_only_the_end_tells_is_found_in_the_summary(summary: dict[str, Any], value: float | None) -> None:
    trial = Trial(0, {}, "done", [Result(1, 1.0, {SPEED: 9e9, "val_loss": 1.0})], summary=summary)
    assert trial.value(Objective(SPEED, False)) == value, "and not in a report, which may be a lucky one"
    assert trial.values([LOSS, Objective(SPEED, False)]) == [1.0, value]


def test_a_trial_that_has_done_nothing() -> None:
    trial = Trial(7, {})
    assert (trial.name, trial.progress, trial.since, trial.is_ended) == ("0007", 0.0, 0.0, False)
    assert trial.at(0) is None and trial.loss_at(0, LOSS) == math.inf and trial.last_value(LOSS) is None


def test_a_journal_that_does_not_hang_together_is_refused_with_its_line() -> None:
    with pytest.raises(UserError, match="line 2 does not follow"):
        fold([{"event": "start"}, {"event": "run", "trial": 0, "until": None}])
