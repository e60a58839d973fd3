"""What is shown of a search: words for what happens, the table, and who shows them."""

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from shoal.core.errors import UserError
from shoal.tune import view as view_module
from shoal.tune.setup import Setup, set_up
from shoal.tune.trial import Trial
from shoal.tune.view import (
    JsonView,
    LineView,
    SilentView,
    TableView,
    config_words,
    event_words,
    headline,
    make_view,
    search_table,
    value_words,
)
from tests.terminal import terminal
from tests.tune.made_trials import by_number, made

if TYPE_CHECKING:
    from shoal.tune.search import Search

SPACE = {"optim.lr": "loguniform(1e-5, 1e-2)", "model.channels": "choice([8, 16], [16, 32, 64])"}
MOVES = [
    {"move": "go", "trial": 1},
    {"move": "stop", "trial": 2, "reason": "place 3 of 3 at 2"},
    {"move": "exploit", "trial": 3, "from": 0, "progress": 4.0, "config": {"optim.lr": 0.00123456}},
]


@pytest.fixture(scope="module")
def setup() -> Setup:
    return make_setup()


def make_setup(space: dict[str, str] = SPACE, overrides: Any = (), epochs: int | None = 4, **settings: Any) -> Setup:
    length = [] if epochs is None else [f"train.epochs={epochs}"]
    return set_up(["digits"], [*length, "checkpoint.metric=val_loss", *overrides], space, settings)


def search_of(setup: Setup, *trials: Trial, segments: dict[int, Any] | None = None) -> "Search":
    """As much of a search as is shown."""
    return cast(
        "Search", SimpleNamespace(setup=setup, trials=by_number(*trials), segments=segments or {}, stopped_by=None)
    )


def drawn(search: "Search", width: int = 140) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(search_table(search, width))
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    return [line.strip() for line in lines if line.strip()]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"event": "start", "num_trials": 8}, None),
        ({"event": "mlflow", "run_id": "x"}, None),
        (
            {"event": "trial", "trial": 3, "config": {"optim.lr": 0.00123456, "train.global_batch": 64}},
            "trial 3: optim.lr=0.001235 train.global_batch=64",
        ),
        ({"event": "run", "trial": 3, "until": None}, None),
        ({"event": "first_step", "trial": 3, "seconds": 1.5}, None),
        (
            {"event": "result", "trial": 3, "step": 46, "progress": 2.0, "metrics": {"val_loss": 0.25, "other": 1.0}},
            "trial 3 at epoch 2: val_loss 0.2500",
        ),
        ({"event": "result", "trial": 3, "progress": 0.5, "metrics": {}}, "trial 3 at epoch 0.5: val_loss -"),
        ({"event": "paused", "trial": 3}, None),
        ({"event": "left", "trial": 3, "reason": ""}, None),
        ({"event": "left", "trial": 3, "reason": "no room"}, "trial 3 waits: no room"),
        ({"event": "ended", "trial": 3, "status": "done"}, "trial 3 done"),
        ({"event": "ended", "trial": 3, "status": "stopped", "reason": "last of 3"}, "trial 3 stopped: last of 3"),
        ({"event": "ended", "trial": 3, "status": "failed", "reason": "boom"}, "trial 3 failed: boom"),
        (
            {"event": "note", "trial": 3, "name": "failure", "fields": {"rank": 1, "message": "killed"}},
            "trial 3: worker 1: killed",
        ),
        ({"event": "note", "trial": 3, "name": "not known", "fields": {}}, None),
        ({"event": "moves", "moves": MOVES[:1]}, None),
        (
            {"event": "moves", "moves": MOVES},
            "trial 2 stopped: place 3 of 3 at 2\ntrial 3 takes over from trial 0 at epoch 4: optim.lr=0.001235",
        ),
    ],
    ids=lambda value: value["event"] if isinstance(value, dict) else "",
)
def test_what_happens_is_told_in_words_where_a_person_wants_to_know(
    setup: Setup, event: dict[str, Any], words: str | None
) -> None:
    assert event_words(event, setup) == words


def test_all_objectives_of_a_result_are_told() -> None:
    setup = make_setup(metric=["val_loss", "val_accuracy"], overrides=["train.epochs=null", "train.steps=40"])
    event = {"event": "result", "trial": 0, "progress": 40.0, "metrics": {"val_loss": 0.5, "val_accuracy": 0.9}}
    assert event_words(event, setup) == "trial 0 at step 40: val_loss 0.5000  val_accuracy 90.00%"


def test_settings_are_told_in_few_characters() -> None:
    config = {"optim.lr": 0.000123456789, "optim.name": "sgd", "model.hidden": [8, 16], "train.compile": True, "a.b": 3}
    assert config_words(config) == "optim.lr=0.0001235 optim.name=sgd model.hidden=[8, 16] train.compile=True a.b=3"
    assert value_words(None) == "None" and config_words({}) == ""


