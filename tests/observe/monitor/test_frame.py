"""Frames at several sizes: what is shown, what is left out first, with and without colours and beyond ASCII."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from shoal.observe.event_words import event_words, one_line
from shoal.observe.monitor.facts import Facts, facts_of
from shoal.observe.monitor.frame import frame
from shoal.observe.monitor.look import COLOURS, LETTERS, Look, look_of
from shoal.observe.monitor.panels import newest
from shoal.observe.monitor.watch import RunWatch
from shoal.observe.monitor.worker_rows import some_of, worker_rows
from shoal.observe.number_words import amount, duration, share, short_time, size
from shoal.observe.phases import PHASES
from tests.made_run import make_run

SIZES = [(80, 24), (120, 40), (200, 60)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    watch = RunWatch(make_run(tmp_path_factory.mktemp("made") / "digits-a"))
    watch.poll()
    return facts_of(watch)


def many_workers(tmp_path: Path, number: int) -> Facts:
    """As many, of which rank 7 is slow."""
    folder = make_run(tmp_path / "many", steps=300, ended=None, fails_at=None)
    line = json.loads((folder / "workers.jsonl").read_text().splitlines()[-1])
    line["seconds"] = {
        "forward": [3.0 if rank == 7 else 2.0 + rank / 1000 for rank in range(number)],
        "comm": [0.0 if rank == 7 else 1.0 - rank / 1000 for rank in range(number)],
    }
    line["system"] = {"gpu_busy": [0.9] * number, "memory_bytes": [1e9] * number}
    with (folder / "workers.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    watch = RunWatch(folder)
    watch.poll()
    return facts_of(watch)


def text_of(facts: Facts, width: int, height: int, look: Look | None = None) -> str:
    lines = frame(facts, width, height, look or Look())
    assert len(lines) <= height and all(line.cell_len <= width for line in lines)
    return "\n".join(line.plain for line in lines)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_everything_is_there_at_usual_sizes(facts: Facts, width: int, height: int) -> None:
    shown = text_of(facts, width, height)
    for words in (
        *("digits-a  done  ddp · 2 workers · cpu · 1 restart", "step 400/400", "100%", "1 min 02 s elapsed"),
        *(
            "verdict    compute: 72%",
            "640 samples/s over the run, 640 in its last minute (+0%)",
            "whole run",
            "backward 44%",
        ),
        *("checkpoint step 400", "223 kB", "goodput    80.0% of worker time", "train_loss 0.0821", "val_accuracy"),
        *("step 400", "◀ slowest", "events: 1 failure, 1 restart", "worker 1: the worker's process was killed"),
    ):
        assert words in shown
    assert any(0x2800 < ord(character) < 0x2900 for character in shown)
    assert "q quits" in shown


def test_before_the_first_line_on_workers_it_is_said_when_there_will_be_one(tmp_path: Path) -> None:
    for status, words in ((None, "not told yet"), ("failed", "not known")):
        folder = make_run(tmp_path / str(status), ended=status)
        (folder / "workers.jsonl").unlink()
        watch = RunWatch(folder)
        watch.poll()
        assert f"rank  where its time goes: {words} (see observe.workers_every_s)" in text_of(facts_of(watch), 80, 30)


def test_larger_ones_show_more(facts: Facts) -> None:
    small, middle, large = (text_of(facts, width, height) for width, height in SIZES)
    assert "val_loss 0.0183" not in small and "val_loss 0.0183" in middle and "lr 0" in large
    assert "steps after 200 up to 250 are lost" not in small and "steps after 200 up to 250 are lost" in middle
    assert sum("│" in line or "┤" in line for line in middle.splitlines()) > sum(
        "│" in line or "┤" in line for line in small.splitlines()
    )


def test_in_a_small_terminal_the_less_important_goes_first(facts: Facts) -> None:
    parts = ["digits-a", "verdict", "train_loss", "phases", "rate ", "checkpoint", "goodput", "where its", "events"]
    had = set(parts)
    for height in range(24, 0, -1):
        shown = text_of(facts, 80, height)
        has = {part for part in parts if part in shown}
        assert has <= had, height
        had = has
    assert had == {"digits-a"}
    assert {part for part in parts if part in text_of(facts, 80, 9)} == set(parts[:4])


@pytest.mark.parametrize("width", [1, 2, 10, 20, 39, 40, 79])
def test_a_narrow_terminal_is_kept_to(facts: Facts, width: int) -> None:
    for height in (1, 5, 24):
        text_of(facts, width, height)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_in_ascii_there_is_nothing_else(facts: Facts, width: int, height: int) -> None:
    shown = text_of(facts, width, height, Look(is_plain=True, has_colours=False))
    assert shown.isascii() and "< slowest" in shown and "**" in shown


def test_without_colours_phases_are_told_by_letters(facts: Facts) -> None:
    shown = text_of(facts, 120, 40, Look(has_colours=False))
    assert "dd data 18% dd" in shown and "bb backward 44% bb" in shown and "o optimizer 2%" in shown
    assert "fffffbbbbb" in shown


def test_every_phase_has_a_colour_and_a_letter_of_its_own() -> None:
    assert set(COLOURS) == set(LETTERS) == set(PHASES)
    assert len(set(LETTERS.values())) == len(PHASES)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_of_many_workers_the_slowest_a_middle_one_and_the_fastest(tmp_path: Path, width: int, height: int) -> None:
    facts = many_workers(tmp_path, 64)
    shown = text_of(facts, width, height)
    title = next(line for line in shown.splitlines() if line.startswith("workers"))
    rows = int(title.split()[1])
    assert f"workers: {rows} of 64 (slowest, median, fastest); {64 - rows} left out" in title
    after = shown[shown.index("where its time goes") :].splitlines()[1:]
    assert after[0].split()[0] == "7" and "◀ slowest" in after[0]
    assert after[rows - 1].split()[0] == "0" and after[rows - 2].split()[0] in ("31", "32", "33")


def test_few_workers_are_shown_by_rank(facts: Facts) -> None:
    assert [worker.rank for worker in some_of(facts.workers, 2)] == [0, 1]
    assert [worker.rank for worker in some_of(facts.workers, 1)] == [1]
    assert some_of(facts.workers, 0) == []


def test_after_a_restart_old_lines_on_workers_are_not_shown_as_new() -> None:
    rows = worker_rows({}, {"workers": [{"rank": 0, "host": "a"}, {"rank": 1, "host": "b"}, "?", {"rank": "x"}]})
    assert [(row.rank, row.host, dict(row.shares)) for row in rows] == [(0, "a", {}), (1, "b", {})]


def test_a_failure_of_a_moment_ago_stays_in_view() -> None:
    events = [{"event": name} for name in ("start", "failure", "restart", "resume", "start")]
    assert [event["event"] for event in newest(events, 2)] == ["failure", "start"]
    assert [event["event"] for event in newest(events, 9)] == [event["event"] for event in events]
    assert newest(events, 0) == []


def test_the_look_follows_locale_and_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG", "NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    console = Console(force_terminal=True, color_system="truecolor")
    assert look_of(console) == Look(is_plain=not console.encoding.startswith("utf"), has_colours=True)
    monkeypatch.setenv("LC_ALL", "C")
    assert look_of(console).is_plain
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    assert not look_of(console).is_plain or not console.encoding.startswith("utf")
    monkeypatch.setenv("TERM", "linux")
    assert look_of(console).is_plain
    assert not look_of(Console(force_terminal=True, color_system="standard")).has_colours
    monkeypatch.setenv("NO_COLOR", "1")
    assert not look_of(Console(force_terminal=True, color_system="truecolor")).has_colours


def test_words_for_numbers() -> None:
    assert [duration(s) for s in (0.4, 59.9, 60, 3725, 90061, -3)] == [
        *("0 s", "59 s", "1 min 00 s", "1 h 02 min", "1 d 01 h", "0 s")
    ]
    assert [short_time(s) for s in (0.0004, 0.035, 1.25, 90, None)] == ["0.4 ms", "35 ms", "1.2 s", "1 min 30 s", "-"]
    assert [size(n) for n in (0, 999, 223212, 4.1e9, None)] == ["0 B", "999 B", "223 kB", "4.1 GB", "-"]
    assert [amount(n) for n in (0.5, 12.34, 640, 10240, 12_345_678)] == ["0.5", "12.3", "640", "10,240", "12.3 M"]
    assert [share(x) for x in (0, 0.001, 0.5)] == ["0%", "<1%", "50%"]


def test_what_others_wrote_is_shown_in_one_line_without_controls() -> None:
    assert one_line("a\x1b[31mb\tc\x07\nsecond") == "a [31mb c "
    assert event_words({"event": "failure", "rank": 3, "message": "lost\x1b]0;x\x07"}) == "worker 3: lost ]0;x "
    assert event_words({"event": "failure"}) == "failure"  # it lacks what the words need
    assert event_words({"event": "brand_new", "x": 1}) == "brand new, x=1"
    assert (
        event_words({"event": "early_stop", "step": 3, "metric": "m", "best": "?"})
        == "early stop, step=3, metric=m, best=?"
    )
