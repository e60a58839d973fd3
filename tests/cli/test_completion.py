"""`shoal completion`: scripts for the shells, and what they really offer."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.checkpoint.section import CheckpointSection
from shoal.cli.completing import override_fields
from shoal.cli.main import run
from shoal.recipe.load import load_recipe, shipped_recipes
from tests.cli.test_main import COMMANDS
from tests.tiny import TINY

BIN = Path(sys.executable).parent
Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("shell", "says"),
    [
        ("bash", ("_SHOAL_COMPLETE=bash_complete", "complete -o nosort -F _shoal_completion shoal")),
        ("zsh", ("#compdef shoal", "_SHOAL_COMPLETE=zsh_complete", "compdef _shoal_completion shoal")),
        ("fish", ("_SHOAL_COMPLETE=fish_complete", "complete --no-files --command shoal")),
    ],
)
def test_a_script_is_printed_for_each_shell(shell: str, says: tuple[str, ...], capfd: Capture) -> None:
    assert run(["completion", shell]) == 0
    out, err = capfd.readouterr()
    assert err == "" and all(words in out for words in says), out
    if checker := shutil.which(shell):
        checked = subprocess.run([checker, "-n"], input=out, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


def offered_in_bash(folder: Path, *lines: str) -> list[list[str]]:
    """What bash offers after TAB at the end of each line, with the script that `shoal completion bash` printed."""
    script = ['eval "$(shoal completion bash)"', "compopt() { :; }  # bash has it only while a person presses TAB"]
    for line in lines:
        words = line.split(" ")  # the last one, perhaps empty, is being typed
        script.append(f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; COMPREPLY=()")
        script.append('_shoal_completion shoal; echo "${COMPREPLY[*]}"')
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    return [line.split() for line in ended.stdout.split("\n")[:-1]]


def test_bash_offers_commands_recipes_fields_and_runs(here: Path) -> None:
    for name in ("tiny-20260101-aaaa", "other-20260101-bbbb"):
        (here / "runs" / name).mkdir(parents=True)
        (here / "runs" / name / "recipe.yaml").write_text("")
    commands, recipes, fields, sections, runs, resumed, options = offered_in_bash(
        here,
        "shoal ",
        "shoal train ",
        "shoal train digits optim.l",
        "shoal train digits checkpoint.",
        "shoal runs show ti",
        "shoal train --resume ",
        "shoal train --re",
    )
    assert commands == list(COMMANDS)
    assert set(recipes) >= {*shipped_recipes(), "train.global_batch=", "optim.lr=", "model="}
    assert fields == ["optim.lr="]
    assert sections == [f"checkpoint.{name}=" for name in CheckpointSection.model_fields]
    assert runs == ["tiny-20260101-aaaa"]
    assert resumed == ["other-20260101-bbbb", "tiny-20260101-aaaa"]
    assert options == ["--resume"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_with_a_description(shell: str, here: Path) -> None:
    words = {"COMP_WORDS": "shoal train mn", "COMP_CWORD": "2" if shell == "zsh" else "mn"}
    environment = os.environ | words | {"_SHOAL_COMPLETE": f"{shell}_complete"}
    ended = subprocess.run([BIN / "shoal"], env=environment, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0
    assert "mnist" in ended.stdout and shipped_recipes()["mnist"] in ended.stdout
    assert "digits" not in ended.stdout


def test_every_field_that_is_offered_exists() -> None:
    tree = load_recipe([TINY], {"early_stop.metric": "val_loss"}).tree()
    for field in override_fields():
        here = tree
        for part in field.split("."):
            assert part in here, field
            here = here[part]
    assert {"task", "model", "data", "optim.lr", "train.steps", "cluster.workers"} <= set(override_fields())
