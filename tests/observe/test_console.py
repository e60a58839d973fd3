import errno
import io
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.observe.console import (
    BarConsole,
    JsonConsole,
    LineConsole,
    SilentConsole,
    describe,
    format_metric,
    make_console,
)
from shoal.observe.event_words import event_line
from shoal.observe.records import Report
from tests.terminal import terminal

START: dict[str, Any] = {
    "run": "tiny-1",
    "world_size": 1,
    "strategy": "single",
    "micro_batch": 16,
    "accumulation": 1,
    "parameters": 12345,
    "device": "cpu",
    "train_samples": 96,
    "num_steps": 40,
    "step": 0,
    "global_batch": 16,
}
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def report(step: int, **metrics: float) -> Report:
    return Report(step, step / 6, metrics, {})


def plain(shown: str) -> str:
    """Without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("val_accuracy", 0.98125, "98.12%"),
        ("val_accuracy", 1, "100.00%"),
        ("samples_per_s", 12345.6, "12,346"),
        ("samples_per_s", 3.14159, "3.14"),
        ("train_loss", 0.12345, "0.1235"),
        ("train_loss", 0.0, "0.0000"),
        ("lr", 1e-5, "1e-05"),
        ("lr", -2.5e-4, "-0.00025"),
        ("val_perplexity", 123456.0, "1.23e+05"),
        ("val_loss", math.nan, "nan"),
        ("val_loss", None, "-"),
        ("val_loss", "text", "-"),
    ],
)
def test_a_metric_is_shown_as_people_read_it(name: str, value: Any, text: str) -> None:
    assert format_metric(name, value) == text


def test_metrics_are_described_in_the_order_asked_for() -> None:
    metrics = {"val_loss": 0.5, "other": 1.0, "train_loss": 0.25}
    assert describe(metrics) == "val_loss 0.5000  other 1.0000  train_loss 0.2500"
    assert describe(metrics, ("train_loss", "missing", "val_loss")) == "train_loss 0.2500  val_loss 0.5000"


@pytest.mark.parametrize(
    ("name", "fields", "line"),
    [
        ("start", START, "tiny-1: 12,345 parameters on cpu, 96 samples, 40 steps of 16"),
        (
            "start",
            START | {"world_size": 3, "strategy": "pipeline 3, 1f1b", "micro_batch": 2, "accumulation": 8},
            "tiny-1: 12,345 parameters on 3 workers (pipeline 3, 1f1b), cpu, 96 samples, 40 steps of 16 "
            "in micro-batches of 2",
        ),
        ("resume", {"step": 5, "path": "x"}, "resuming from step 5"),
        (
            "checkpoint_rejected",
            {"step": 5, "reason": "its hash differs", "path": "x"},
            "checkpoint of step 5 is corrupt and set aside: its hash differs",
        ),
        ("warning", {"message": "careful"}, "warning: careful"),
        (
            "early_stop",
            {"step": 9, "metric": "val_loss", "best": 0.5},
            "stopping early at step 9: val_loss has not improved on 0.5000",
        ),
        ("print", {"rank": 1, "line": "a {brace}"}, "[rank 1] a {brace}"),
        ("waiting", {"for": "2 workers", "seconds_left": 9}, "waiting for 2 workers (9 s left)"),
        ("failure", {"rank": 1, "node": "b", "kind": "died", "message": "was killed"}, "worker 1: was killed"),
        ("restart", {"restarts": 2, "from_step": 4}, "starting again (restart 2)"),
        ("resize", {"from": 2, "to": 1}, "going on with 1 workers instead of 2"),
        (
            "hang",
            {"ranks": [0, 1], "timeout_s": 30.0, "stacks": {}},
            "workers [0, 1] made no progress for 30 s; where they were:",
        ),
        (
            "slow_start",
            {"ranks": [1], "timeout_s": 30.0, "stacks": {"0": "a\nb", "1": "c"}},
            "workers [1] are not ready to train after 30 s; where they are:\n[rank 1] c\n[rank 0] a\n[rank 0] b",
        ),
        (
            "hang",
            {"ranks": [7], "timeout_s": 1.0, "stacks": {str(rank): f"at {rank}" for rank in range(12)}},
            "workers [7] made no progress for 1 s; where they were:\n[rank 7] at 7\n[rank 0] at 0\n[rank 1] at 1\n"
            "[rank 2] at 2\nthe stacks of all 12 workers are in events.jsonl",
        ),
        ("save", {"step": 5}, None),
        ("first_step", {"step": 1}, None),
        ("workers", {"workers": []}, None),
        ("unheard_of", {}, None),
        ("profile", {"rank": 1, "steps": [11, 13], "path": "p"}, "worker 1: steps 11 to 13 are recorded in p"),
        ("profile", {"rank": 1, "steps": [11, 11], "path": "p"}, "worker 1: step 11 is recorded in p"),
    ],
)
def test_an_event_is_told_in_words_if_a_person_wants_to_know(
    name: str, fields: dict[str, Any], line: str | None
) -> None:
    assert event_line(name, fields) == line


@pytest.mark.parametrize(
    ("kind", "console"),
    [("auto", LineConsole), ("lines", LineConsole), ("json", JsonConsole), ("silent", SilentConsole)],
)
def test_a_stream_that_is_no_terminal_gets_lines(kind: str, console: type) -> None:
    assert type(make_console(kind, io.StringIO())) is console


@pytest.mark.parametrize(
    ("kind", "console"),
    [("auto", BarConsole), ("lines", LineConsole), ("json", JsonConsole), ("silent", SilentConsole)],
)
def test_a_terminal_gets_a_bar_unless_asked_otherwise(kind: str, console: type) -> None:
    with terminal() as screen, screen.stream() as stream:
        assert type(make_console(kind, stream)) is console


def test_an_unknown_kind_of_progress_is_refused() -> None:
    with pytest.raises(UserError, match=r"progress: 'slient' is not allowed; .*did you mean silent\?"):
        make_console("slient", io.StringIO())


def test_plain_lines_are_few_but_every_evaluation_and_the_last_step_is_told() -> None:
    stream = io.StringIO()
    console = make_console("lines", stream)
    console.event("start", START)
    console.event("save", {"step": 5})
    for step in range(1, 41):
        console.tick(step)
        console.report(report(step, train_loss=1 / step, lr=0.01))
        if step % 20 == 0:
            console.report(report(step, val_loss=0.5, val_accuracy=0.75))
    console.close()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "tiny-1: 12,345 parameters on cpu, 96 samples, 40 steps of 16",
        "step 1/40  epoch 0.17  train_loss 1.0000  lr 0.0100",
        "step 20/40  epoch 3.33  val_loss 0.5000  val_accuracy 75.00%",
        "step 40/40  epoch 6.67  train_loss 0.0250  lr 0.0100",
        "step 40/40  epoch 6.67  val_loss 0.5000  val_accuracy 75.00%",
    ]


def test_json_lines_all_parse_and_hold_what_the_files_hold() -> None:
    stream = io.StringIO()
    console = make_console("json", stream)
    console.event("start", START)
    console.tick(1)
    console.report(report(3, train_loss=math.inf))
    console.close()
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first.pop("time") > 0 and first == {"event": "start", **START}
    written = report(3, train_loss=math.inf).to_record() | {"time": second["time"], "metrics": {"train_loss": None}}
    assert second["time"] > 0 and second == {"event": "report", **written}


def test_silence_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    console = make_console("silent")
    console.event("start", START)
    console.tick(1)
    console.report(report(1, val_loss=1.0))
    console.close()
    assert capfd.readouterr() == ("", "")


def test_a_bar_moves_on_a_real_terminal_and_leaves_it_as_it_was() -> None:
    with terminal() as screen:
        with screen.stream() as stream:
            console = make_console("auto", stream)
            console.event("start", START)
            console.tick(1)
            console.report(report(10, train_loss=0.125, samples_per_s=5000.0))
            console.event("warning", {"message": "a [bold] word"})
            console.report(report(20, val_loss=0.5, val_accuracy=0.75))
            console.report(report(40, train_loss=0.0625))
            console.close()
        shown = screen.close()
    words = plain(shown)
    for step in ("1/40", "10/40", "20/40", "40/40"):
        assert re.search(rf"step +{step} ", words), words
    assert "train_loss 0.1250  samples_per_s 5,000" in words
    assert "train_loss 0.0625  samples_per_s 5,000" in words, "what is not new stays"
    assert "step 20  epoch 3.33  val_loss 0.5000  val_accuracy 75.00%" in words
    assert "warning: a [bold] word" in words
    assert shown.index(HIDE_CURSOR) < shown.rindex(SHOW_CURSOR) and shown.count(HIDE_CURSOR) == shown.count(SHOW_CURSOR)


def test_a_bar_of_a_resumed_run_begins_where_it_was() -> None:
    with terminal() as screen:
        with screen.stream() as stream:
            console = make_console("auto", stream)
            console.event("resume", {"step": 30})
            console.event("start", START | {"step": 30})
            console.tick(31)
            console.close()
        words = plain(screen.close())
    assert "resuming from step 30" in words
    assert re.search(r"step +30/40", words) and not re.search(r"step +0/40", words)


def test_a_bar_stays_one_bar_when_the_workers_are_started_again() -> None:
    with terminal() as screen:
        with screen.stream() as stream:
            console = make_console("auto", stream)
            console.event("start", START)
            console.report(report(20, train_loss=0.125))
            console.event("restart", {"restarts": 1})
            console.event("start", START | {"step": 10})
            console.report(report(40, train_loss=0.0625))
            console.close()
        shown, _, last = plain(screen.close()).partition("40/40")
    assert "20/40" in shown and "10/40" in shown
    assert "40/40" in last and "20/40" not in last, "the bar of the first start is gone"


def test_the_bar_is_drawn_a_few_times_a_second_not_every_step() -> None:
    with terminal() as screen:
        with screen.stream() as stream:
            console = make_console("auto", stream)
            console.event("start", START | {"num_steps": 100_000})
            for step in range(1, 20_001):
                console.tick(step)
            console.close()
        words = plain(screen.close())
    assert len(re.findall(r"/100000", words)) < 30


def test_a_bar_can_be_closed_before_anything_has_started() -> None:
    with terminal() as screen, screen.stream() as stream:
        make_console("auto", stream).close()


def test_without_a_stream_the_console_writes_to_stderr(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_console("lines").event("warning", {"message": os.fspath(tmp_path)})
    out, err = capfd.readouterr()
    assert out == "" and err == f"warning: {tmp_path}\n"


def test_a_log_on_a_disk_that_was_full_goes_on_and_one_whose_reader_is_gone_ends() -> None:
    class Disk(io.StringIO):
        error: int | None = None

        def write(self, text: str) -> int:
            if self.error is not None:
                raise OSError(self.error, "no")
            return super().write(text)

    disk = Disk()
    console = make_console("lines", disk)
    for error in (None, errno.ENOSPC, None, errno.EPIPE, None):
        disk.error = error
        console.event("warning", {"message": str(error)})
    assert disk.getvalue() == "warning: None\nwarning: None\n"