def test_the_headline_counts_and_names_the_best() -> None:
    setup = make_setup(trials=8, scheduler="asha")
    assert headline(search_of(setup)) == "0 of 8 trials ended"
    assert headline(search_of(setup, made(0), made(1, [], "waiting"))) == "0 of 8 trials ended, 1 running, 1 waiting"
    stopped = made(1, [0.9], "stopped")
    stopped.made = 1.0
    search = search_of(
        setup, made(0, [0.5, 0.25], "done"), stopped, made(2, [], "failed"), made(3, [0.3]), made(4, [], "paused")
    )
    assert headline(search) == (
        "3 of 8 trials ended (1 done, 1 stopped, 1 failed), 1 running, 1 paused; best val_loss 0.2500 by trial 0; "
        "15% of all epochs saved"  # 3 of the 4 that one of 5 trials had left
    )


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_shows_those_that_run_and_then_the_best(setup: Setup, width: int) -> None:
    config = {"optim.lr": 0.00123456, "model.channels": [16, 32, 64]}
    search = search_of(
        setup,
        made(0, [0.9], "done", config),
        made(1, [], "failed", config),
        made(2, [0.5, 0.25], "stopped", config),
        made(3, [0.95], "running", config),
    )
    title, *more = drawn(search, width)
    assert title.startswith("3 of 16 trials ended (1 done, 1 stopped, 1 failed), 1 running;")
    head = next(line for line in more if line.startswith("trial"))
    assert head.split() == ["trial", "status", "epochs", "val_loss", "lr", "channels"]
    rows = [line.split() for line in more[more.index(head) + 2 :]]
    assert [(row[0], row[1]) for row in rows] == [("3", "running"), ("2", "stopped"), ("0", "done"), ("1", "failed")]
    assert all("0.001235" in row and row[-3:] == ["[16,", "32,", "64]"] for row in rows)
    assert rows[1][2:5] == ["━━━━", "2", "0.2500"] and rows[3][2:4] == ["0", "-"]


def test_many_trials_are_cut_to_what_a_screen_holds(setup: Setup) -> None:
    trials = [made(number, [1.0 - number / 100], "done", {"optim.lr": 0.1}) for number in range(40)]
    lines = drawn(search_of(setup, *trials), 80)
    shown = [int(line.split()[0]) for line in lines if line.split()[0].isdecimal() and "done" in line.split()]
    assert shown == list(range(39, 27, -1)), "the best of them"
    assert lines[-1] == "and 28 more"


@pytest.mark.parametrize(("width", "shown"), [(40, 0), (80, 2), (140, 5), (300, 8)])
def test_where_there_is_no_room_for_all_settings_which_trial_it_is_stays(width: int, shown: int) -> None:
    space = {f"task.args.{'x' * 30}{number}": "choice(a, b)" for number in range(8)}
    setup = set_up([OWN], {}, space, {})
    config = dict.fromkeys(setup.space.keys, "y" * 200)
    lines = drawn(search_of(setup, made(0, [0.5], "running", config)), width)
    (head,) = [line for line in lines if line.startswith("trial")]
    row = lines[lines.index(head) + 2].split()
    assert row[:2] == ["0", "running"] and row[4] == "0.5000" and row[5:] == [f"{'y' * 15}…"] * shown
    assert shown == 8 or lines[-1] == f"no room for {8 - shown} settings"


def test_a_setting_may_be_called_as_a_column() -> None:
    setup = make_setup({"train.epochs": "choice(2, 4)"}, epochs=None, scheduler="none")
    (*_, row) = drawn(search_of(setup, made(0, [0.5], "running", {"train.epochs": 2})))
    assert row.split() == ["0", "running", "━━━━", "1", "0.5000", "2"]


OWN: dict[str, Any] = {"task": {"name": "own:Task"}, "train": {"steps": 4, "global_batch": 4}}


def test_what_a_user_has_written_is_no_markup() -> None:
    setup = set_up([OWN], {}, {"task.args.kind": "choice('[/red]', '[bold]x')"}, {"metric": ["val_a[/b]:min"]})
    trials = [made(0, [], "running", {"task.args.kind": "[/red]"}), made(1, [], "done", {"task.args.kind": "[bold]x"})]
    lines = drawn(search_of(setup, *trials))
    assert any("[/red]" in line for line in lines) and any("[bold]x" in line for line in lines)
    assert any("val_a[/b]" in line for line in lines)


def test_names_that_end_alike_are_told_apart() -> None:
    setup = make_setup({"model.dropout": "uniform(0, 0.5)", "task.label_smoothing": "uniform(0, 0.2)"})
    (head,) = [line for line in drawn(search_of(setup)) if line.startswith("trial")]
    assert head.split()[-2:] == ["dropout", "label_smoothing"]
    assert view_module._short_names(["a.lr", "b.lr", "c.d"]) == ["a.lr", "b.lr", "d"]


