"""`shoal checkpoints`: what is saved of a run, whether it is whole, the weights alone, and what need not be kept."""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from safetensors.torch import load_file

from shoal.checkpoint.folder import being_read, list_checkpoints, read_info
from shoal.cli.main import run
from shoal.core.weights import weights_sha256
from tests.tiny import tiny_run

Capture = pytest.CaptureFixture[str]
STEPS = (6, 9, 12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    tiny_run(folder / "runs" / "tiny-[red]", {"checkpoint.every_steps": 3, "checkpoint.keep_last": 3})
    return folder


def everything(folder: Path = Path("runs")) -> dict[str, tuple[int, str]]:
    """Every file with its time of change and its content, and every folder."""
    return {
        str(path): (path.stat().st_mtime_ns, hashlib.md5(path.read_bytes()).hexdigest() if path.is_file() else "")
        for path in sorted(folder.rglob("*"))
    }


def flip_a_bit(file: Path, position: int = 100) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 4
    file.write_bytes(content)


def in_json(capfd: Capture) -> dict[str, Any]:
    """The last line on stdout, which must be the only one."""
    (line,) = capfd.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture
def copy(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(trained / "runs", "runs")) / "tiny-[red]" / "checkpoints"


def test_checkpoints_are_listed_oldest_first(copy: Path, capfd: Capture) -> None:
    assert run(["checkpoints", "list", "tiny"]) == 0
    out, err = capfd.readouterr()
    header, *rows = out.splitlines()
    assert header.split() == ["step", "epoch", "size", "workers", "strategy", "metrics", "saved", "path"] and err == ""
    assert [row.split()[4:6] for row in rows] == [["1", "single"]] * 3
    assert [row.split()[:2] for row in rows] == [["6", "1"], ["9", "1"], ["12", "2"]]
    assert ["val_accuracy" in row and "val_loss" in row for row in rows] == [True, False, True]
    for row, step in zip(rows, (6, 9, 12), strict=True):
        assert row.rstrip().endswith(f" ago  runs/tiny-[red]/checkpoints/step-{step:08d}")


def test_checkpoints_are_listed_as_one_json_object_each(copy: Path, capfd: Capture) -> None:
    assert run(["checkpoints", "list", "tiny", "--json"]) == 0
    out, err = capfd.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["step"] for row in rows] == [6, 9, 12] and err == ""
    final = json.loads(Path("runs/tiny-[red]/summary.json").read_text())["metrics"]
    assert rows[-1]["metrics"] == {name: final[name] for name in ("val_loss", "val_accuracy")}
    for row in rows:
        files = [file for file in Path(row["path"]).iterdir() if file.name != "manifest.json"]
        assert row["bytes"] == sum(file.stat().st_size for file in files)
        assert 0 <= time.time() - row["time"] < 600


def test_what_is_not_whole_is_not_listed(copy: Path, capfd: Capture) -> None:
    (copy / "step-00000009" / "manifest.json").write_text('{"step": 9, "ep')
    (copy / "step-00000006" / "manifest.json").unlink()
    (copy / ".writing-step-00000015-77").mkdir()
    (copy / "step-00000099").write_text("a file")
    assert run(["checkpoints", "list", "tiny", "--json"]) == 0
    assert [json.loads(line)["step"] for line in capfd.readouterr().out.splitlines()] == [12]


def test_a_run_without_checkpoints_is_told_so(copy: Path, capfd: Capture) -> None:
    shutil.rmtree(copy)
    assert run(["checkpoints", "list", "tiny"]) == 0
    out, err = capfd.readouterr()
    assert out == "" and err == "no checkpoints in runs/tiny-[red]/checkpoints\n"
    assert run(["checkpoints", "list", "tiny", "--json"]) == 0
    assert capfd.readouterr() == ("", "")


# verify


