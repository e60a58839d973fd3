import json
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.run_folder import RunFolder
from shoal.observe.track.facts import Facts
from shoal.observe.track.follow import Follower
from shoal.observe.track.points import Point
from shoal.observe.track.progress import Progress
from tests.made_run import make_run


@dataclass
class Memory:
    """A sink that keeps all in memory, and is away when it is told to be."""

    points: list[Point] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    is_away: bool = False
    takes: int = 10**9
    keeps_at_once = True

    def tell(self, facts: Facts) -> None:
        self.fail()
        self.told.append(facts.status)

    def log(self, points: list[Point]) -> None:
        self.fail()
        if len(self.points) + len(points) > self.takes:
            raise ConnectionError("http://me:hunter2@host is full")
        self.points += points

    def end(self, facts: Facts) -> None:
        self.fail()
        self.ended.append(facts.status)

    def close(self) -> None:
        pass

    def fail(self) -> None:
        if self.is_away:
            raise ConnectionError("http://me:hunter2@host is away")


def follower(folder: Path, sink: Memory, said: list[str] | None = None) -> Follower:
    progress = Progress.read(folder, "memory", "here")
    said = said if said is not None else []
    return Follower("memory", folder, progress, lambda: sink, 0.01, said.append)


def steps(sink: Memory, name: str) -> list[int]:
    return [point.step for point in sink.points if point.name == name]


def test_all_of_a_run_once(tmp_path: Path) -> None:
    folder, sink = make_run(tmp_path / "run"), Memory()
    assert follower(folder, sink).sync(is_at_work=False)
    assert steps(sink, "train_loss") == list(range(10, 401, 10)) and steps(sink, "val_loss") == [100, 200, 300, 400]
    assert steps(sink, "system/cpu_cores") == list(range(50, 401, 50))
    assert [point.step for point in sink.points] == sorted(point.step for point in sink.points)
    assert (sink.told, sink.ended) == (["done"], ["done"])
    again = Memory()
    assert follower(folder, again).sync(is_at_work=False)
    assert again.points == [], "nothing twice, by another process either"


def test_what_a_resume_makes_again_is_not_sent_again(tmp_path: Path) -> None:
    folder, sink = make_run(tmp_path / "run", ended=None, fails_at=None, steps=250), Memory()
    one = follower(folder, sink)
    assert one.sync(is_at_work=True)
    resumed = RunFolder(folder)
    resumed.open(200)  # forgets what came after, in a file of the same name
    resumed.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 200
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(210, 301, 10):
            file.write(json.dumps(lines[0] | {"step": step}) + "\n")
    assert one.sync(is_at_work=True)
    assert steps(sink, "train_loss") == list(range(10, 301, 10))


def test_a_sink_that_is_away_gets_all_later(tmp_path: Path) -> None:
    folder, sink, said = make_run(tmp_path / "run"), Memory(is_away=True), list[str]()
    one = follower(folder, sink, said)
    assert not one.sync(is_at_work=False) and not one.sync(is_at_work=False)
    assert said == ["memory: not sent, will try again: here: http://***@host is away"], "once, no secret"
    kept = Progress.read(folder, "memory", "here")
    assert not kept.complete and "hunter2" not in kept.path.read_text() and "is away" in kept.path.read_text()
    sink.is_away = False
    assert one.sync(is_at_work=False) and len(steps(sink, "train_loss")) == 40
    assert said[1:] == ["memory: sent"] and Progress.read(folder, "memory", "here").complete


