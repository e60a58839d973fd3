"""The measuring works; how fast the loaders are is not asserted here."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.commands import wait_until
from shoal.bench.data import measure
from shoal.bench.data_peers import PEERS_VENV, find_peers_python
from shoal.bench.data_side_by_side import FileSettings, file_table, measure_files, summed_up
from shoal.cli.main import run
from shoal.core.errors import RunError, UserError
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe
from tests.tiny import TINY, own_recipe

Capture = pytest.CaptureFixture[str]
SIDE_BY_SIDE = "shoal.bench.data_side_by_side"


def recipe(**overrides: Any) -> Recipe:
    return load_recipe([TINY], overrides).recipe


@pytest.mark.parametrize(
    ("overrides", "limit", "samples"), [({}, 60_000, 96), ({"data.workers": 1}, 60_000, 96), ({}, 50, 50)]
)
def test_both_loaders_are_measured(overrides: dict[str, Any], limit: int, samples: int) -> None:
    found = measure(recipe(**overrides), rounds=3, max_samples=limit)
    assert found["recipe"] == "tiny" and found["samples"] == samples and found["global_batch"] == 16
    assert found["shoal_samples_per_s"] > 0 and found["dataloader_samples_per_s"] > 0
    assert len(found["ratios"]) == 3 and found["ratio"] == sorted(found["ratios"])[1] > 0


def test_a_recipe_without_data_is_refused() -> None:
    with pytest.raises(UserError, match="data: is required"):
        measure(load_recipe([own_recipe("never_imported")]).recipe, rounds=1)


def test_data_that_is_read_item_by_item_is_refused(here: Path) -> None:
    (here / "items_of_bench_data.py").write_text("def build(): return {'train': [(0, 0)] * 8}\n")
    with pytest.raises(UserError, match=r"data.name: items_of_bench_data:build is read item by item"):
        measure(recipe(data="items_of_bench_data:build"), rounds=1)


def test_the_command_prints_a_table_and_writes_json_and_a_plot(here: Path, capfd: Capture) -> None:
    (here / "tiny.yaml").write_text(json.dumps(TINY))
    assert run(["bench", "data", "tiny.yaml", "--rounds", "1", "--out", "out"]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == ["shoal", "DataLoader", "ratio"]
    assert "samples/s" in out and "written to out/data-tiny-" in err
    assert sorted(path.suffix for path in (here / "out").iterdir()) == [".json", ".png"]
    assert run(["bench", "data", "tiny.yaml", "--rounds", "1", "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["samples"] == 96


def settings(files: str, folder: Path, **others: Any) -> FileSettings:
    """Files of a moment, read by two that are always there."""
    given: dict[str, Any] = {"only": "shoal_map,dataloader", "rounds": 1, "workers": 1, "samples": 24, "folder": folder}
    return FileSettings(files, **(given | others))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that the tests share, as `--dir` keeps them."""
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize(("files", "unit"), [("images", "samples/s"), ("tokens", "tokens/s")])
def test_contenders_read_the_same_samples_from_files(kept: Path, files: str, unit: str) -> None:
    said: list[str] = []
    found = measure_files(settings(files, kept), said.append)
    assert list(found["contenders"]) == ["shoal_map", "dataloader"] and found["unit"] == unit
    assert found["samples"] == 24 and found["workers"] == 1 and found["page_cache"] == "warm"
    for row in found["contenders"].values():
        assert row["rate"] > 0 and row["first_batch_s"] > 0 and len(row["rates"]) == 1
    ratio = found["ratios"]["shoal_map"]
    assert ratio["best_peer"] == "dataloader" and ratio["to_best_by_round"] == [ratio["to_each"]["dataloader"]]
    assert [line.split(":")[0] for line in said[1:]] == [
        "round 1 of 1, shoal_map",
        "round 1 of 1, dataloader",
    ]


@pytest.mark.slow
def test_shards_are_made_once_and_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    asked = settings("images", kept, only="shoal_stream")
    assert measure_files(asked, said.append)["ratios"] == {"shoal_stream": {"to_each": {}}}
    assert "preparing Shoal: tar shards" in said
    made = kept / "images-24" / "shoal_stream" / "train" / "index.json"
    written = made.stat().st_mtime_ns
    monkeypatch.setattr(f"{SIDE_BY_SIDE}.read_epoch", lambda bench, name: epoch(1.0, num_samples=24))
    measure_files(asked)
    assert made.stat().st_mtime_ns == written