def test_verify_tells_of_each_that_it_is_whole_and_changes_nothing(copy: Path, capfd: Capture) -> None:
    before = everything()
    assert run(["checkpoints", "verify", "tiny"]) == 0
    out, err = capfd.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [["step", str(step)] for step in STEPS] and err == ""
    assert all(line.endswith("GB/s  whole") for line in out.splitlines())
    assert run(["checkpoints", "verify", "tiny", "--json"]) == 0
    found = in_json(capfd)
    assert [row["step"] for row in found["checkpoints"]] == [6, 9, 12] and found["whole"] == 3 and found["corrupt"] == 0
    for row in found["checkpoints"]:
        files = [file for file in Path(row["path"]).iterdir() if file.name != "manifest.json"]
        assert row["bytes"] == sum(file.stat().st_size for file in files) and row["gb_per_s"] > 0
    assert everything() == before


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "manifest.json", "recipe.yaml"])
def test_verify_finds_a_flipped_bit_and_touches_nothing(copy: Path, capfd: Capture, name: str) -> None:
    flip_a_bit(copy / "step-00000009" / name)
    before = everything()
    assert run(["checkpoints", "verify", "tiny"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert [" whole" in line for line in lines] == [True, False, True]
    assert f"corrupt: {name} " in lines[1]
    assert run(["checkpoints", "verify", "tiny", "--step", "9", "--json"]) == 1
    found = in_json(capfd)
    assert found["corrupt"] == 1 and found["checkpoints"][0]["reason"].startswith(name)
    for whole in ("6", "12"):
        assert run(["checkpoints", "verify", "tiny", "--step", whole]) == 0
    assert run(["checkpoints", "verify", str(copy / "step-00000009")]) == 1
    assert everything() == before


def test_verify_shows_what_list_leaves_out(copy: Path, capfd: Capture) -> None:
    (copy / "step-00000006" / "manifest.json").unlink()
    (copy / "step-00000099").write_text("a file")
    (copy / ".writing-step-00000015-77").mkdir()
    assert run(["checkpoints", "verify", "tiny"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["6", "9", "12", "99"]
    assert [line.endswith("corrupt: manifest.json is missing") for line in lines] == [True, False, False, True]


def test_verify_finds_a_part_of_a_tensor_that_is_in_no_file(copy: Path, capfd: Capture) -> None:
    """Two workers' parts, of which a manifest vouches for one."""
    info = read_info(copy / "step-00000012")
    fields = json.loads(info.path.joinpath("shard-00000.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    name = next(name for name in fields if name != "__metadata__")
    places = json.dumps(
        {name: {"shape": [10_000, *fields[name]["shape"][1:]], "offset": [0] * len(fields[name]["shape"])}}
    )
    rewrite_header(info.path, {"format": "pt", "shoal.places": places})
    assert run(["checkpoints", "verify", "tiny", "--step", "12"]) == 1
    assert f"corrupt: {name} is not whole" in capfd.readouterr().out


def rewrite_header(path: Path, metadata: dict[str, str]) -> None:
    """Another header in a shard, and a manifest that vouches for it."""
    from dataclasses import replace

    import xxhash

    from shoal.checkpoint.manifest import FileFacts

    file, manifest = path / "shard-00000.safetensors", read_info(path).manifest
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]) | {"__metadata__": metadata}).encode()
    content = len(header).to_bytes(8, "little") + header + content[8 + size :]
    file.write_bytes(content)
    facts = FileFacts(len(content), xxhash.xxh3_128_hexdigest(content))
    (path / "manifest.json").write_bytes(replace(manifest, files={**manifest.files, file.name: facts}).to_bytes())


# export


def test_export_is_loaded_where_there_is_no_shoal(copy: Path, tmp_path: Path, capfd: Capture) -> None:
    summary = json.loads((copy.parent / "summary.json").read_text())
    for number, options in enumerate(([], ["-o", "out"], ["--max-shard-size", "300B"])):
        assert run(["checkpoints", "export", "tiny", "--json", *options]) == 0
        done = in_json(capfd)
        assert done["step"] == 12 and done["tensors"] == 4 and len(done["files"]) == (1, 1, 3)[number]
        code = (
            "import sys, runpy; sys.modules['shoal'] = None\n"
            "from safetensors.torch import save_file\n"
            f"found = runpy.run_path({done['loader']!r})\n"
            f"save_file(found['weights'](), 'copy-{number}')\n"
            f"runpy.run_path({done['loader']!r}, run_name='__main__')\n"
        )
        shown = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        assert sorted(line.split()[0] for line in shown.splitlines()) == sorted(load_file(f"copy-{number}"))
        assert weights_sha256(load_file(f"copy-{number}")) == summary["weights_sha256"]


def test_export_shows_the_lines_that_load_it(copy: Path, capfd: Capture) -> None:
    assert run(["checkpoints", "export", "tiny"]) == 0
    out, err = capfd.readouterr()
    assert out.endswith(Path("tiny-[red]-step-12.load.py").read_text()) and err == ""
    assert out.startswith("step 12: 4 tensors, 0.7 kB, in tiny-[red]-step-12.safetensors\n")


def test_export_takes_the_step_the_best_or_a_folder(copy: Path, capfd: Capture) -> None:
    recipe = copy.parent / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("metric: null", "metric: val_loss"))
    metrics = {step: read_info(copy / f"step-{step:08d}").metrics for step in STEPS}
    best = min((6, 12), key=lambda step: metrics[step]["val_loss"])
    for number, (arguments, step) in enumerate(
        [(["tiny", "--step", "9"], 9), (["tiny", "--best"], best), ([str(copy / "step-00000006")], 6), (["tiny"], 12)]
    ):
        assert run(["checkpoints", "export", *arguments, "--json", "-o", f"{number}.safetensors"]) == 0
        done = in_json(capfd)
        assert (done["run"], done["step"]) == ("tiny-[red]", step)
    recipe.write_text(recipe.read_text().replace("mode: auto", "mode: max"))
    assert run(["checkpoints", "export", "tiny", "--best", "--json"]) == 0
    assert in_json(capfd)["step"] == 18 - best


def test_export_refuses_what_is_corrupt_and_names_a_whole_one(copy: Path, capfd: Capture) -> None:
    flip_a_bit(copy / "step-00000012" / "state.json")
    flip_a_bit(copy / "step-00000009" / "manifest.json")
    before = everything(Path())
    assert run(["checkpoints", "export", "tiny"]) == 2
    err = capfd.readouterr().err
    assert "step-00000012 is corrupt: state.json has changed" in err
    assert "the nearest older one that is whole is step 6" in err
    assert everything(Path()) == before
    assert run(["checkpoints", "export", "tiny", "--step", "6"]) == 0


# prune


def test_prune_keeps_what_the_recipe_says_unless_told_otherwise(copy: Path, capfd: Capture) -> None:
    before = everything()
    assert run(["checkpoints", "prune", "tiny"]) == 0
    assert capfd.readouterr().out == "0.0 kB freed; kept: 6, 9, 12\n"
    size = sum(file.stat().st_size for step in ("06", "09") for file in (copy / f"step-000000{step}").iterdir())
    for options in (["--dry-run"], ["--dry-run", "--json"]):
        assert run(["checkpoints", "prune", "tiny", "--keep-last", "1", *options]) == 0
        out = capfd.readouterr().out
    assert json.loads(out)["bytes"] == size and len(json.loads(out)["deleted"]) == 2 and everything() == before
    assert run(["checkpoints", "prune", "tiny", "--keep-last", "1"]) == 0
    *deleted, last = capfd.readouterr().out.splitlines()
    assert [line.split()[:2] for line in deleted] == [["deleted", str(copy / f"step-000000{n}")] for n in ("06", "09")]
    assert last == f"{size / 1e3:,.1f} kB freed; kept: 12"
    assert [path.name for path in copy.iterdir()] == ["step-00000012"]


def test_prune_keeps_the_best(copy: Path, capfd: Capture) -> None:
    recipe = copy.parent / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("metric: null", "metric: val_loss").replace("mode: auto", "mode: max"))
    losses = {step: read_info(copy / f"step-{step:08d}").metrics.get("val_loss", 0.0) for step in STEPS}
    assert run(["checkpoints", "prune", "tiny", "--keep-last", "1", "--keep-best", "1", "--json"]) == 0
    assert in_json(capfd)["kept"] == sorted({12, max(STEPS, key=lambda step: losses[step])})


@pytest.mark.parametrize("name", ["shard-00000.safetensors", "manifest.json"])
def test_prune_deletes_no_older_one_unless_the_newest_is_whole(copy: Path, capfd: Capture, name: str) -> None:
    flip_a_bit(copy / "step-00000012" / name)
    before = everything(copy)
    for options in (["--dry-run"], []):
        assert run(["checkpoints", "prune", "tiny", "--keep-last", "1", *options]) == 1
        out = capfd.readouterr().out
        assert f"deleted no checkpoint: step 12, the newest, is corrupt: {name}" in out
        assert everything(copy) == before


def test_prune_deletes_the_damaged_newest_if_told_and_another_is_whole(copy: Path, capfd: Capture) -> None:
    flip_a_bit(copy / "step-00000012" / "shard-00000.safetensors")
    assert run(["checkpoints", "prune", "tiny", "--keep-last", "1", "--corrupt"]) == 0
    assert not (copy / "step-00000012").exists() and [info.step for info in list_checkpoints(copy)] == [9]
    for path in copy.glob("step-*/manifest.json"):
        path.unlink()
    assert run(["checkpoints", "prune", "tiny", "--corrupt"]) == 1
    assert "deleted no checkpoint: step 9, the newest, is corrupt: manifest.json is missing" in capfd.readouterr().out


def test_prune_leaves_what_is_being_read(copy: Path, capfd: Capture) -> None:
    with being_read(read_info(copy / "step-00000006")):
        assert run(["checkpoints", "prune", "tiny", "--keep-last", "1"]) == 0
    assert "left step 6: it is being read" in capfd.readouterr().out
    assert sorted(path.name for path in copy.iterdir()) == ["step-00000006", "step-00000012"]


def test_prune_removes_leftovers_and_what_is_corrupt_only_if_told(copy: Path, capfd: Capture) -> None:
    for name in (
        ".writing-step-00000015-ab",
        ".deleting-step-00000003",
        ".replaced-step-00000012",
        "corrupt-step-00000007-1",
    ):
        (copy / name).mkdir()
        (copy / name / "x").write_bytes(bytes(1000))
    (copy / "step-00000009").rename(copy / ".replaced-step-00000009")
    before = everything()
    assert run(["checkpoints", "prune", "tiny", "--dry-run", "--corrupt", "--json"]) == 0
    assert in_json(capfd)["bytes"] == 4000 and everything() == before
    assert run(["checkpoints", "prune", "tiny", "--json"]) == 0
    done = in_json(capfd)
    assert done["bytes"] == 3000 and done["kept"] == [6, 9, 12]
    left = ["corrupt-step-00000007-1", "step-00000006", "step-00000009", "step-00000012"]
    assert sorted(path.name for path in copy.iterdir()) == left
    assert run(["checkpoints", "prune", "tiny", "--corrupt", "--json"]) == 0
    assert in_json(capfd)["bytes"] == 1000 and sorted(path.name for path in copy.iterdir()) == left[1:]


def test_prune_keeps_off_a_run_that_is_being_trained(copy: Path, capfd: Capture) -> None:
    with FileLock(copy.parent / ".lock"):
        before = everything()
        for options in ([], ["--dry-run"]):
            assert run(["checkpoints", "prune", "tiny", "--keep-last", "1", *options]) == 2
            assert "is being trained, and deletes old checkpoints itself; stop it first" in capfd.readouterr().err
        assert everything() == before


# fmt: off
WRONG = [
    ("verify nope", "run 'nope': not found"),
    ("verify tiny --step 7", "--step: there is no checkpoint of step 7; there are: 6, 9, 12"),
    ("verify tiny --step x", "--step"),
    ("verify empty", "run 'empty': there are no checkpoints in runs/empty/checkpoints"),
    ("verify {copy}/step-00000009 --step 9", "--step: "),
    ("export nope", "run 'nope': not found"),
    ("export empty", "there are no checkpoints"),
    ("export tiny --step 7", "there are: 6, 9, 12"),
    ("export tiny --best", "--best: the run's recipe has no checkpoint.metric to go by; give --step N"),
    ("export tiny --best --step 9", "--best: names a checkpoint, and so does --step"),
    ("export {copy}/step-00000009 --best", "this is a checkpoint, not a run; its run is"),
    ("export tiny --max-shard-size 5XB", "--max-shard-size: '5XB' is not a size; give one such as 5GB"),
    ("export tiny --max-shard-size 0", "--max-shard-size"),
    ("export tiny --max-shard-size GB", "--max-shard-size"),
    ("export tiny --dtype int8", "--dtype"),
    ("export tiny -o here.txt", "-o: here.txt exists"),
    ("export tiny -o runs --force", "-o: runs holds more than an export"),
    ("export tiny -o a/b/c", "-o: the folder a/b does not exist; make it first"),
    ("export tiny -o x.safetensors --max-shard-size 10B", "-o: x.safetensors is one file"),
    ("prune nope", "run 'nope': not found"),
    ("prune tiny --keep-last 0", "--keep-last"),
    ("prune tiny --keep-best 1", "--keep-best: the run's recipe has no checkpoint.metric"),
    ("prune {copy}/step-00000009", "this is a checkpoint, not a run; its run is"),
    ("list {copy}/step-00000009", "this is a checkpoint, not a run; its run is"),
]
# fmt: on


@pytest.mark.parametrize(("arguments", "says"), WRONG, ids=[arguments for arguments, _ in WRONG])
def test_wrong_input_is_told_and_changes_nothing(copy: Path, capfd: Capture, arguments: str, says: str) -> None:
    Path("runs/empty").mkdir()
    shutil.copy(copy.parent / "recipe.yaml", "runs/empty/recipe.yaml")
    Path("here.txt").write_text("mine")
    before = everything(Path())
    assert run(["checkpoints", *arguments.format(copy=copy).split()]) == 2
    out, err = capfd.readouterr()
    assert says in err and "Traceback" not in err and out == ""
    assert everything(Path()) == before


@pytest.mark.parametrize("wrong", ["[3]", "${env:NOT_SET_AT_ALL}"])
def test_a_recipe_that_cannot_be_read_is_told(copy: Path, capfd: Capture, wrong: str) -> None:
    (copy.parent / "recipe.yaml").write_text(f"checkpoint:\n  keep_last: {wrong}\n")
    assert run(["checkpoints", "prune", "tiny", "--dry-run"]) == 2
    assert "checkpoint" in capfd.readouterr().err
