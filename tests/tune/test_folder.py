"""A search's folder: found by its name, held by one process, read back as it was written, and without secrets."""

import json
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.errors import UserError
from shoal.launch.run import check_is_new, new_run_dir
from shoal.recipe.load import load_recipe
from shoal.tune.folder import (
    ROOT,
    SEARCH,
    SearchFolder,
    find_search,
    is_search,
    read_setup,
    setup_tree,
)
from shoal.tune.journal import Journal
from shoal.tune.results import summarise
from shoal.tune.setup import Setup, set_up
from shoal.tune.trial import Trial, fold
from shoal.tune.tuning import write_results

LR = {"optim.lr": "loguniform(1e-5, 1e-2)"}
SPACE: dict[str, Any] = {
    "optim.name": "choice(adamw, sgd)",
    "optim.lr": "loguniform(1e-05, 0.01)",
    "optim.momentum": "uniform(0.5, 0.9) if optim.name in (sgd)",
    "model.channels": "choice([8, 16], [16, 32]) if optim.name != sgd",
    "train.global_batch": "grid(16, 32)",
    "first": [{"optim.name": "sgd", "optim.lr": 0.001}],
    "tune": {"trials": 6, "scheduler": "asha", "grace": 2},
}


def made_search(folder: Path, space: dict[str, Any] = LR, overrides: Any = (), **settings: Any) -> Setup:
    """A search that was set up, and not begun."""
    setup = set_up(["digits"], overrides, space, settings)
    search = SearchFolder(folder)
    search.open()
    search.write_setup(setup)
    search.close()
    return setup


@pytest.fixture
def searches(here: Path) -> Path:
    for name in ("digits-20260101-ab12", "digits-20260102-cd34", "mnist-20260101-ef56"):
        (here / "searches" / name).mkdir(parents=True)
        (here / "searches" / name / SEARCH).write_text("recipe: {}\n")
    (here / "searches" / "not-a-search").mkdir()
    return here / "searches"


@pytest.mark.parametrize(
    "name",
    ["mnist-20260101-ef56", "mnist", "m", "searches/mnist-20260101-ef56", "./searches/mnist-20260101-ef56/"],
)
def test_a_search_is_found_by_its_path_its_name_or_a_beginning_that_only_it_has(searches: Path, name: str) -> None:
    assert find_search(name).resolve() == searches / "mnist-20260101-ef56"
    assert find_search(str(searches / "mnist-20260101-ef56")) == searches / "mnist-20260101-ef56"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("digits", "2 begin so, give more of the name: digits-20260101-ab12, digits-20260102-cd34"),
        ("mnits-20260101-ef56", "not found; did you mean mnist-20260101-ef56?"),
        ("zzz", "not found; there are digits-20260101-ab12, digits-20260102-cd34, mnist-20260101-ef56"),
        ("not-a-search", "not found; there are digits-20260101-ab12"),
    ],
)
def test_a_search_that_is_not_found_is_told_with_those_there_are(searches: Path, name: str, says: str) -> None:
    with pytest.raises(UserError, match=rf"^search '{name}': {re.escape(says)}"):
        find_search(name)


def test_where_there_are_no_searches_that_is_told(here: Path) -> None:
    with pytest.raises(
        UserError, match=rf"^search 'x': not found; no searches in {re.escape(str(here / 'searches'))}$"
    ):
        find_search("x")


def test_a_new_folder_is_named_by_recipe_date_and_chance(here: Path) -> None:
    one, other = new_run_dir("digits", ROOT), new_run_dir("digits", ROOT)
    assert re.fullmatch(r"searches/digits-\d{8}-\d{6}-[0-9a-f]{4}", str(one)) and one.parent == other.parent
    assert not one.exists()


def test_only_an_empty_folder_is_taken(here: Path) -> None:
    check_is_new(here / "none", "--search-dir")
    check_is_new(here, "--search-dir")
    (here / "file").write_text("")
    with pytest.raises(UserError, match=r"^--search-dir: .*file is a file$"):
        check_is_new(here / "file", "--search-dir")
    with pytest.raises(UserError, match=r"^--search-dir: .* is not empty; choose another$"):
        check_is_new(here, "--search-dir")
    (here / SEARCH).write_text("")
    with pytest.raises(UserError, match=r"is not empty; choose another, or go on there with --resume"):
        check_is_new(here, "--search-dir")


def test_a_folder_that_cannot_be_made_is_told(here: Path) -> None:
    (here / "file").write_text("")
    with pytest.raises(UserError, match=r"^--search-dir: .*file/s cannot be written: Not a directory$"):
        SearchFolder(here / "file" / "s").open()


def test_what_is_a_search_is_known(here: Path) -> None:
    made_search(here / "s")
    assert is_search(here / "s") and not is_search(here)


def _hold(path: Path, is_held: Any, may_end: Any) -> None:
    folder = SearchFolder(path)
    folder.open()
    is_held.set()
    may_end.wait(30)
    os._exit(0)  # as a process that is killed: it lets go of nothing itself


def test_one_process_at_a_time_searches_there(here: Path) -> None:
    context = multiprocessing.get_context("fork")
    is_held, may_end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(here / "s", is_held, may_end))
    other.start()
    try:
        assert is_held.wait(30)
        with pytest.raises(
            UserError, match=r"^--resume: .*/s is being searched by another process; stop that one first$"
        ):
            SearchFolder(here / "s").open()
    finally:
        may_end.set()
        other.join()
    mine = SearchFolder(here / "s")
    mine.open()  # whoever is gone holds nothing
    mine.close()
    again = SearchFolder(here / "s")
    again.open()
    again.close()