def test_the_bar_goes_on_between_evaluations(setup: Setup) -> None:
    segment = SimpleNamespace(step=69, steps_per_epoch=23.0)
    lines = drawn(search_of(setup, made(0, [0.5], "running"), segments={0: segment}))
    assert lines[-1].split()[2:4] == ["━━━━━━", "3"], "3 of 4 epochs, of which one was evaluated"
    by_steps = make_setup(overrides=["train.epochs=null", "train.steps=40"])
    segment = SimpleNamespace(step=90, steps_per_epoch=None)
    lines = drawn(search_of(by_steps, made(0, [], "running"), segments={0: segment}))
    assert lines[-1].split()[2:4] == ["━" * 8, "90"], "never longer than whole"


def test_lines_are_one_an_event(setup: Setup) -> None:
    out = io.StringIO()
    view = LineView(out, setup)
    view.note("starting Ray")
    view.event({"event": "start", "num_trials": 2})
    view.event({"event": "ended", "trial": 1, "status": "done"})
    view.show(search_of(setup))
    view.close()
    assert out.getvalue() == "starting Ray\ntrial 1 done\n"


def test_json_is_an_object_a_line(setup: Setup) -> None:
    out = io.StringIO()
    view = JsonView(out)
    event = {"time": 1.0, "event": "result", "trial": 0, "metrics": {"val_loss": float("nan")}}
    view.event(event)
    view.note("starting Ray")
    view.show(search_of(setup))
    view.close()
    first, second = map(json.loads, out.getvalue().splitlines())
    assert first == event | {"metrics": {"val_loss": None}}
    assert (second["event"], second["message"]) == ("log", "starting Ray") and second["time"] > 1e9


def test_silence_is_silent(setup: Setup, capfd: pytest.CaptureFixture[str]) -> None:
    view = SilentView()
    view.note("x")
    view.event({"event": "ended", "trial": 1, "status": "done"})
    view.show(search_of(setup))
    view.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("kind", "made_of"), [("json", JsonView), ("silent", SilentView), ("lines", LineView)])
def test_each_is_had_by_its_name(setup: Setup, kind: str, made_of: type) -> None:
    assert type(make_view(kind, setup, io.StringIO())) is made_of
    assert type(make_view("auto", setup, io.StringIO())) is LineView, "which is no terminal"


def test_a_name_that_is_not_known_is_refused(setup: Setup) -> None:
    with pytest.raises(UserError, match=r"^progress: 'line' is not allowed; .*did you mean lines\?"):
        make_view("line", setup, io.StringIO())


def test_on_a_terminal_a_table_stays_below_the_lines(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "_REFRESH_S", 0.0)
    monkeypatch.setenv("TERM", "xterm-256color")
    search = search_of(setup, made(0, [0.5], "running", {"optim.lr": 0.001}))
    with terminal() as screen:
        stream = screen.stream()
        not_elsewhere: list[str] = []
        view = make_view("auto", setup, stream, on_drawn=lambda: not_elsewhere.append("here"))
        assert isinstance(view, TableView)
        view.note("starting Ray")
        view.show(search)
        view.event({"event": "result", "trial": 0, "progress": 1.0, "metrics": {"val_loss": 0.5}})
        view.event({"event": "ended", "trial": 7, "status": "failed", "reason": "boom [/red] " + "x" * 500})
        search.trials[0].status = "done"
        assert not_elsewhere == ["here"], "a signal is told of by the table from then on"
        view.show(search)
        search.stopped_by = "SIGINT"  # type: ignore[misc]
        view.show(search)
        view.show(search)
        view.close()
        stream.close()
        shown = screen.close()
    assert shown.count("SIGINT: trials save after this step and end; once more to stop at once") == 1
    assert shown.index("starting Ray") < shown.index("1 running") < shown.index("trial 7 failed: boom [/red]")
    assert "1 of 16 trials ended (1 done)" in shown and "at epoch 1" not in shown, "which is in the table"
    assert "x" * 101 not in shown, "a line is a line"
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l"), "the cursor is there again"


def test_a_table_is_drawn_twice_a_second_at_most(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    monkeypatch.setattr(view_module, "search_table", lambda *arguments: times.append(time.monotonic()) or "")
    monkeypatch.setattr(view_module, "_REFRESH_S", 0.05)
    search = search_of(setup, made(0), segments={0: SimpleNamespace(step=0, steps_per_epoch=None)})
    view, until = TableView(io.StringIO(), setup), time.monotonic() + 0.2
    while time.monotonic() < until:
        view.show(search)
    assert 2 <= len(times) <= 5
    search.segments.clear()
    view.show(search)
    view.show(search)
    view.close()
    assert times[-1] - times[-2] < 0.05, "what came of it is shown at once"


def test_a_reader_that_goes_away_stops_nothing(setup: Setup, tmp_path: Path) -> None:
    stream = (tmp_path / "out").open("w")
    view = make_view("lines", setup, stream)
    view.note("one")
    stream.close()
    view.note("two")
    view.event({"event": "ended", "trial": 1, "status": "done"})
    assert (tmp_path / "out").read_text() == "one\n"
