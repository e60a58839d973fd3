"""Where compiled code is kept: a folder that stays, unless the user has said another or it cannot be used."""

import os
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

from shoal.core.compile_cache import VARIABLE, fallback_problem, kept_compiled, own_place


def test_it_is_in_the_users_cache_and_of_this_version_of_pytorch(tmp_path: Path) -> None:
    place = own_place({"XDG_CACHE_HOME": str(tmp_path)})
    assert place.problem == "" and place.folder.parent == tmp_path / "shoal" / "compile"
    assert f"torch-{torch.__version__}" in place.folder.name
    assert own_place({"XDG_CACHE_HOME": str(tmp_path)}) == place, "the same in every process"
    assert list(tmp_path.iterdir()) == [], "nothing is made before something is compiled"
    assert own_place({}).folder.is_relative_to(Path.home() / ".cache")


def test_pytorch_is_told_and_the_process_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kept_compiled():
        assert cache_dir() == os.environ[VARIABLE] == str(own_place().folder)
        assert fallback_problem() == ""
    assert VARIABLE not in os.environ


def test_a_place_that_pytorch_has_chosen_when_it_was_loaded_is_nobodys_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, default_cache_dir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with kept_compiled():
        assert os.environ[VARIABLE] == str(own_place().folder)
    assert os.environ[VARIABLE] == default_cache_dir()


def test_where_the_user_has_said_a_place_that_is_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    with kept_compiled():
        assert os.environ[VARIABLE] == str(tmp_path / "mine")
    assert os.environ[VARIABLE] == str(tmp_path / "mine")
    assert fallback_problem({VARIABLE: "/mine", "XDG_CACHE_HOME": "/dev/null"}) == ""


def test_a_place_that_cannot_be_used_is_left_to_pytorch_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with kept_compiled():
        assert VARIABLE not in os.environ
    assert fallback_problem() == f"{tmp_path / 'file'} is not a folder"
    assert fallback_problem({VARIABLE: default_cache_dir(), "XDG_CACHE_HOME": str(tmp_path / "file")})
    assert "not an absolute path" in own_place({"XDG_CACHE_HOME": "caches"}).problem
    # The kernel makes none there, whoever asks.
    assert own_place({"XDG_CACHE_HOME": "/proc/shoal"}).problem == "/proc cannot be written" or os.getuid() == 0


def test_code_that_another_user_could_have_put_there_is_not_run(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root may give a folder away")
    place = own_place({"XDG_CACHE_HOME": str(tmp_path)})
    place.folder.mkdir(parents=True)
    assert own_place({"XDG_CACHE_HOME": str(tmp_path)}).problem == ""
    os.chown(place.folder, 12345, -1)
    assert "belongs to another user" in own_place({"XDG_CACHE_HOME": str(tmp_path)}).problem


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "cache").symlink_to(tmp_path / "gone")
    assert "No such file" in own_place({"XDG_CACHE_HOME": str(tmp_path / "cache")}).problem
