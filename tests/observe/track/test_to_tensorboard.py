from pathlib import Path
from typing import Any

import pytest

from shoal.observe.track.build import make_followers
from shoal.observe.track.facts import read_facts
from shoal.observe.track.points import Point
from shoal.observe.track.section import TensorBoardSection, TrackSection
from shoal.observe.track.to_tensorboard import TensorBoardSink
from tests.made_run import make_run

pytest.importorskip("tensorboard")


def read_back(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def test_tensorboard_reads_it_back(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    [follower] = make_followers(folder, TrackSection(tensorboard=TensorBoardSection()), print, str)
    assert follower.sync(is_at_work=False)
    follower.close()
    found = read_back(folder / "tensorboard")
    assert {"train_loss", "val_accuracy", "system/cpu_cores", "seconds/comm"} <= set(found.Tags()["scalars"])
    losses = found.Scalars("train_loss")
    assert [event.step for event in losses] == list(range(10, 401, 10))
    assert losses[0].wall_time == pytest.approx(follower._facts.started + 1.0)  # type: ignore[union-attr]
    text = found.Tensors("shoal/recipe")[0].tensor_proto.string_val[0].decode()
    assert "| train.global_batch | 64 |" in text


def test_another_process_goes_on_in_another_file(tmp_path: Path) -> None:
    folder, section = make_run(tmp_path / "run"), TensorBoardSection(dir=str(tmp_path / "elsewhere"))
    for steps in ((1, 2), (3, 4)):
        sink = TensorBoardSink(section, folder)
        sink.tell(read_facts(folder, is_at_work=True))
        sink.log([Point("a", float(step), step, 100.0 + step) for step in steps])
        sink.close()
    assert len(list((tmp_path / "elsewhere" / "run").iterdir())) == 2, "a folder is a run to TensorBoard"
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    shown = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "elsewhere"))
    shown.Reload()
    assert [event.step for event in shown.Scalars("run", "a")] == [1, 2, 3, 4]


def test_a_full_disk_is_told_of_and_what_it_took_can_be_read(small_disk: Path) -> None:
    sink = TensorBoardSink(TensorBoardSection(), small_disk)
    hog = small_disk / "hog"
    hog.write_bytes(b"x" * (2 * 1024 * 1024 - 64 * 1024))
    with pytest.raises(OSError):
        for step in range(1000):
            sink.log([Point(f"metric-{number}", 1.0, step, 0.0) for number in range(100)])
    assert len(read_back(small_disk / "tensorboard").Scalars("metric-0")) > 3
    for path in [hog, *(small_disk / "tensorboard").iterdir()]:
        path.unlink()
    sink.log([Point("a", 1.0, 1, 0.0)])
    sink.close()
    assert [event.value for event in read_back(small_disk / "tensorboard").Scalars("a")] == [1.0]