def test_peers_that_are_not_installed_are_told(here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.data_peers._CHECKOUT", here)
    monkeypatch.setattr(f"{SIDE_BY_SIDE}.read_epoch", lambda bench, name: epoch(1.0, num_samples=4))
    command = ["bench", "data", "--files", "tokens", "--samples", "4", "--out", "out"]
    assert run([*command, "--only", "shoal_map,streaming,litdata", "--rounds", "2"]) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0].split() == ["contender", "tokens/s", "shoal_map", "to", "it", "first", "batch,", "s"]
    assert "not measured streaming: not installed; `make peers`" in out and "litdata: not installed" in out
    assert "page cache" in out and "shoal_map: all samples" in out and "written to out/data-tokens-" in err
    # An interpreter that is there, but has none of them.
    assert run([*command, "--only", "shoal_map,litdata", "--peers", sys.executable, "--json"]) == 0
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["not_measured"].keys() == {"litdata"}


def test_the_peers_interpreter_is_looked_for(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.bench.data_peers._CHECKOUT", here / "elsewhere")
    assert find_peers_python(None) is None
    python = here / PEERS_VENV
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_peers_python(None) == python
    assert find_peers_python(sys.executable) == Path(sys.executable)
    with pytest.raises(UserError, match=r"--peers: nothing/python is no program"):
        find_peers_python("nothing/python")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--files tokens --only dataloder", "did you mean dataloader?"),
        ("--files tokens --only shoal_stream", "'shoal_stream' does not read tokens here"),
        ("--files images mnist", "--files: makes its own data, and takes no recipe; leave out mnist"),
        ("--samples 3", "--samples: is for files; add --files images"),
    ],
)
def test_what_does_not_go_together_is_told(capfd: Capture, words: str, told: str) -> None:
    assert run(["bench", "data", *words.split()]) == 2
    assert told in capfd.readouterr().err


def epoch(seconds: float, **others: Any) -> dict[str, Any]:
    return {"num_samples": 100, "fingerprint": 7, "first_batch_s": 0.5, "epoch_s": seconds} | others


def test_ratios_are_taken_within_a_round_and_to_its_best_peer() -> None:
    found = {
        "shoal_map": [epoch(1.0), epoch(2.0), epoch(1.0)],
        "dataloader": [epoch(2.0), epoch(4.0), epoch(8.0)],
        "litdata": [epoch(4.0), epoch(2.0), epoch(2.0)],
    }
    summed = summed_up("images", found)
    assert summed["ratios"]["shoal_map"]["to_each"] == {"dataloader": 2.0, "litdata": 2.0}
    assert summed["ratios"]["shoal_map"]["to_best_by_round"] == [2.0, 1.0, 2.0]
    assert summed["ratios"]["shoal_map"]["to_best"] == 2.0 and summed["ratios"]["shoal_map"]["best_peer"] == "litdata"
    rows = file_table(summed)
    assert rows[0] == ["contender", "samples/s", "shoal_map to it", "first batch, s"]
    assert rows[1:] == [
        ["shoal_map", "100", "", "0.50"],
        ["dataloader", "25", "2.00", "0.50"],
        ["litdata", "50", "2.00", "0.50"],
    ]


@pytest.mark.parametrize("other", [{"num_samples": 99}, {"fingerprint": 8}])
def test_who_reads_other_samples_is_not_compared(
    kept: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, int]
) -> None:
    answers = {"shoal_map": epoch(1.0), "dataloader": epoch(1.0, **other)}
    monkeypatch.setattr(f"{SIDE_BY_SIDE}.read_epoch", lambda bench, name: answers[name])
    with pytest.raises(RunError, match=r"not everybody read each of the 100 samples once; .* dataloader: "):
        measure_files(settings("tokens", kept, samples=100))


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name leaves room for that of a socket."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_nothing_is_left_running(short: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "shoal.cli.main", "bench", "data", "--files", "tokens", "--only", "dataloader"]
    command += ["--samples", "20000", "--rounds", "1000", "--workers", "1"]
    environment = os.environ | {"TMPDIR": str(short)}
    bench = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    found = wait_until(lambda: mentioning(str(short)) or None, "a contender to run")
    bench.send_signal(number)
    bench.wait(timeout=60)
    assert bench.returncode in (143, 130, -signal.SIGKILL)
    assert found and wait_until(lambda: not mentioning(str(short)) or None, "all to end", 30)
    if number != signal.SIGKILL:
        assert not list(short.iterdir())


def mentioning(word: str) -> list[str]:
    """Processes, but for those that are gone and only not waited for, whose command names `word`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word in (line := path.read_bytes().replace(b"\0", b" ").decode(errors="replace")):
                found.append(line)
    return found