def test_a_sink_that_fails_in_the_middle_gets_the_rest_and_nothing_twice(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    line = (folder / "metrics.jsonl").read_text().splitlines()[0]
    records = [json.loads(line) | {"step": step} for step in range(1, 2001)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    sink = Memory(takes=9000)  # a batch of 500 lines has about 4000 points
    one = follower(folder, sink)
    assert not one.sync(is_at_work=False) and sink.points
    sink.takes = 10**9
    assert one.sync(is_at_work=False)
    assert steps(sink, "train_loss") == list(range(1, 2001))


def test_how_far_it_is_differs_by_where_it_goes(tmp_path: Path) -> None:
    folder, sink = make_run(tmp_path / "run"), Memory()
    follower(folder, sink).sync(is_at_work=False)
    elsewhere = Memory()
    progress = Progress.read(folder, "memory", "elsewhere")
    Follower("memory", folder, progress, lambda: elsewhere, 0.01, print).sync(is_at_work=False)
    assert len(elsewhere.points) == len(sink.points)
    assert Progress.read(folder, "memory", "here").complete, "one does not forget the other"


def test_a_full_disk_under_the_progress_holds_up_nothing(small_disk: Path) -> None:
    folder, sink = make_run(small_disk / "run", ended=None), Memory()
    (folder / "track").mkdir()
    hog = small_disk / "hog"
    try:
        with hog.open("wb", buffering=0) as file:
            while file.write(b"x" * 4096):
                pass
    except OSError:
        pass
    one = follower(folder, sink)
    assert one.sync(is_at_work=True) and one.sync(is_at_work=True)
    assert len(steps(sink, "train_loss")) == 40, "all of it, and once"
    assert not (folder / "track" / "memory.json").exists() and list((folder / "track").iterdir()) == []
    hog.unlink()
    event = {"time": time.time(), "event": "done", "step": 400}
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps(event) + "\n")
    assert one.sync(is_at_work=True)
    assert Progress.read(folder, "memory", "here").complete


def test_files_are_followed_while_they_grow_and_until_the_end(tmp_path: Path) -> None:
    folder, sink = make_run(tmp_path / "run", ended=None), Memory()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:5]))
    one, ending = follower(folder, sink), threading.Event()
    thread = threading.Thread(target=one.run, args=(ending, lambda: True))
    thread.start()
    _wait_for(lambda: steps(sink, "train_loss") == [10, 20, 30, 40, 50])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(lines[5:10]))
    _wait_for(lambda: len(steps(sink, "train_loss")) == 10)
    sink.is_away = True
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"time": time.time(), "event": "interrupted"}) + "\n")
    ending.set()
    time.sleep(0.1)
    assert thread.is_alive() and not one.is_done, "it goes on until the sink has taken all"
    sink.is_away = False
    thread.join(10)
    assert one.is_done and sink.ended == ["interrupted"]


def test_a_run_that_is_taken_away_before_its_first_step_has_an_end(tmp_path: Path) -> None:
    folder, sink = make_run(tmp_path / "run", ended=None), Memory()
    one = follower(folder, sink)
    assert one.sync(is_at_work=True)
    shutil.rmtree(folder)
    assert one.sync(is_at_work=True) and sink.ended == [], "somebody is still at it"
    sink.is_away = True
    assert not one.sync(is_at_work=False)
    sink.is_away = False
    one.progress.ids["run"] = "which a sink remembers that was away"
    assert one.sync(is_at_work=False) and one.sync(is_at_work=False)
    assert sink.ended == ["interrupted"] and sink.told[-1] == "interrupted"
    assert not folder.exists(), "nothing is written there again"


def test_of_a_run_that_was_never_told_nothing_is(tmp_path: Path) -> None:
    sink = Memory()
    assert follower(tmp_path / "gone", sink).sync(is_at_work=False) and sink.told == []


def test_progress_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "track").mkdir()
    wrong: list[Any] = ["{", "[]", '{"here": 3}', '{"here": {"last": {"a": "x"}, "ids": 3, "complete": 1}}']
    for text in wrong:
        (tmp_path / "track" / "memory.json").write_text(text)
        kept = Progress.read(tmp_path, "memory", "here")
        assert (kept.last, kept.ids, kept.complete) == ({}, {}, False)


def _wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
