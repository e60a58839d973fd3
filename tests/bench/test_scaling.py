"""The measuring works and its arithmetic is right; how well Shoal scales is asserted only where it is marked slow."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.scaling import (
    COMPUTE_BOUND,
    PLAIN,
    Settings,
    check_peer,
    measure,
    peer_row,
    recipe_for,
    scaling_rows,
    steady_rate,
    table,
    worker_counts,
)
from shoal.cli.main import run
from shoal.core.errors import UserError
from shoal.core.machine import usable_cores
from shoal.recipe.load import LoadedRecipe, load_recipe
from tests.tiny import TINY, own_recipe, write_own_task, write_tiny

Capture = pytest.CaptureFixture[str]
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="needs two cores")


def tiny(**overrides: Any) -> LoadedRecipe:
    return load_recipe([TINY], overrides)


@pytest.mark.parametrize(
    ("asked", "threads", "is_weak", "counts"),
    [
        (None, 1, True, [1, 2, 3, 4, 8, 16]),
        (None, 4, True, [1, 2, 3, 4]),
        (None, 5, True, [1, 2, 3]),
        (None, 32, True, None),
        (7, 1, True, [1, 2, 3, 4, 7]),
        (2, 1, True, [1, 2]),
        (1, 16, True, [1]),
        (6, 1, False, [1, 2, 4]),
        (17, 1, True, None),
        (3, 8, True, None),
    ],
)
def test_the_numbers_of_workers_fit_the_machine(
    asked: int | None, threads: int, is_weak: bool, counts: list[int] | None
) -> None:
    recipe, settings = tiny().recipe, Settings(max_workers=asked, is_weak=is_weak)
    if counts is not None:
        assert worker_counts(recipe, threads, settings, cores=16) == counts
        return
    with pytest.raises(UserError, match=r"--max-workers: .* cores and this machine has 16"):
        worker_counts(recipe, threads, settings, cores=16)


def report(step: int, samples: int, seconds: dict[str, float], **metrics: float) -> dict[str, Any]:
    stepping_s = sum(seconds.get(phase, 0.0) for phase in ("data", "forward_backward", "optimizer"))
    return {"step": step, "metrics": {"samples_per_s": samples / stepping_s, **metrics}, "seconds": seconds}


def test_the_rate_is_that_of_steady_steps_with_all_that_lies_between_them() -> None:
    reports = [
        report(1, 64, {"start": 5.0, "forward_backward": 9.0}),
        report(2, 64, {"forward_backward": 9.0}),
        report(4, 128, {"data": 0.5, "forward_backward": 2.0, "optimizer": 1.0, "report": 0.5}),
        {"step": 6, "metrics": {"val_loss": 1.0}, "seconds": {"evaluate": 50.0}},
        report(6, 128, {"forward_backward": 12.0}),
    ]
    assert steady_rate(reports, warmup=2) == pytest.approx((128 + 128) / (4.0 + 12.0))
    assert steady_rate(reports, warmup=2, last_counts=False) == pytest.approx(128 / 4.0)


RATES = {
    "1 worker": [100.0, 50.0, 110.0],
    "2 workers": [190.0, 100.0, 209.0],
    "2 workers apart": [200.0, 125.0, 208.0],
    PLAIN: [190.0, 80.0, 220.0],
}


def test_speed_up_and_shares_are_medians_of_ratios_within_a_round() -> None:
    first, second = scaling_rows([1, 2], RATES, num_samples=950)
    assert first == {
        "workers": 1,
        "samples_per_s": 100.0,
        "epoch_s": 9.5,
        "speed_up": 1.0,
        "efficiency": 1.0,
        "communication": None,
    }
    assert second["samples_per_s"] == 190.0 and second["epoch_s"] == 5.0
    assert second["speed_up"] == pytest.approx(1.9) and second["efficiency"] == pytest.approx(0.95)
    assert second["communication"] == pytest.approx(1 - 190 / 200)
    peer = peer_row(RATES)
    assert peer["ratio"] == 1.0 and peer["ratios"] == [1.0, 1.25, 0.95] and peer["samples_per_s"] == 190.0


def test_noise_is_not_shown_as_communication_below_nothing() -> None:
    rates = RATES | {"2 workers apart": [180.0, 90.0, 200.0]}
    assert scaling_rows([1, 2], rates, 950)[1]["communication"] == 0.0


def test_the_table_says_where_the_share_of_communication_is_not_known() -> None:
    without = {name: rates for name, rates in RATES.items() if "apart" not in name}
    result = {"workers": scaling_rows([1, 2], without, 950), "peer": peer_row(RATES)}
    header, one, two, plain = table(result)
    assert header == ["workers", "epoch", "samples/s", "speed-up", "efficiency", "communication"]
    assert one == ["1", "9.5 s", "100.0", "1.00", "100.0%", ""]
    assert two == ["2", "5.0 s", "190.0", "1.90", "95.0%", "unknown"]
    assert plain[:3] == ["2 (plain torchrun)", "", "190.0"]


def test_workers_keep_their_batch_in_weak_scaling_and_share_it_in_strong() -> None:
    weak = recipe_for(tiny(), 3, 1, Settings()).recipe
    strong = recipe_for(tiny(), 4, 1, Settings(is_weak=False)).recipe
    assert weak.train.global_batch == 48 and strong.train.global_batch == 16
    assert weak.cluster.workers == 3 and weak.cluster.pin_cores and weak.cluster.threads_per_worker == 1
    already_two = tiny(**{"cluster.workers": 2})
    assert recipe_for(already_two, 3, 1, Settings()).recipe.train.global_batch == 24


def test_all_steps_that_count_lie_between_warm_up_and_what_ends_a_run() -> None:
    settings = Settings(steps=10)
    together = recipe_for(tiny(**{"train.epochs": 3, "train.steps": None}), 2, 1, settings).recipe
    assert together.train.steps == 12 and together.train.epochs is None and together.observe.every_steps == 2
    assert together.evaluate.every_steps == together.checkpoint.every_steps == 12
    alone = recipe_for(tiny(**{"parallel.compress": "bf16"}), 2, 1, settings, apart=True).recipe
    assert alone.train.steps == alone.parallel.sync_every == 14 and alone.parallel.compress == "none"
    assert recipe_for(tiny(**{"parallel.sync_every": 5}), 2, 1, settings).recipe.train.steps == 15


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.precision": "fp16"}, "has no train.precision fp16"),
        ({"train.compile": True}, "has no train.compile"),
        ({"train.micro_batch": 4}, "has no train.micro_batch"),
        ({"parallel.compress": "bf16"}, "has no parallel.compress"),
    ],
)
def test_a_peer_that_would_train_otherwise_is_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_peer(tiny(**overrides).recipe, [1, 2])


def test_a_peer_needs_two_workers_and_a_model_to_build() -> None:
    check_peer(tiny().recipe, [1, 2])
    with pytest.raises(UserError, match="raise --max-workers"):
        check_peer(tiny().recipe, [1])
    with pytest.raises(UserError, match="data: and model:"):
        check_peer(load_recipe([own_recipe("never_imported")]).recipe, [1, 2])


@pytest.mark.slow
@two_cores
def test_the_command_measures_workers_and_the_peer(here: Path, capfd: Capture) -> None:
    write_tiny(here)
    words = ["tiny.yaml", "--launcher", "local", "--max-workers", "2", "--rounds", "1", "--steps", "5", "--peer"]
    assert run(["bench", "scaling", *words, "--json", "-o", "out"]) == 0
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    found = json.loads(line)
    assert [row["workers"] for row in found["workers"]] == [1, 2] and found["batch_per_worker"] == 16
    assert set(found["rates"]) == {"1 worker", "2 workers", "2 workers apart", PLAIN}
    one, two = found["workers"]
    assert one["epoch_s"] == pytest.approx(96 / one["samples_per_s"]) and one["efficiency"] == 1.0
    assert two["speed_up"] == pytest.approx(two["samples_per_s"] / one["samples_per_s"])
    assert 0 <= two["communication"] < 1
    assert found["peer"]["ratio"] == pytest.approx(two["samples_per_s"] / found["peer"]["samples_per_s"])
    assert "round 1 of 1, plain torchrun: " in err and "efficiency" in err and "(Shoal on local / plain" in err
    assert sorted(path.suffix for path in (here / "out").iterdir()) == [".json", ".png"]
    assert not (here / "runs").exists()


def test_what_a_run_said_is_shown_if_it_fails(here: Path, capfd: Capture) -> None:
    write_own_task(here, "failing_bench_task", in_loss="raise ValueError('no such luck')")
    recipe = load_recipe([own_recipe("failing_bench_task")])
    (here / "own.yaml").write_text(recipe.to_yaml())
    assert run(["bench", "scaling", "own.yaml", "--launcher", "local", "--max-workers", "1", "--rounds", "1"]) == 1
    assert "no such luck" in capfd.readouterr().err


@two_cores
@pytest.mark.slow
def test_each_worker_of_a_pinned_run_has_a_core_of_its_own(train_here: Any, here: Path) -> None:
    note = "open(f'cores-{os.getpid()}', 'w').write(repr(sorted(os.sched_getaffinity(0))))"
    write_own_task(here, "pinned_bench_task", in_loss=note)
    pinned = {"cluster.workers": 2, "cluster.pin_cores": True}
    train_here(own_recipe("pinned_bench_task"), overrides=pinned, launcher="local")
    cores = [json.loads(file.read_text()) for file in here.glob("cores-*")]
    assert len(cores) == 2 and all(len(own) == 1 for own in cores) and cores[0] != cores[1]


@pytest.mark.slow
@two_cores
def test_two_workers_on_two_cores_are_at_least_90_percent_efficient() -> None:
    found: list[float] = []
    for _ in range(4):
        settings = Settings(max_workers=2, launcher="local", rounds=1)
        found.append(measure(load_recipe([COMPUTE_BOUND]), settings)["workers"][1]["efficiency"])
        if found[-1] >= 0.9:
            break
    assert max(found) >= 0.9, found


@pytest.mark.slow
@two_cores
def test_two_workers_on_ray_are_as_fast_as_hand_written_torchrun() -> None:
    found: list[float] = []
    for _ in range(4):
        settings = Settings(max_workers=2, launcher="ray", rounds=1, peer=True)
        found.append(measure(load_recipe([COMPUTE_BOUND]), settings)["peer"]["ratio"])
        if found[-1] >= 0.99:
            break
    assert max(found) >= 0.99, found
