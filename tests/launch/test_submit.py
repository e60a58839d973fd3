"""Sending a run as a Ray job, as far as it goes without a cluster: tests/cli/test_submit.py has one."""

import itertools
import shlex
import sys
import time
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import RunError, UserError
from shoal.launch import submit
from shoal.launch.dashboard import check_address, client_of
from shoal.launch.parcel import RECIPE_FILE, pack
from shoal.launch.run import prepare
from shoal.launch.submit import State, is_chatter, make_job, offers_to_lead, status_of, summary_in
from shoal.recipe.load import load_recipe
from tests.tiny import TINY, tiny_run

# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("given_address", "used"),
    [
        ("http://head:8265", "http://head:8265"),
        ("http://head:8265/", "http://head:8265"),
        ("https://ray.example.org", "https://ray.example.org"),
        ("https://example.org/ray/", "https://example.org/ray"),
        ("http://[::1]:8265", "http://[::1]:8265"),
    ],
)
def test_an_address_of_a_dashboard_is_taken(given_address: str, used: str) -> None:
    assert check_address(given_address) == used


@pytest.mark.parametrize(
    "address", [None, "", "auto", "head:8265", "ray://head:10001", "http://", "http://head:x", "http://head:99999"]
)
def test_other_addresses_are_refused_with_what_they_should_be(address: str | None) -> None:
    with pytest.raises(UserError, match=r"^--address: .*http://HEAD:8265"):
        check_address(address)


@pytest.mark.parametrize("package", ["requests", "aiohttp", "ray"])
def test_a_package_that_is_missing_is_named(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"^shoal submit: needs {package}: pip install 'ray\[default\]'"):
        client_of("http://127.0.0.1:1")


# ---------------------------------------------------------------- the job


def test_a_job_trains_the_checked_recipe_in_an_absolute_folder(here: Path) -> None:
    prepared = prepare([TINY], ["train.steps=5"], run_dir="my runs/one")
    job = make_job(prepared, ["train.steps=5"], "tiny-1")
    words = shlex.split(job.command)
    assert words[:4] == ["python", "-m", "shoal.cli.main", "train"]
    assert words[4:] == [RECIPE_FILE, "--run-dir", str(here / "my runs/one"), "--address", "auto", "--json"]
    assert (job.job_id, job.run_dir, job.environment) == ("tiny-1", here / "my runs/one", {})
    (here / "sent.yaml").write_text(job.recipe or "")
    assert load_recipe([here / "sent.yaml"]) == prepared.loaded and prepared.loaded.recipe.train.steps == 5


def test_a_job_that_resumes_takes_the_recipe_from_the_folder_and_may_wait(here: Path) -> None:
    tiny_run(here / "runs" / "tiny-1")
    overrides = ["train.steps=20", "model.hidden=[8]"]
    job = make_job(prepare([], overrides, resume="tiny-1"), overrides, "tiny-2", cluster_s=90)
    assert shlex.split(job.command)[4:] == [
        *("--resume", str(here / "runs/tiny-1"), *overrides, "--wait", "90", "--address", "auto", "--json")
    ]
    assert job.recipe is None and job.run_dir == here / "runs/tiny-1"


