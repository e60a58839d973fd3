"""What searches cost is measured as it should be, and is what is promised."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.tune import CONTENDERS, MOST_START_S, MOST_WALL, Timed, measure, table
from shoal.cli.main import run


def test_the_best_possible_is_training_over_the_places() -> None:
    # Two places, four trials of 10 s each; each waits a second for its first step.
    trials = [(0.0, 1.0, 11.0), (0.0, 1.0, 11.0), (12.0, 13.0, 23.0), (12.0, 13.0, 23.0)]
    record = Timed(0.0, 24.0, trials).to_record(slots=2)
    assert record["training_s"] == 20.0
    assert record["ratio"] == pytest.approx(1.2)
    assert record["ratio_without_starts"] == pytest.approx(1.1)
    assert record["start_s"] == record["longest_start_s"] == 1.0


def test_the_table_has_a_row_for_each() -> None:
    one = Timed(0.0, 10.0, [(0.0, 1.0, 9.0)]).to_record(1)
    rows = table({"trials": 1, "slots": 1, "contenders": {"shoal": one, "ray_tune": one}})
    assert [row[0] for row in rows] == ["1 trials, 1 at a time", "shoal", "ray_tune"]
    assert rows[1][1:] == ["10.0 s", "8.0 s", "1.250", "1.125", "1.00 s", "1.00 s"]


def test_an_unknown_contender_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "tune", "--only", "shole"]) == 2
    assert "did you mean shoal?" in capsys.readouterr().err


@pytest.mark.slow
def test_each_of_them_runs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "tune", "--trials", "2", "--steps", "20", "--rounds", "1", "--json"]
    assert run(words) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert tuple(result["contenders"]) == CONTENDERS
    assert all(one["wall_s"] >= one["training_s"] > 0 for one in result["contenders"].values())
    assert result["contenders"]["shoal"]["start_s"] < result["contenders"]["ray_tune_train"]["start_s"]


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_search_costs_little_beside_its_trials(here: Path) -> None:
    found = measure(8, 2, 10_000, 1, ["shoal"])["contenders"]["shoal"]
    assert found["ratio_without_starts"] <= MOST_WALL
    assert found["longest_start_s"] <= MOST_START_S
