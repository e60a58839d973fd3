"""What a trial's start tells its search, by consoles and errors that never came from a worker."""

import threading
from typing import Any, cast

import pytest

from shoal.core.errors import NoRoomError, RunError, UserError, WorkerError
from shoal.launch.run import Launch, Prepared
from shoal.observe.records import Report
from shoal.recipe.load import load_recipe
from shoal.tune import segment as segment_module
from shoal.tune.segment import Message, Segment, _kind
from shoal.tune.slots import Slot

SUMMARY = {"status": "interrupted", "ended_by": "pause", "step": 4}


def caused(error: RunError, cause: str) -> RunError:
    error.cause = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (caused(RunError("x"), "DivergedError"), "diverged"),
        (caused(RunError("x"), "NoMemoryError"), "memory"),
        (caused(RunError("x"), "died"), "died"),
        (caused(RunError("x"), "hung"), "hung"),
        (caused(RunError("x"), "RunError"), "runerror"),
        (RunError("x"), "run"),
        (UserError("x"), "refused"),
        (caused(WorkerError(0, "a", "DivergedError", "x", ""), "DivergedError"), "exception"),
    ],
)
def test_how_it_failed_is_a_word(error: Exception, kind: str) -> None:
    assert _kind(error) == kind


class FakeGang:
    """Says or raises what a test wants, and remembers how it was asked."""

    says: Any = SUMMARY
    asked: tuple[Any, ...] = ()
    may_end = threading.Event()

    def __init__(self, *asked: Any) -> None:
        FakeGang.asked = asked

    def run(self) -> dict[str, Any]:
        self.may_end.wait(10)
        if isinstance(self.says, BaseException):
            raise self.says
        return dict(self.says)


@pytest.fixture
def gang(monkeypatch: pytest.MonkeyPatch) -> type[FakeGang]:
    monkeypatch.setattr(segment_module, "Gang", FakeGang)
    monkeypatch.setattr(FakeGang, "says", SUMMARY)
    monkeypatch.setattr(FakeGang, "may_end", threading.Event())
    monkeypatch.setenv("MY_TOKEN", "tok-a8f3e1c2b4")
    return FakeGang


def start(messages: list[Message], until: float | None = None, address: str | None = None) -> Segment:
    loaded = load_recipe(["digits"], {"track.mlflow.uri": "${env:MY_TOKEN}"})
    prepared = cast(Prepared, type("", (), {"loaded": loaded})())
    slot = cast(Slot, type("", (), {"crew": None, "size": None})())
    return Segment(7, prepared, slot, 2, until, address, messages.append)


def ended(gang: type[FakeGang]) -> dict[str, Any]:
    """The last message of a segment."""
    messages: list[Message] = []
    found = start(messages)
    gang.may_end.set()
    found.join()
    assert [(message.trial, message.what) for message in messages] == [(7, "ended")]
    return messages[0].fields


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (SUMMARY, {"status": "interrupted", "ended_by": "pause", "summary": SUMMARY}),
        (NoRoomError("full"), {"status": "left", "reason": "full"}),
        (KeyboardInterrupt(), {"status": "interrupted", "ended_by": None, "summary": {}}),
        (UserError("bad"), {"status": "failed", "kind": "refused", "reason": "bad", "traceback": ""}),
        (ValueError("of Ray"), {"status": "left", "reason": "ValueError: of Ray", "is_broken": True}),
    ],
    ids=["summary", "no room", "interrupt", "user", "Ray"],
)
def test_every_end_is_a_message(gang: type[FakeGang], says: Any, expected: dict[str, Any]) -> None:
    gang.says = says
    assert ended(gang) == expected


def test_an_error_of_the_users_code_comes_with_its_trace_and_without_secrets(gang: type[FakeGang]) -> None:
    gang.says = WorkerError(0, "a", "ValueError", "no tok-a8f3e1c2b4", "at tok-a8f3e1c2b4\n")
    found = ended(gang)
    assert found["kind"] == "exception" and "a8f3" not in str(found) and found["traceback"].startswith("at ")


def test_the_launch_knows_where_to_pause_and_when_to_give_up(gang: type[FakeGang]) -> None:
    messages: list[Message] = []
    found = start(messages, until=2.5, address="auto")
    found.stop("SIGINT")
    found.stop("stopped")
    gang.may_end.set()
    found.join()
    how = gang.asked[1]
    assert isinstance(how, Launch) and (how.pause_at, how.give_up_s, how.address) == (2.5, 120.0, "auto")
    assert how.stop() == "SIGINT", "the first reason counts"
    assert how.asked == {"address": "auto"}


def test_steps_are_counted_from_where_it_started(gang: type[FakeGang]) -> None:
    messages: list[Message] = []
    found = start(messages)
    assert found.made() == (0, 0.0)
    found.event("start", {"step": 8})
    found.tick(8)
    assert messages == [], "no step yet"
    for step in (9, 10):
        found.tick(step)
    found.report(Report(step=10, epoch=2.5, samples=40, metrics={"val_loss": 1.0}, seconds={}, time=0.0))
    found.event("save", {"step": 10})
    found.event("failure", {"rank": 1, "message": "killed"})
    found.event("start", {"step": 8})  # again, by another worker
    assert found.made() == (0, 0.0) and found.from_step == 8
    found.tick(12)
    assert found.made() == (4, 1.0)
    gang.may_end.set()
    found.join()
    assert [message.what for message in messages] == ["first_step", "report", "note", "first_step", "ended"]
    assert messages[2].fields == {"name": "failure", "fields": {"rank": 1, "message": "killed"}}
    assert messages[0].fields["seconds"] >= 0