def test_a_trial_has_a_folder_for_each_of_its_weights(here: Path) -> None:
    folder = SearchFolder(Path("s"))
    assert folder.run_dir(Trial(7, {})) == here / "s" / "trials" / "0007"
    assert folder.run_dir(Trial(7, {}, generation=2)).name == "0007-2"


def test_a_search_is_read_back_as_it_was_written(here: Path) -> None:
    setup = made_search(here / "s", SPACE, ["train.epochs=9"])
    read = read_setup(here / "s", {})
    assert setup_tree(read) == setup_tree(setup)
    assert (read.space.settings, read.space.first) == (setup.space.settings, setup.space.first)
    assert (read.section, read.objectives, read.free) == (setup.section, setup.objectives, setup.free)
    assert (read.length, read.unit, read.grace) == (9.0, "epochs", 2.0)
    assert [read.proposer().propose(n, {}) for n in range(6)] == [setup.proposer().propose(n, {}) for n in range(6)]
    made_search(here / "again", yaml.safe_load((here / "s" / SEARCH).read_text())["space"], ["train.epochs=9"])


@pytest.mark.parametrize(
    "settings", [{"trials": 9}, {"concurrency": 2}, {"max_failed": 0.9}, {"keep_checkpoints": 1}, {}, {"seed": 3}]
)
def test_a_resume_may_change_how_much_and_not_what(here: Path, settings: dict[str, Any]) -> None:
    made_search(here / "s", seed=3)
    read = read_setup(here / "s", settings)
    assert {name: getattr(read.section, name) for name in settings} == settings and read.section.seed == 3


@pytest.mark.parametrize("metric", ["val_loss", ["val_loss"]])
def test_what_is_the_same_in_other_words_is_no_change(here: Path, metric: Any) -> None:
    made_search(here / "s", metric=["val_loss"])
    assert read_setup(here / "s", {"metric": metric}).objective.metric == "val_loss"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"seed": 4}, "tune.seed: cannot change when a search is resumed; start a new one for that"),
        ({"scheduler": "asha"}, "tune.scheduler: cannot change"),
        ({"search": "optuna"}, "tune.search: cannot change"),
        ({"metric": ["val_loss"]}, "tune.metric: cannot change"),
        ({"grace": 2}, "tune.grace: cannot change"),
        ({"trials": 0}, "tune.trials: should be greater than 0"),
    ],
)
def test_what_a_resume_may_not_change_is_told(here: Path, settings: dict[str, Any], says: str) -> None:
    made_search(here / "s")
    with pytest.raises(UserError, match=f"^{re.escape(says)}"):
        read_setup(here / "s", settings)


def test_a_population_does_not_grow_on_the_way(here: Path) -> None:
    made_search(here / "s", scheduler="pbt", trials=4)
    with pytest.raises(UserError, match=r"^tune.trials: a population cannot grow on the way"):
        read_setup(here / "s", {"trials": 5})
    assert read_setup(here / "s", {"trials": 4}).num_trials == 4


def test_nothing_of_a_search_holds_what_came_from_the_environment(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "tok-a8f3e1c2b4")
    monkeypatch.setenv("MY_LR", "0.0012345")
    recipe = {
        "name": "own",
        "task": {"name": "own:Task", "args": {"token": "${env:MY_TOKEN}"}},
        "train": {"steps": 4, "global_batch": 4},
    }
    space = {"optim.lr": 'choice("${env:MY_LR}", 0.1)', "train.seed": "randint(0, 9)"}
    setup = set_up([recipe], {}, space, {"trials": 2, "search": "random"})
    folder = SearchFolder(here / "s")
    folder.open()
    folder.write_setup(setup)
    journal = Journal(folder.path)
    read = read_setup(here / "s", {})
    assert read.base.recipe.task.args == {"token": "tok-a8f3e1c2b4"}, "which is there for the trials"
    assert setup_tree(read) == setup_tree(setup)
    config = {"optim.lr": "${env:MY_LR}", "train.seed": 3}
    assert read.recipe_of(config).recipe.optim.lr == 0.0012345
    journal.add("trial", trial=0, config=config)
    journal.add("result", trial=0, step=4, progress=4.0, metrics={"val_loss": 0.5}, stop=None)
    journal.add("ended", trial=0, status="done", summary={})
    trials = fold(journal.read())
    write_results(trials, read, folder.path, summarise(trials, read, folder.path, "done", 1.0))
    journal.close()
    folder.close()
    written = [path for path in (here / "s").rglob("*") if path.is_file()]
    assert {"search.yaml", "best.yaml", "journal.jsonl", "summary.json", "trials.csv"} <= {
        path.name for path in written
    }
    for path in written:
        assert not re.search("a8f3e1c2b4|0012345", path.read_text()), path
    assert "${env:MY_TOKEN}" in (here / "s" / "search.yaml").read_text()
    best = load_recipe([here / "s" / "best.yaml"])
    assert best.recipe.optim.lr == 0.0012345 and best.recipe.task.args == {"token": "tok-a8f3e1c2b4"}
    assert json.loads((here / "s" / "summary.json").read_text())["best"]["config"] == config
