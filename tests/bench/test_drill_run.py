"""The eyes of a drill: what they make of a run's folder; and a bit that is flipped there."""

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.bench.drill_breaks import flip_a_bit, is_in_the_middle
from shoal.bench.drill_run import FailedSaves, last_step
from shoal.checkpoint.folder import commit, delete_checkpoint, folder_to_write, step_name, worker_name
from shoal.checkpoint.manifest import Manifest


def test_one_bit_is_flipped(tmp_path: Path) -> None:
    before = bytes(range(256))
    places = set()
    for seed in range(20):
        (tmp_path / "file").write_bytes(before)
        flip_a_bit(tmp_path / "file", random.Random(seed))
        after = (tmp_path / "file").read_bytes()
        assert len(after) == len(before)
        assert sum((one ^ other).bit_count() for one, other in zip(before, after, strict=True)) == 1
        places.add(after)
    assert len(places) > 15


@pytest.mark.parametrize(
    ("text", "step"),
    [("", 0), ('{"step": 3}\n{"step": 4}\n', 4), ('{"step": 3}\n{"ste', 3), ('{"step": 3}\nnull\n', 3)],
)
def test_the_newest_step_is_that_of_the_last_whole_line(tmp_path: Path, text: str, step: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(text)
    with (tmp_path / "metrics.jsonl").open("rb") as file:
        assert last_step(file) == step


def begin(folder: Path, step: int, attempt: int = 0) -> Path:
    """As a save begins."""
    aside = folder_to_write(folder, step, f"abcd-{attempt}")
    aside.mkdir(parents=True)
    (aside / worker_name(0)).touch()
    return aside


def save(folder: Path, step: int) -> Path:
    """A whole one, as far as names go."""
    return commit(begin(folder, step), folder, Manifest(step, 0, {}, 0.0, 1, "single", {})).path


def test_saves_that_come_to_nothing_are_counted(tmp_path: Path) -> None:
    def after(action: Callable[[], object]) -> int:
        time.sleep(0.02)  # file systems count time in steps of milliseconds
        action()
        return failed.look()

    oldest = save(tmp_path, 10)
    failed = FailedSaves(tmp_path)
    assert failed.look() == 0
    assert after(lambda: begin(tmp_path, 20)) == 0, "it may still become a checkpoint"
    assert after(lambda: shutil.rmtree(folder_to_write(tmp_path, 20, "abcd-0"))) == 1
    assert failed.look() == 1
    assert after(lambda: shutil.rmtree(begin(tmp_path, 20, attempt=1))) == 2
    assert after(lambda: save(tmp_path, 30)) == 2, "it was saved"
    assert after(lambda: delete_checkpoint(oldest)) == 2, "an old one was deleted"
    assert after(lambda: shutil.rmtree(begin(tmp_path, 40))) == 3


def test_a_worker_is_in_the_middle_of_a_save_while_the_others_wait_for_it(tmp_path: Path) -> None:
    aside = begin(tmp_path, 20)
    assert is_in_the_middle(aside, 0) and is_in_the_middle(aside, 1)
    (aside / worker_name(1)).touch()
    assert is_in_the_middle(aside, 0), "rank 0 has still to commit it"
    assert not is_in_the_middle(aside, 1), "its part is done"
    aside.rename(tmp_path / step_name(20))
    assert not is_in_the_middle(aside, 0) and not is_in_the_middle(aside, 1)