def test_of_the_environment_only_what_the_recipe_refers_to_is_sent(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_FOLDER", "/secret/folder")
    monkeypatch.setenv("MY_OTHER", "another-secret")
    (here / ".env").write_text("MY_RATE=0.125\nMY_REST=third-secret\n")
    recipe = TINY | {"data": {"name": "mnist", "dir": "${env:MY_FOLDER}/x"}, "optim": {"lr": "${env:MY_RATE}"}}
    job = make_job(prepare([recipe]), [], "tiny-1")
    assert job.environment == {"MY_FOLDER": "/secret/folder", "MY_RATE": "0.125"}
    assert job.recipe is not None and "${env:MY_FOLDER}/x" in job.recipe and "${env:MY_RATE}" in job.recipe
    assert "secret" not in f"{job.recipe} {job.command} {job!r}"


@pytest.mark.parametrize(
    ("status", "exit_code", "expected"),
    [
        ("succeeded", 0, 0),
        ("failed", 1, 1),
        ("failed", 2, 1),
        ("failed", None, 1),
        ("failed", -9, 1),
        ("failed", 130, 130),
        ("stopped", None, 130),
    ],
)
def test_the_exit_status_tells_how_the_job_ended(status: str, exit_code: int | None, expected: int) -> None:
    state = State("job", status, exit_code, "", None)
    assert state.is_over and status_of(state) == expected


@pytest.mark.parametrize("status", ["pending", "running"])
def test_a_job_that_goes_on_is_not_over(status: str) -> None:
    assert not State("job", status, None, "", None).is_over


# ---------------------------------------------------------------- what is sent


def sent(folder: Path, tmp_path: Path, recipe: str | None = "name: x\n") -> tuple[set[str], list[str]]:
    left_out = pack(tmp_path / "job.zip", recipe, folder)
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        return set(archive.namelist()), left_out


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_code_is_sent_and_what_is_none_stays(tmp_path: Path) -> None:
    code = tmp_path / "code"
    write(code, "task.py", "pack/__init__.py", "pack/runs/deep.py", "pack/.env", ".env", "runs/one/recipe.yaml")
    write(code, ".git/config", ".venv/bin/python", "pack/__pycache__/x.pyc", RECIPE_FILE)
    (code / "broken").symlink_to("nowhere")
    (code / "linked.py").symlink_to("task.py")
    names, left_out = sent(code, tmp_path)
    assert names == {RECIPE_FILE, "task.py", "pack/__init__.py", "pack/runs/deep.py", "linked.py"}
    assert left_out == []
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        assert archive.read(RECIPE_FILE) == b"name: x\n", "not the one that lay there"
        assert archive.read("linked.py") == b"task.py"


def test_large_files_and_linked_folders_stay_and_are_named(tmp_path: Path) -> None:
    code = tmp_path / "code"
    write(code, "task.py", "data/small.bin")
    with (code / "data" / "train.bin").open("w") as file:
        file.truncate(26 << 20)
    (code / "more").symlink_to(code / "data")
    names, left_out = sent(code, tmp_path)
    assert names == {RECIPE_FILE, "task.py", "data/small.bin"}
    assert left_out == ["more (a link to a folder)", "data/train.bin (26 MiB, and files above 25 MiB stay)"]


def test_too_much_is_refused(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for number in range(5):
        with (code / f"{number}.bin").open("w") as file:
            file.truncate(24 << 20)
    with pytest.raises(UserError, match=r"^--working-dir: .* holds more than 100 MiB to send"):
        sent(code, tmp_path)


# ---------------------------------------------------------------- logs


@given(st.text(alphabet="ab\n", max_size=40), st.lists(st.integers(0, 40)), st.integers(0, 40))
def test_a_log_that_comes_in_pieces_and_is_cut_off_is_seen_whole_and_once(
    text: str, places: list[int], cut: int
) -> None:
    seen: list[str] = []
    before = submit._Lines(seen.append, skip=0)
    before.add(text[:cut])
    again = submit._Lines(seen.append, skip=before.seen)
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    for start, end in itertools.pairwise(bounds):
        again.add(text[start:end])
    again.end()
    lines = text.split("\n")
    assert seen == (lines if lines[-1] else lines[:-1])


@pytest.mark.parametrize(
    ("line", "is_summary"),
    [
        ('{"run": "x", "run_dir": "/x", "status": "done", "step": 3}', True),
        ('{"run": "x", "run_dir": "/x", "status": "failed", "error": "y"}', True),
        ('{"step": 3}', False),
        ('{"run": "x", "run_dir"', False),
        ("{x}", False),
        ("", False),
        ('[rank 0] {"run": "x", "run_dir": "/x", "status": "done"}', False),
    ],
)
def test_the_summary_is_known_among_the_lines(line: str, is_summary: bool) -> None:
    assert (summary_in(line) is not None) is is_summary


def test_what_ray_says_of_itself_is_known_among_the_lines() -> None:
    assert is_chatter("2026-11-15 07:40:00,000\tINFO job_manager.py:568 -- Runtime env is setting up.")
    assert is_chatter("Running entrypoint for job x: python -m shoal.cli.main train")
    assert not is_chatter("step 3/10  train_loss 1.0")


def test_a_head_that_stays_away_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "_LOST_S", 0.2)
    patience = submit._Patience("job-1", "http://head:8265")
    patience.unanswered(OSError("refused"))
    time.sleep(0.3)
    patience.answered()
    patience.unanswered(OSError("refused"))
    time.sleep(0.3)
    with pytest.raises(RunError, match=r"job job-1: http://head:8265 has not answered .* the job may go on"):
        patience.unanswered(OSError("refused"))


def test_a_job_is_led_where_a_machine_offers_to_that_is_up() -> None:
    def told(*raylets: object) -> dict[str, object]:
        return {"data": {"summary": [{"raylet": raylet} for raylet in raylets]}}

    plain = {"state": "ALIVE", "resourcesTotal": {"CPU": 1.0}}
    offering = {"state": "ALIVE", "resourcesTotal": {"CPU": 1.0, "drivers": 1000.0}}
    assert not offers_to_lead(told(plain, offering | {"state": "DEAD"}))
    assert offers_to_lead(told(plain, offering))
    assert not offers_to_lead(told({}, None)) and not offers_to_lead({}) and not offers_to_lead({"data": None})
