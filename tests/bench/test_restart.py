"""The measuring works and its arithmetic is right; that training goes on sooner than elsewhere is marked slow."""

import json
from pathlib import Path

import pytest

from shoal.bench.restart import measure, summed_up, table
from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.core.machine import usable_cores

Capture = pytest.CaptureFixture[str]
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")

FOUND = {
    "ray_train": [{"noticed_s": 1.0, "again_s": 10.0}, {"noticed_s": 2.0, "again_s": 20.0}],
    "shoal_ray": [{"noticed_s": 0.5, "again_s": 1.0}, {"noticed_s": 0.25, "again_s": 4.0}],
}


def test_times_are_medians_and_the_ratio_is_taken_within_a_round() -> None:
    found = summed_up(FOUND)
    assert found["contenders"]["ray_train"] == {"noticed_s": 1.5, "again_s": 15.0}
    assert found["ratios"] == [0.1, 0.2] and found["ratio"] == pytest.approx(0.15)
    assert table(found) == [
        ["after kill -9", "noticed", "training again"],
        ["ray_train", "1.5 s", "15.0 s"],
        ["shoal_ray", "0.4 s", "2.5 s"],
        ["shoal_ray / ray_train", "", "0.15 (goal: at most 0.6)"],
    ]


def test_one_contender_alone_has_no_ratio() -> None:
    found = summed_up({"shoal_ray": FOUND["shoal_ray"]})
    assert "ratio" not in found and len(table(found)) == 2


def test_there_must_be_another_worker_to_kill() -> None:
    with pytest.raises(UserError, match="--workers: should be 2 or more"):
        measure(1, 1, ["shoal_local"])


@pytest.mark.slow
@two_cores
def test_the_command_measures_from_the_kill_to_training_again(here: Path, capfd: Capture) -> None:
    assert run(["bench", "restart", "--rounds", "1", "--only", "shoal_local", "--json", "-o", "out"]) == 0
    out, err = capfd.readouterr()
    took = json.loads(out)["contenders"]["shoal_local"]
    assert 0 <= took["noticed_s"] <= took["again_s"] < 60
    assert "shoal_local: noticed after " in err
    assert sorted(path.suffix for path in (here / "out").iterdir()) == [".json", ".png"]


@pytest.mark.slow
@two_cores
def test_training_goes_on_in_at_most_six_tenths_of_the_time_of_plain_ray_train() -> None:
    found = measure(2, 1, ["ray_train", "shoal_ray"])
    assert found["contenders"]["shoal_ray"]["noticed_s"] <= 3.0
    assert found["ratio"] <= 0.6, found
