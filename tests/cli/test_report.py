"""`shoal report RUN` and `shoal runs compare -o`: where pages go, and what is said when they cannot."""

from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.tune.folder import SearchFolder
from shoal.tune.journal import Journal
from shoal.tune.setup import set_up
from tests.made_run import make_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def runs(here: Path) -> Path:
    """Two runs where they are looked for."""
    make_run(here / "runs" / "digits-aaaa")
    make_run(here / "runs" / "other-bbbb", ended=None)
    return here / "runs"


def test_a_report_lies_in_the_run_and_its_place_is_printed(runs: Path, capfd: Capture) -> None:
    assert run(["report", "digits"]) == 0
    out, err = capfd.readouterr()
    assert out == "runs/digits-aaaa/report.html\n" and err == ""
    assert (runs / "digits-aaaa" / "report.html").read_text().startswith("<!doctype html>")


def test_a_report_may_lie_elsewhere_and_be_written_again(runs: Path, capfd: Capture) -> None:
    for _ in range(2):
        assert run(["report", "runs/other-bbbb", "-o", "page.html"]) == 0
    assert capfd.readouterr().out == "page.html\n" * 2
    assert Path("page.html").is_file() and not (runs / "other-bbbb" / "report.html").exists()


def test_runs_under_another_root_are_found(runs: Path) -> None:
    runs.rename("elsewhere")
    assert run(["report", "digits-aaaa", "--root", "elsewhere"]) == 0
    assert Path("elsewhere/digits-aaaa/report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "digts-aaaa"], "did you mean digits-aaaa?"),
        (["report", "digits", "-o", "runs"], "-o: runs is a folder; give a file"),
        (["report", "digits", "-o", "nowhere/page.html"], "-o: nowhere is not a folder; make it first"),
        (["runs", "compare", "digits", "other", "-o", "runs"], "-o: runs is a folder; give a file"),
        (["runs", "compare", "digits", "-o", "page.html"], "give at least two runs"),
        (["runs", "compare", "digits", "other", "-o", "page.html", "--json"], "not both"),
    ],
)
def test_wrong_input_is_told_in_one_line(runs: Path, arguments: list[str], words: str, capfd: Capture) -> None:
    assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert out == "" and words in err and err.count("\n") == 1
    assert not Path("page.html").exists()


def test_a_page_that_cannot_be_written_is_told_in_one_line(runs: Path, capfd: Capture) -> None:
    (runs / "digits-aaaa" / "report.html").mkdir()
    assert run(["report", "digits"]) == 2
    assert "report.html cannot be written" in capfd.readouterr().err


def test_runs_are_compared_on_a_page(runs: Path, capfd: Capture) -> None:
    assert run(["runs", "compare", "digits", "other", "-o", "both.html"]) == 0
    assert capfd.readouterr().out == "both.html\n"
    assert "digits-aaaa" in Path("both.html").read_text() and "other-bbbb" in Path("both.html").read_text()


def test_without_a_file_runs_are_compared_in_the_terminal(runs: Path, capfd: Capture) -> None:
    assert run(["runs", "compare", "digits", "other"]) == 0
    assert "train_loss" in capfd.readouterr().out


def test_a_search_has_a_page_too_and_is_no_run(here: Path, capfd: Capture) -> None:
    setup = set_up(["digits"], [], {"optim.lr": "loguniform(1e-4, 1e-1)"}, {"trials": 2})
    folder = SearchFolder(here / "searches" / "s")
    folder.open()
    folder.write_setup(setup)
    folder.close()
    journal = Journal(folder.path)
    journal.add("trial", trial=0, config={"optim.lr": 0.01})
    journal.add("result", trial=0, step=9, progress=1.0, metrics={"val_loss": 0.5})
    journal.close()
    make_run(folder.path / "trials" / "0000")
    (folder.path / "trials" / "0000" / "report.html").write_text("a page")
    assert run(["report", "searches/s"]) == 0
    assert run(["report", "searches/s/", "-o", "page.html"]) == 0
    assert capfd.readouterr() == ("searches/s/report.html\npage.html\n", "")
    link = "trials/0000/report.html"
    assert link in (folder.path / "report.html").read_text() and link not in Path("page.html").read_text()
    for words in (["runs", "show", "searches/s"], ["monitor", "searches/s"]):
        assert run(words) == 2
        assert "this is a search; its trials are runs, such as searches/s/trials/0000" in capfd.readouterr().err
