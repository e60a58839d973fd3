"""Contenders are real processes that really train, the same on the same. How fast anybody is is not asserted here."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.bench import step_process
from shoal.bench.step import TRIVIAL
from shoal.bench.step_contenders import CONTENDERS, find_packages, why_not
from shoal.bench.step_peers import Settings, measure
from shoal.bench.step_sweep import MODELS, measure_all, recipes, short_texts
from shoal.bench.step_table import sweep_bars, sweep_table, table
from shoal.cli.main import run
from shoal.core.errors import RunError, UserError
from shoal.recipe.load import LoadedRecipe, load_recipe
from tests.fake_data import write_cifar_bin
from tests.tiny import own_recipe

Capture = pytest.CaptureFixture[str]
ON_CPU = {"cluster.gpus_per_worker": 0, "cluster.threads_per_worker": 1}


def trivial(**overrides: Any) -> LoadedRecipe:
    return load_recipe([TRIVIAL], {"data.samples": 40, **ON_CPU, **overrides})


def quick(*names: str, **settings: Any) -> Settings:
    return Settings(names=names, **{"rounds": 3, "steps": 4, "opening": 6, **settings})


def needs(*names: str) -> None:
    for name in names:
        if reason := why_not(CONTENDERS[name], find_packages()):
            pytest.skip(f"{name}: {reason}")


def same_losses(found: dict[str, Any]) -> None:
    rows = found["contenders"].values()
    assert len({row["num_losses"] for row in rows}) == 1
    for loss in ("first_loss", "last_loss"):
        values = [row[loss] for row in rows]
        assert max(values) - min(values) < 1e-5, {name: row[loss] for name, row in found["contenders"].items()}


@pytest.mark.parametrize(
    "overrides",
    [
        {},  # five steps an epoch: the opening goes on into the second
        {"data.samples": 44},  # the last step of an epoch is short
        {"train.precision": "fp16", "train.clip_norm": 0.5, "optim.name": "adamw"},
        {"train.micro_batch": 2, "train.clip_norm": 0.1, "optim.schedule": "cosine", "optim.warmup_steps": 9},
    ],
    ids=str,
)
def test_shoal_and_a_loop_by_hand_train_the_same_in_turns(overrides: dict[str, Any], here: Path) -> None:
    told: list[str] = []
    found = measure(trivial(**overrides), None, quick("plain", "shoal"), told.append)
    assert set(found["contenders"]) == {"plain", "shoal"} and found["not_measured"] == {} and found["notes"] == []
    assert (
        found["steps"] == 4
        and found["rounds"] == 3
        and found["unit"] == "samples/s"
        and found["parameters"] == 4 * 4 + 4 + 4 * 2 + 2
    )
    same_losses(found)
    for row in found["contenders"].values():
        assert len(row["step_ms_by_round"]) == 3 and 0 < row["step_ms"] < 1000 and row["cpu_ms"] > 0
        assert row["rate"] == pytest.approx(8e3 / row["step_ms"])
        assert row["peak_bytes"] > 1 << 20 and row["mfu"] is None and row["first_step_s"] > 0
        assert row["versions"]["torch"] == torch.__version__
    ratio = found["ratios"]["shoal"]
    assert ratio["best_peer"] == ratio["best_eager"] == "plain"
    assert ratio["to_best"]["least"] <= ratio["to_best"]["ratio"] <= ratio["to_best"]["most"]
    assert found["flops_per_step"] > 0
    assert [line.split(":")[0] for line in told[1:3]] == ["plain", "shoal"]
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("overrides", [{}, {"train.micro_batch": 4, "train.clip_norm": 0.1}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_lightning_and_accelerate_train_the_same_too(precision: str, overrides: dict[str, Any], here: Path) -> None:
    needs("lightning", "accelerate")
    schedule = {
        "optim.schedule": "linear",
        "optim.warmup_steps": 4,
        "optim.name": "adamw",
        "train.precision": precision,
    }
    names = ("plain", "lightning", "accelerate", "shoal")
    found = measure(trivial(**schedule, **overrides), None, quick(*names), lambda line: None)
    assert found["not_measured"] == {} and set(found["ratios"]["shoal"]["to_each"]) == set(names[:3])
    same_losses(found)
    assert found["contenders"]["lightning"]["versions"]["lightning"]
    assert found["contenders"]["accelerate"]["versions"]["accelerate"]


@pytest.mark.slow
def test_compiled_contenders_compile_once_and_keep_it_where_asked(here: Path) -> None:
    needs("lightning", "accelerate")
    names = ("plain_compiled", "lightning_compiled", "accelerate_compiled", "shoal")
    found = measure(trivial(), None, quick(*names, cache=here / "compiled"), lambda line: None)
    same_losses(found)
    for name in names[:3]:
        row = found["contenders"][name]
        assert row["compiles"] and row["compile_s"] > 0.5 and (here / "compiled" / name / "inductor").is_dir()
    assert found["ratios"]["shoal"]["best_compiled"] in names[:3] and "best_eager" not in found["ratios"]["shoal"]


def test_fast_settings_are_measured_beside_the_recipe(here: Path) -> None:
    fast = trivial(**{"train.precision": "bf16"})
    found = measure(trivial(), fast, quick("plain", "shoal", "shoal_fast"), lambda line: None)
    assert [row["precision"] for row in found["contenders"].values()] == ["fp32", "fp32", "bf16"]
    assert "to_shoal" in found["ratios"]["shoal_fast"] and "to_shoal" not in found["ratios"]["shoal"]
    assert found["notes"][-1].startswith("not all compute in the same precision")


@pytest.mark.parametrize("loader", [{"loader": "samples"}, {"loader": "batches", "loader_workers": 1}], ids=str)
def test_the_peers_loaders_hand_out_the_same_batches(loader: dict[str, Any], here: Path) -> None:
    found = measure(trivial(), None, quick("plain", "shoal", **loader), lambda line: None)
    same_losses(found)
    assert found["loader"] == loader["loader"]


def test_a_language_model_trains_on_made_up_tokens(here: Path) -> None:
    small = {"model.layers": 1, "model.heads": 2, "model.dim": 16, "data.context": 8, "data.vocab_size": 32}
    own = {"train.compile": False, "train.precision": "fp32", "train.global_batch": 4, "train.micro_batch": 2}
    loaded = load_recipe(["gpt2"], small | own | ON_CPU)
    found = measure(loaded, None, quick("plain", "shoal", made_data=True), lambda line: None)
    same_losses(found)
    assert found["unit"] == "tokens/s"
    assert found["contenders"]["shoal"]["rate"] == pytest.approx(
        4 * 8 / (found["contenders"]["shoal"]["step_ms"] / 1e3)
    )


def test_with_dropout_losses_are_compared_less_closely_and_that_is_said(here: Path) -> None:
    found = measure(trivial(**{"model.dropout": 0.2}), None, quick("plain", "shoal"), lambda line: None)
    assert any("dropout" in note for note in found["notes"])


def test_a_turn_lasts_as_long_as_is_asked_where_its_steps_are_not(here: Path) -> None:
    found = measure(trivial(), None, quick("plain", "shoal", steps=None, turn_s=0.05, rounds=1), lambda line: None)
    assert 10 < found["steps"] <= 2000


def test_it_begins_anew_as_often_as_is_asked(here: Path) -> None:
    told: list[str] = []
    found = measure(trivial(), None, quick("plain", "shoal", starts=2, rounds=2), told.append)
    assert [line for line in told if line.startswith("starting")] == ["starting plain, shoal"] * 2
    assert (
        len(found["contenders"]["plain"]["step_ms_by_round"])
        == 4
        == len(found["ratios"]["shoal"]["to_best"]["by_round"])
    )


@pytest.mark.slow
def test_a_worker_on_ray_trains_the_same(here: Path) -> None:
    found = measure(trivial(), None, quick("plain", "shoal", "shoal_ray"), lambda line: None)
    same_losses(found)
    assert "to_shoal" in found["ratios"]["shoal_ray"]


def test_a_peer_whose_package_is_missing_is_left_out_and_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.step_peers.find_packages", lambda: None)
    monkeypatch.setattr("shoal.bench.step_contenders._is_there", lambda name, packages: False)
    found = measure(trivial(), None, quick("plain", "lightning", "shoal"), lambda line: None)
    assert found["not_measured"] == {"lightning": "not installed; `make peers` installs it in a folder of its own"}
    assert set(found["contenders"]) == {"plain", "shoal"}


def test_a_peer_that_fails_is_left_out_and_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = here / "broken" / "pytorch_lightning"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise RuntimeError('made for another torch')\n")
    monkeypatch.setattr("shoal.bench.step_peers.find_packages", lambda: here / "broken")
    told: list[str] = []
    found = measure(trivial(), None, quick("plain", "lightning", "shoal"), told.append)
    assert found["not_measured"]["lightning"] == "failed: RuntimeError: made for another torch"
    assert any(line.startswith("lightning is left out: failed") for line in told)
    assert set(found["contenders"]) == {"plain", "shoal"}


def test_a_peer_that_dies_is_left_out(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = step_process.Running.ask

    def kill_first(self: step_process.Running, **command: Any) -> dict[str, Any]:
        if self.name == "plain" and "steps" in command:
            self._process.kill()
        return ask(self, **command)

    monkeypatch.setattr(step_process.Running, "ask", kill_first)
    found = measure(trivial(), None, quick("plain", "shoal"), lambda line: None)
    assert found["not_measured"]["plain"].startswith("has not gone on (status -9)")
    assert "to_best" not in found["ratios"]["shoal"]


def test_without_shoal_there_is_nothing_to_measure(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: step_process.Running) -> None:
        raise step_process.LeftOutError("has not started (status 1)")

    monkeypatch.setattr(step_process.Running, "wait_until_built", gone)
    with pytest.raises(RunError, match=r"shoal has not started \(status 1\)"):
        measure(trivial(), None, quick("plain", "shoal"), lambda line: None)


def test_contenders_that_train_differently_are_refused(here: Path) -> None:
    other = trivial(**{"train.seed": 1})
    with pytest.raises(RunError, match=r"not all contenders train the same.*shoal_fast began with other weights"):
        measure(trivial(), other, quick("plain", "shoal_fast"), lambda line: None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"cluster.workers": 2}, "--peers: compares one worker on one device, and cluster.workers is 2"),
        ({"parallel.strategy": "fsdp"}, "and parallel.strategy is fsdp; take auto"),
        ({"train.micro_batch": "auto"}, "train.micro_batch: auto is not known to the peers"),
    ],
)
def test_what_cannot_be_compared_is_refused(overrides: dict[str, Any], message: str, here: Path) -> None:
    with pytest.raises(UserError, match=message):
        measure(trivial(**overrides), None, quick("plain", "shoal"), lambda line: None)


def test_a_recipe_without_data_of_its_own_is_refused() -> None:
    with pytest.raises(UserError, match="bench step: needs the recipe's own data: and model:"):
        measure(load_recipe([own_recipe("never_imported")]), None, quick("plain", "shoal"), lambda line: None)


def test_data_whose_looks_are_not_known_are_not_made(here: Path) -> None:
    with pytest.raises(UserError, match="--made-data: it is not known what synthetic looks like"):
        measure(trivial(), None, quick("plain", "shoal", made_data=True), lambda line: None)


def test_the_models_of_the_sweep_are_small_and_trained_alike(here: Path) -> None:
    loaded = recipes(["cluster.gpus_per_worker=0", "train.global_batch=4"])
    assert [one.recipe.name for one in loaded] == list(MODELS)
    assert {one.recipe.train.global_batch for one in loaded} == {4}
    texts = short_texts(200)
    tokens, labels = texts["train"].batch(torch.arange(200).numpy(), 0)
    assert tokens.shape == (200, 32) and tokens.min() > 0 and set(labels.tolist()) <= set(range(10))


def test_the_sweep_measures_one_model_after_the_other(here: Path) -> None:
    loaded = recipes([f"{name}={value}" for name, value in ON_CPU.items()])
    chosen = [one for one in loaded if one.recipe.name in ("mlp", "lstm")]
    settings = quick("plain", "shoal", rounds=2, steps=1, opening=2)
    found = measure_all(chosen, [None, None], settings, lambda line: None)
    assert list(found["models"]) == ["mlp", "lstm"]
    lines = sweep_table(found)
    assert [line[:2] for line in lines[1:]] == [["mlp", "shoal"], ["lstm", "shoal"]]
    assert set(sweep_bars(found)) == {"mlp, shoal", "lstm, shoal"}


def test_the_command_sweeps(here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.step_sweep.MODELS", {"mlp": MODELS["mlp"]})
    small = ["train.global_batch=4", "--fast", "train.precision=bf16", "--loss-after", "2"]
    names = ["--only", "plain,shoal,shoal_fast"]
    assert run(["bench", "step", "--peers", "--sweep", *ARGUMENTS[5:], *small, *names]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["mlp", "shoal"], ["mlp", "shoal_fast"]]
    assert "mlp: not all compute in the same precision" in out and "written to bench/step-peers-sweep-" in err


ARGUMENTS = "bench step --peers --only plain,shoal --steps 3 --rounds 2 cluster.gpus_per_worker=0".split()


def test_the_command_prints_a_table_and_writes_json_and_a_plot(here: Path, capfd: Capture) -> None:
    assert run([*ARGUMENTS, "--loss-after", "7"]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0].split()[:4] == ["contender", "ms", "a", "step"] and [line.split()[0] for line in lines[1:3]] == [
        "plain",
        "shoal",
    ]
    assert any(line.startswith("ratio") and "shoal to plain, the best peer" in line for line in lines)
    assert any("the mean of steps up to the 7th, the last 7; difference: to plain" in line for line in lines)
    assert "round 2 of 2" in err and "written to bench/step-peers-trivial-" in err
    (kept,) = (here / "bench").glob("*.json")
    found = json.loads(kept.read_text())
    assert found["opening"] == 7 and found["fast"] == [] and table(found)[0][0] == "contender"
    assert len(list((here / "bench").glob("*.png"))) == 1


def test_with_json_the_result_is_the_one_line_on_stdout(here: Path, capfd: Capture) -> None:
    assert run([*ARGUMENTS, "--json"]) == 0
    out, _ = capfd.readouterr()
    (line,) = out.splitlines()
    assert set(json.loads(line)["contenders"]) == {"plain", "shoal"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep"], "--sweep: is for --peers; add that"),
        (["--only", "plain"], "--only: is for --peers"),
        (["--loader-workers", "0"], "--loader-workers: is for --peers"),
        (
            ["--peers", "--only", "plane"],
            "--only: 'plane' is not measured here; allowed: accelerate, accelerate_compiled",
        ),
        (["--peers", "--only", "shoal_fast"], "--only: shoal_fast is measured with --fast KEY=VALUE; add that"),
        (
            ["--peers", "--only", "plain", "--launcher", "ray"],
            "--only: leaves out shoal_ray, which --launcher",
        ),
        (["--peers", "--fast", "mnist"], "--fast: 'mnist' should be KEY=VALUE"),
        (["--peers", "--sweep", "mnist"], "--sweep: measures models of its own, and takes no recipe"),
        (["--peers", "--sweep", "--made-data"], "--made-data: the data of --sweep is made up anyway"),
        (["--peers", "--fast", "train.presicion=bf16"], "train.presicion"),
    ],
)
def test_options_that_make_no_sense_together_are_refused(
    arguments: list[str], message: str, here: Path, capfd: Capture
) -> None:
    assert run(["bench", "step", *arguments]) == 2
    assert message in capfd.readouterr().err
    assert list(here.iterdir()) == []


def test_samples_are_for_data_in_memory_that_stays_the_same(here: Path, capfd: Capture) -> None:
    augmented = ["data=cifar10", f"data.dir={here}", "--loader", "samples"]
    write_cifar_bin(here)
    assert run([*ARGUMENTS, *augmented]) == 2
    assert "--loader: samples takes data that is the same in every batch" in capfd.readouterr().err


def test_a_contender_ends_with_whoever_measures(here: Path) -> None:
    job = {"recipe": trivial().tree(), "loader": "batches", "loader_workers": 0, "packages": None, "contenders": 1}
    with step_process.running("plain", job | {"counts_flops": False}, None) as one:
        one.wait_until_built()
        process: subprocess.Popen[bytes] = one._process
        assert process.poll() is None
    assert process.poll() == 0
