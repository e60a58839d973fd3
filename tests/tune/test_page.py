"""The page of a search: its data, and the page itself in a real browser."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.tune.domains import Options, Range
from shoal.tune.page import page_data, write_search_page
from shoal.tune.page_data import axis_of, own_track
from shoal.tune.results import summarise
from shoal.tune.setup import Setup, set_up
from shoal.tune.space import Setting, Space
from shoal.tune.trial import Objective, Result, Trial, fold
from tests import browser as browsers
from tests.browser import Browser
from tests.observe.report.test_page import CONTRAST

browser, chromium = browsers.browser, browsers.chromium  # fixtures
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
SPACE = {
    "optim.name": "choice(adamw, sgd)",
    "optim.lr": "loguniform(1e-4, 1)",
    "optim.momentum": "uniform(0.0, 0.99) if optim.name == sgd",
    "model.channels": "choice([8, 16], [16, 32])",
}
SECTIONS = ["Best settings", "Settings and results", "Which settings matter", "Curves", "All trials"]
PICTURE = "#settings .picture"


def make_setup(**settings: Any) -> Setup:
    return set_up(["digits"], {"train.epochs": 6}, SPACE, {"trials": 12, **settings})


def make_trial(setup: Setup, number: int, **fields: Any) -> Trial:
    """A trial that has learned something: those with the higher numbers more."""
    config: dict[str, Any] = {}
    for place, setting in enumerate(setup.space.open_settings(config)):
        config[setting.key] = setting.domain.at(((number * 7 + place * 3) % 12) / 12)
    top = 0.5 + (number * 5 % 12) / 30
    results = [
        Result(epoch * 23, float(epoch), {one.metric: top - 0.3 / epoch for one in setup.objectives})
        for epoch in range(1, 3 if number % 3 else 7)
    ]
    status = "stopped" if number % 3 else "done"
    made: dict[str, Any] = {"status": status, "results": results, "busy_s": 1.5, "made": results[-1].progress} | fields
    return Trial(number, config, **made)


def make_trials(setup: Setup, count: int = 12) -> dict[int, Trial]:
    trials = {number: make_trial(setup, number) for number in range(count)}
    if count > 4:
        trials[1].reason = "place 2 of 2 at 1, and 1 went on"
        trials[4].status, trials[4].reason, trials[4].results = "failed", "the loss is not a number", []
    return trials


def write(folder: Path, trials: dict[int, Trial], setup: Setup, status: str = "done") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return write_search_page(trials, setup, folder, summarise(trials, setup, folder, status, 12.5))


def data_of(trials: dict[int, Trial], setup: Setup, folder: Path) -> dict[str, Any]:
    return page_data(trials, setup, folder, summarise(trials, setup, folder, "done", 12.5))


def population(setup: Setup) -> dict[int, Trial]:
    """Two trials; 1 takes over from 0 at epoch 2."""
    config = {"optim.name": "adamw", "optim.lr": 0.01, "model.channels": [8, 16]}
    events: list[dict[str, Any]] = [{"event": "trial", "trial": n, "config": config} for n in (0, 1)]

    def results(number: int, epochs: range, value: float) -> list[dict[str, Any]]:
        return [
            {"event": "result", "trial": number, "step": e, "progress": float(e), "metrics": {"val_accuracy": value}}
            for e in epochs
        ]

    events += results(0, range(1, 3), 0.9) + results(1, range(1, 3), 0.2)
    move = {"move": "exploit", "trial": 1, "from": 0, "progress": 2.0, "config": {**config, "optim.lr": 0.012}}
    events += [{"event": "moves", "moves": [{"move": "go", "trial": 0}, move]}]
    events += results(0, range(3, 5), 0.93) + results(1, range(3, 5), 0.95)
    return fold(events)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return make_setup(scheduler="asha")


@pytest.fixture(scope="module")
def page_file(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "digits-search"
    (folder / "trials" / "0003").mkdir(parents=True)
    (folder / "trials" / "0003" / "report.html").write_text("")
    return write(folder, make_trials(setup), setup)


def test_data_tells_settings_as_axes_and_trials_as_places(setup: Setup, tmp_path: Path) -> None:
    trials = make_trials(setup)
    data = data_of(trials, setup, tmp_path / "it")
    axes = {one["key"]: one for one in data["settings"]}
    assert axes["optim.lr"]["log"] and (axes["optim.lr"]["low"], axes["optim.lr"]["high"]) == (1e-4, 1.0)
    assert axes["model.channels"]["options"] == ["[8, 16]", "[16, 32]"]
    assert axes["optim.momentum"]["when"] == "if optim.name is sgd"
    shares = [one["importance"] for one in data["settings"]]
    assert shares == sorted(shares, reverse=True) and data["too_few"] is None
    momentum = [one["key"] for one in data["settings"]].index("optim.momentum")
    for one in data["trials"]:
        assert (one["places"][momentum] is None) == (one["config"]["optim.name"] == "adamw")
        assert all(place is None or 0 <= place <= 1 for place in one["places"])
    assert data["best"]["trial"] == max(trials.values(), key=lambda t: t.value(setup.objective) or 0).number
    assert data["commands"][0]["text"] == f"shoal train {tmp_path / 'it' / 'best.yaml'}"
    assert data["counts"] == {"done": 4, "stopped": 7, "failed": 1}


def test_data_of_no_trials_and_of_few(setup: Setup, tmp_path: Path) -> None:
    empty = data_of({}, setup, tmp_path)
    assert empty["best"] is None and empty["commands"] == [] and empty["objectives"][0]["axis"] is None
    assert "at least 8" in empty["too_few"] and "there are 0" in empty["too_few"]
    one = data_of(make_trials(setup, 1), setup, tmp_path)
    assert one["objectives"][0]["axis"]["low"] == one["objectives"][0]["axis"]["high"]


def test_what_is_not_a_number_is_no_value(setup: Setup, tmp_path: Path) -> None:
    broken = [Result(1, 1.0, {"val_accuracy": math.nan}), Result(2, 2.0, {"val_accuracy": None}), Result(3, 3.0, {})]  # type: ignore[dict-item]
    trial = make_trial(setup, 0, results=broken)
    trial.config["optim.lr"] = math.inf
    data = data_of({0: trial}, setup, tmp_path)
    assert data["trials"][0]["values"] == [None] and data["trials"][0]["curves"] == [
        {"x": [1.0, 2.0], "y": [None, None]}
    ]
    assert data["trials"][0]["config"]["optim.lr"] == "Infinity"
    json.dumps(data, allow_nan=False)


def test_a_setting_with_the_name_of_a_secret_is_hidden(setup: Setup, tmp_path: Path) -> None:
    space = Space((Setting("model.args.api_key", Options(("first-one", "second-one"))),))
    secret = dataclasses.replace(setup, space=space)
    data = data_of({0: Trial(0, {"model.args.api_key": "first-one"})}, secret, tmp_path)
    assert "first-one" not in json.dumps(data) and "second-one" not in json.dumps(data)


@pytest.mark.parametrize("is_less_better", [True, False])
def test_an_axis_is_cut_before_values_that_are_far_worse(is_less_better: bool) -> None:
    sign = 1 if is_less_better else -1
    objective = Objective("x", is_less_better)
    axis = axis_of([sign * v for v in (-1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 2.0, 900.0)], objective)
    assert axis is not None and axis["cut"] and 900.0 not in (abs(axis["low"]), abs(axis["high"]))
    best = axis["low"] if is_less_better else axis["high"]
    assert best == sign * -1.0  # what is far better is what one looks for
    assert axis_of([None, math.nan], objective) is None


def test_losses_over_many_powers_of_ten_get_a_log_axis() -> None:
    assert axis_of([0.01, 0.1, 5.0], Objective("val_loss", True)) == {
        "low": 0.01,
        "high": 5.0,
        "log": True,
        "cut": False,
    }


def test_the_track_of_a_trial_is_what_it_went_through_itself(tmp_path: Path) -> None:
    setup = make_setup(scheduler="pbt")
    trials = population(setup)
    assert [one.metrics["val_accuracy"] for one in own_track(trials[1])] == [0.2, 0.2, 0.95, 0.95]
    assert [one.metrics["val_accuracy"] for one in own_track(trials[0])] == [0.9, 0.9, 0.93, 0.93]
    lane = data_of(trials, setup, tmp_path)["trials"][1]["lane"]
    assert [(part["from"], part["to"], part["donor"]) for part in lane] == [(0.0, 2.0, None), (2.0, 4.0, 0)]
    assert [part["config"]["optim.lr"] for part in lane] == [0.01, 0.012]


def test_the_page_opens_in_silence_and_draws_everything(browser: Browser, page_file: Path) -> None:
    opened = browser.open(page_file)
    page = opened.page
    assert page.title() == "digits-search · done"
    assert [heading.inner_text() for heading in page.locator("h2").all()] == SECTIONS
    assert "val_accuracy" in page.locator(".verdict-words").inner_text()
    story = page.locator(".verdict-advice").inner_text()
    assert "A random search under asha made 12 trials in 12.5 s: 4 done, 7 stopped, 1 failed." in story
    assert "% saved" in story
    assert "best.yaml" in page.locator("#best pre").first.inner_text()
    page.locator("#best button").first.click()
    page.get_by_text("Copied").wait_for()
    assert page.locator(f"{PICTURE} path.of-trial").count() == 12
    assert page.locator(f"{PICTURE} path.without").count() == 1
    assert page.locator(PICTURE).get_by_text("not set").count() == 1
    assert page.locator("#curves g.of-trial").count() == 11 and page.locator("#curves .end-mark").count() == 7
    assert page.locator("#importance li").count() == 4
    assert page.locator("#trials tbody tr").count() == 12
    assert page.locator("#trials tbody").get_by_text("place 2 of 2 at 1, and 1 went on").count() == 1
    links = [link.get_attribute("href") for link in page.locator("#trials a").all()]
    assert links == ["trials/0003/report.html"]
    assert opened.is_quiet, (opened.complaints, opened.requests)


def test_pointing_shows_a_trial_in_all_pictures(browser: Browser, page_file: Path) -> None:
    page = browser.open(page_file).page
    page.locator("#settings").scroll_into_view_if_needed()
    box = page.locator(PICTURE).bounding_box()
    page.locator(PICTURE).hover(position={"x": 10, "y": 48})
    for y in range(60, int(box["height"]) - 20, 8):
        page.locator(PICTURE).hover(position={"x": box["width"] * 0.3, "y": y})
        if page.locator("#settings .readout .who").count():
            break
    assert re.match(r"Trial \d+", page.locator("#settings .readout").inner_text())
    assert (
        page.locator(".over .chosen-line").count() >= 1 and "optim.lr" in page.locator("#settings .inline").inner_text()
    )
    page.mouse.move(0, 0)
    assert page.locator(".chosen-line").count() == 0


def test_rows_and_keys_choose_a_trial(browser: Browser, page_file: Path) -> None:
    page = browser.open(page_file).page
    row = page.locator("#trials tbody tr").nth(2)
    number = row.locator("button").inner_text()
    row.locator("td").nth(2).click()
    assert row.locator("button").get_attribute("aria-pressed") == "true"
    assert page.locator("#settings .who b").first.inner_text() == f"Trial {number}"
    row.locator("button").press("Enter")
    assert page.locator("#settings .who").count() == 0
    page.locator("#importance").click()
    page.locator("nav a").last.focus()
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('#settings .picture')"):
            break
    best = page.locator("#trials button.pick").first.inner_text()
    assert page.locator("#settings .who b").first.inner_text() == f"Trial {best}"
    page.keyboard.press("ArrowDown")
    second = page.locator("#trials button.pick").nth(1).inner_text()
    assert page.locator("#settings .who b").first.inner_text() == f"Trial {second}"
    page.keyboard.press("Escape")
    assert page.locator("#settings .who").count() == 0
    page.get_by_text("by number").click()
    assert page.locator("#trials button.pick").all_inner_texts() == [str(number) for number in range(12)]


def test_several_objectives_have_a_front(browser: Browser, tmp_path: Path) -> None:
    setup = make_setup(metric=["val_accuracy:max", "samples_per_s:max"])
    trials = make_trials(setup)
    for number, trial in trials.items():
        speed = 1000.0 - 700 * (number * 5 % 12) / 12
        trial.summary = {"samples_per_s": speed}
        trial.results = [
            Result(one.step, one.progress, {**one.metrics, "samples_per_s": speed}) for one in trial.results
        ]
    opened = browser.open(write(tmp_path / "two", trials, setup))
    page = opened.page
    assert "on the Pareto front of val_accuracy and samples_per_s" in page.locator(".verdict-words").inner_text()
    front = json.loads(page.locator("#data").text_content())["front"]
    assert front and page.locator("#front .on-front").count() == len(front)
    assert page.locator("#front tbody tr").count() == len(front)
    page.locator("#front button.pick").first.click()
    assert page.locator("#front .who b").first.inner_text() == f"Trial {front[0]}"
    assert page.locator("#curves .picture").count() == 2
    assert opened.is_quiet, (opened.complaints, opened.requests)


def test_a_population_has_a_lineage(browser: Browser, tmp_path: Path) -> None:
    setup = make_setup(scheduler="pbt")
    opened = browser.open(write(tmp_path / "pbt", population(setup), setup))
    page = opened.page
    assert "1 time a trial took over the weights of a better one" in page.locator(".verdict-advice").inner_text()
    assert page.locator("#lineage .arrows .arrow").count() == 1
    picture = page.locator("#lineage .picture")
    box = picture.bounding_box()
    picture.hover(position={"x": box["width"] * 0.55, "y": 40})
    assert "with the weights of trial 0" in page.locator("#lineage .readout").inner_text()
    picture.hover(position={"x": box["width"] * 0.15, "y": 40})
    assert "that it began with" in page.locator("#lineage .readout").inner_text()
    page.locator("#lineage summary").click()
    assert "0.012" in page.locator("#lineage tbody tr").inner_text()
    assert opened.is_quiet, (opened.complaints, opened.requests)


def test_names_and_messages_cannot_act(browser: Browser, setup: Setup, tmp_path: Path) -> None:
    evil = dataclasses.replace(
        setup,
        space=Space(
            (Setting(f"a.{EVIL}", Options((EVIL, "x" * 5000))), Setting("optim.lr", Range(1e-4, 1.0, is_log=True)))
        ),
        objectives=(Objective(f"x_{EVIL}", True), Objective("__proto__", False)),
    )
    trials = {}
    for number in range(8):
        metrics = {f"x_{EVIL}": 1.0 + number, "__proto__": float(number)}
        config = {f"a.{EVIL}": EVIL if number % 2 else "x" * 5000, "optim.lr": 0.01}
        trials[number] = Trial(number, config, "failed", [Result(1, 1.0, metrics)], reason=EVIL * 50, kind=EVIL)
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    summary = summarise(trials, evil, folder, "failed", 1.0) | {"error": EVIL, "importance": {f"a.{EVIL}": 1.0}}
    trials[3].config["optim.lr"] = EVIL
    page_file = write_search_page(trials, evil, folder, summary)
    assert "<script>alert" not in page_file.read_text() and "<img" not in page_file.read_text()
    for width in (1280, 390):
        opened = browser.open(page_file, width=width)
        opened.page.locator("#trials button.pick").first.click()
        assert opened.page.locator("img").count() == 0 and opened.page.locator("script").count() == 2
        assert opened.page.get_by_text("onerror=alert(1)").count() > 0  # told, as the text that it is
        assert opened.page.evaluate("document.documentElement.scrollWidth") == width
        assert opened.is_quiet, (opened.complaints, opened.requests)


def test_the_page_refuses_scripts_that_are_not_its_own(browser: Browser, page_file: Path) -> None:
    opened = browser.open(page_file)
    add = "const s = document.createElement('script'); s.textContent = 'window.acted = 1'; document.body.append(s);"
    assert opened.page.evaluate(f"() => {{ {add} return Boolean(window.acted); }}") is False
    assert any("Content Security Policy" in words for words in opened.complaints)


@pytest.mark.parametrize("kind", ["asha", "pbt", "two"])
def test_on_a_phone_nothing_is_wider_than_the_screen(browser: Browser, tmp_path: Path, kind: str) -> None:
    settings = {"metric": ["val_accuracy:max", "val_loss:min"]} if kind == "two" else {"scheduler": kind}
    setup = make_setup(**settings)
    trials = population(setup) if kind == "pbt" else make_trials(setup)
    folder = tmp_path / ("a-search-with-a-rather-long-name-that-has-no-place-to-break-at-all" * 2)
    opened = browser.open(write(folder, trials, setup), width=390, height=780, has_touch=True, is_mobile=True)
    for summary in opened.page.locator("summary").all():
        summary.click()
    opened.page.locator("#trials button.pick").first.tap()
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 390
    assert opened.is_quiet, (opened.complaints, opened.requests)


@pytest.mark.parametrize("count", [0, 1, 500])
def test_no_trial_one_and_very_many(browser: Browser, tmp_path: Path, count: int) -> None:
    setup = make_setup(scheduler="asha", trials=max(count, 1))
    page_file = write(tmp_path / "many", make_trials(setup, count), setup, "running")
    assert page_file.stat().st_size < 2_000_000
    opened = browser.open(page_file)
    assert opened.page.locator("#trials tbody tr").count() == count
    if count == 0:
        assert "No trial has reported val_accuracy yet" in opened.page.locator(".verdict-words").inner_text()
    else:
        opened.page.locator(PICTURE).hover()
    assert opened.is_quiet, (opened.complaints, opened.requests)


def test_trials_without_any_result(browser: Browser, setup: Setup, tmp_path: Path) -> None:
    statuses = ("waiting", "running", "paused", "failed")
    trials = {n: make_trial(setup, n, results=[], status=s, made=0.0) for n, s in enumerate(statuses)}
    opened = browser.open(write(tmp_path / "none", trials, setup, "interrupted"))
    assert {one.inner_text() for one in opened.page.locator("#trials .state").all()} == set(statuses)
    assert opened.page.locator(f"{PICTURE} path.without").count() == 4
    assert "No values over time" in opened.page.locator("#curves").inner_text()
    assert opened.is_quiet, (opened.complaints, opened.requests)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_texts_can_be_read(browser: Browser, page_file: Path, scheme: str) -> None:
    page = browser.open(page_file, color_scheme=scheme).page
    page.locator("#trials button.pick").first.click()
    red = int(re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[0])
    assert red < 60 if scheme == "dark" else red > 200
    assert page.evaluate(CONTRAST) == []
