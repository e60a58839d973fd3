"""What a gang makes of what it hears, in orders that real workers give only now and then."""

import json
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import NoRoomError, RunError, UserError, WorkerError
from shoal.launch import attempt as attempt_module
from shoal.launch import gang as gang_module
from shoal.launch.crew import Member
from shoal.launch.gang import Gang
from shoal.launch.policy import Size
from shoal.launch.run import Launch, prepare
from tests.launch.gangs import Watch
from tests.tiny import TINY

Script = list[tuple[float, Any]]
"""For a worker: after how many seconds it says what, or raises what; at the end of it, it says no more."""

DONE = {"what": "ended", "summary": {"status": "done", "ended_by": "done"}}
TICK = {"what": "tick", "step": 1}
DIED = {"what": "died", "status": -9, "because": None}


def ended(by: str) -> dict[str, Any]:
    return {"what": "ended", "summary": {"status": "interrupted", "ended_by": by}}


def failed(message: str, kind: str = "exception", by_network: bool = False, of: str = "ValueError") -> dict[str, Any]:
    fields = {"kind": kind, "type": of, "message": message, "notes": [], "traceback": f"trace of {message}\n"}
    return {"what": "failed", "by_network": by_network, **fields}


BROKEN = failed("Connection closed by peer", by_network=True)


class ScriptedMember:
    """A place whose worker follows a script, one for each start."""

    def __init__(self, node: str, *scripts: Script) -> None:
        self.node, self.host, self.address = node, node, "127.0.0.1"
        self.scripts = list(scripts)
        self.script: Script = []
        self.calls: list[tuple[Any, ...]] = []
        self.start_error: Exception | None = None

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        self.calls.append((method, *arguments))
        future: Future[Any] = Future()
        if method == "start":
            self.script = self.scripts.pop(0) if self.scripts else []
            if self.start_error is not None:
                future.set_exception(self.start_error)
                return future
        if method == "poll" and self.script:
            delay_s, said = self.script.pop(0)
            _later(future, delay_s, said)
        elif method == "poll":
            _later(future, arguments[1], None)
        else:
            future.set_result({"open_port": 1, "stacks": f"stacks on {self.node}"}.get(method))
        return future

    def called(self, method: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == method]


def _later(future: "Future[Any]", delay_s: float, said: Any) -> None:
    def answer() -> None:
        if isinstance(said, Exception):
            future.set_exception(said)
        elif isinstance(said, dict) and "what" not in said:
            future.set_result({"messages": [], "still_s": 0.0, "starting_s": 0.0} | said)
        else:
            future.set_result({"messages": [] if said is None else [said], "still_s": 0.0, "starting_s": 0.0})

    timer = threading.Timer(delay_s, answer)
    timer.daemon = True
    timer.start()


class ScriptedCrew:
    def __init__(self, *members: ScriptedMember, spare: ScriptedMember | None = None) -> None:
        self.places = list(members)
        self.spare = spare
        self.going: set[str] = set()
        self.dropped: list[ScriptedMember] = []

    def members(self) -> list[Member]:
        return list(self.places)

    def expects_more(self) -> bool:
        return False

    def leaving(self) -> set[str]:
        return self.going

    def drop(self, member: Member) -> None:
        assert isinstance(member, ScriptedMember)
        self.dropped.append(member)
        self.places = [other for other in self.places if other is not member]
        self.places += [self.spare] if self.spare else []

    def obstacle(self) -> str | None:
        return None

    def waiting_for(self) -> str:
        return "another place"

    def close(self) -> None:
        pass


class Play:
    """A gang and its scripted crew."""

    def __init__(
        self,
        folder: Path,
        crew: ScriptedCrew,
        size: Size | None = None,
        give_up_s: float | None = None,
        **overrides: Any,
    ) -> None:
        self.crew = crew
        self.watch = Watch(folder / "run")
        prepared = prepare([TINY], {"cluster.workers": 2} | overrides, run_dir=folder / "run")
        how = Launch(self.watch, self.watch.stop, give_up_s=give_up_s)
        self.gang = Gang(prepared, how, crew, size or Size(2, 2), threads=1)

    def __call__(self) -> dict[str, Any]:
        return self.gang.run()

    def shown(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.watch.events if event == name]


def test_a_worker_that_dies_when_rank_0_has_ended_is_not_missed(here: Path) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.05, DONE)]), ScriptedMember("a", [(0.2, DIED)]))
    play = Play(here, crew)
    assert play()["status"] == "done" and play.gang.starts == 1
    assert play.watch.events == []


def test_a_worker_that_dies_just_before_rank_0_ends_is_not_missed(here: Path) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.3, DONE)]), ScriptedMember("a", [(0.1, DIED)]))
    play = Play(here, crew)
    assert play()["status"] == "done" and play.gang.starts == 1


def test_a_worker_that_does_not_end_is_not_waited_for_when_rank_0_has_ended(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "LEAVE_S", 0.3)
    crew = ScriptedCrew(ScriptedMember("a", [(0.05, DONE)]), ScriptedMember("a"))
    play = Play(here, crew)
    began = time.monotonic()
    assert play()["status"] == "done"
    assert 0.3 <= time.monotonic() - began < 5.0
    assert crew.places[1].called("kill") == [()]


def test_a_worker_that_ends_early_is_no_failure_and_does_not_hang(here: Path) -> None:
    """Rank 0 may have a large model to write."""
    crew = ScriptedCrew(
        ScriptedMember("a", [(0.1, {"still_s": 0.1}), (0.5, DONE)]),
        ScriptedMember("a", [(0.0, {"still_s": 0.9}), (0.05, DONE)]),
    )
    play = Play(here, crew, **{"failures.hang_timeout_s": 1})
    assert play()["status"] == "done" and play.gang.starts == 1


def test_the_cause_is_waited_for_where_connections_broke(here: Path) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.0, BROKEN)]), ScriptedMember("a", [(1.0, failed("the cause"))]))
    with pytest.raises(WorkerError, match=r"^worker 1 on a: ValueError: the cause$") as caught:
        Play(here, crew)()
    assert caught.value.trace == "trace of the cause\n"


def test_a_death_does_not_hide_the_error_that_follows_it(here: Path) -> None:
    """A library may abort the process of a worker whose partner raised."""
    crew = ScriptedCrew(ScriptedMember("a", [(0.0, DIED)]), ScriptedMember("a", [(0.2, failed("the cause"))]))
    with pytest.raises(WorkerError, match="the cause"):
        Play(here, crew)()


def test_where_the_cause_is_known_and_all_have_spoken_nobody_waits(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_module, "CAUSE_S", 60.0)
    monkeypatch.setattr(attempt_module, "LAST_WORDS_S", 60.0)
    crew = ScriptedCrew(
        ScriptedMember("a", [(0.1, BROKEN)], [(0.0, DONE)]), ScriptedMember("a", [(0.0, DIED)], [(0.0, DONE)])
    )
    play = Play(here, crew)
    began = time.monotonic()
    assert play()["status"] == "done"
    assert time.monotonic() - began < 5.0
    assert [(fields["rank"], fields["kind"]) for fields in play.shown("failure")] == [(1, "died")]
    assert [job["restarts"] for (job,) in crew.places[0].called("start")] == [0, 1]
    assert [job["starts"] for (job,) in crew.places[0].called("start")] == [0, 1]


def test_an_agent_that_is_gone_is_dropped_and_the_run_goes_on_elsewhere(here: Path) -> None:
    spare = ScriptedMember("c", [(0.0, DONE)])
    gone = ScriptedMember("b", [(0.05, TimeoutError())])  # whose text is empty
    crew = ScriptedCrew(ScriptedMember("a", [(0.1, BROKEN)], [(0.0, DONE)]), gone, spare=spare)
    play = Play(here, crew)
    assert play()["status"] == "done"
    assert crew.dropped == [gone] and gone.called("kill") == [], "nobody is there to do it"
    assert [fields["message"] for fields in play.shown("failure")] == ["TimeoutError"]
    (_, job) = [job for (job,) in crew.places[0].called("start")]
    assert job["meeting"]["world_size"] == 2 and job["address"] == "127.0.0.1"


def test_a_place_that_cannot_start_is_dropped(here: Path) -> None:
    bad, spare = ScriptedMember("a"), ScriptedMember("a", [(0.0, DONE)])
    bad.start_error = OSError("no process can be started: Resource temporarily unavailable")
    first = ScriptedMember("a", [], [(0.0, DONE)])
    crew = ScriptedCrew(first, bad, spare=spare)
    play = Play(here, crew)
    assert play()["status"] == "done"
    assert crew.dropped == [bad]
    assert len(first.called("kill")) == 2, "those that could start do not wait for it"
    (failure,) = play.shown("failure")
    assert failure["kind"] == "lost" and "Resource temporarily unavailable" in failure["message"]


def test_a_member_that_does_not_answer_is_lost(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "_POLL_S", 0.1)
    monkeypatch.setattr(gang_module, "_SILENT_S", 0.5)
    silent, spare = ScriptedMember("b", [(60.0, None)]), ScriptedMember("c", [(0.0, DONE)])
    crew = ScriptedCrew(ScriptedMember("a", [], [(0.0, DONE)]), silent, spare=spare)
    play = Play(here, crew)
    assert play()["status"] == "done" and crew.dropped == [silent]
    assert play.shown("failure")[0]["message"].startswith("no answer for ")


class DeafMember(ScriptedMember):
    """One whose machine is cut off when it is to be killed."""

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        return Future() if method == "kill" else super().call(method, *arguments)


def test_a_member_that_cannot_be_told_to_end_is_dropped(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "_SILENT_S", 0.2)
    deaf, spare = DeafMember("b", [(0.1, None)]), ScriptedMember("c", [(0.0, DONE)])
    crew = ScriptedCrew(ScriptedMember("a", [(0.0, DIED)], [(0.0, DONE)]), deaf, spare=spare)
    assert Play(here, crew)()["status"] == "done" and crew.dropped == [deaf]


def test_the_time_in_which_the_launcher_itself_stood_is_no_fault_of_the_members(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_module, "_POLL_S", 0.1)
    monkeypatch.setattr(gang_module, "_SILENT_S", 0.5)
    monkeypatch.setattr(gang_module, "_STOOD_S", 0.4)
    line = {"what": "print", "stream": "stdout", "line": "stop"}
    crew = ScriptedCrew(ScriptedMember("a", [(0.1, line), (0.1, DONE)]), ScriptedMember("b", [(1.4, DONE)]))
    play = Play(here, crew)
    play.watch.when_printed("stop", lambda watch: time.sleep(1.2))  # as a Ctrl-Z, or a terminal that is held
    assert play()["status"] == "done" and crew.dropped == []


def test_a_machine_that_leaves_is_left_after_a_save(here: Path) -> None:
    leaving, spare = ScriptedMember("b", [(0.3, ended("preemption"))]), ScriptedMember("c", [(0.0, DONE)])
    first = ScriptedMember("a", [(0.05, None), (0.3, ended("preemption"))], [(0.0, DONE)])
    crew = ScriptedCrew(first, leaving, spare=spare)
    crew_leaving = iter([set(), set()])
    crew.leaving = lambda: next(crew_leaving, {"b"})  # type: ignore[method-assign]
    play = Play(here, crew)
    assert play()["status"] == "done" and play.gang.account.restarts == 0
    assert crew.dropped == [leaving] and leaving.called("stop") == first.called("stop") == [(0, "preemption")]
    assert play.shown("preemption") == [{"nodes": ["b"]}] and play.shown("failure") == []


def test_a_run_grows_when_more_places_are_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_module, "_SETTLE_S", 0.2)
    first = ScriptedMember("a", [(0.4, None), (0.1, ended("resize"))], [(0.0, DONE)])
    late = ScriptedMember("b", [(0.0, DONE)])
    crew = ScriptedCrew(first)
    play = Play(here, crew, Size(1, 2))
    threading.Timer(0.1, lambda: crew.places.append(late)).start()
    assert play()["status"] == "done"
    assert first.called("stop") == [(0, "resize")] and play.shown("resize") == [{"from": 1, "to": 2}]
    assert play.gang.account.restarts == 0


def test_a_stop_that_the_user_asks_for_ends_the_run_even_if_it_was_being_resized(here: Path) -> None:
    first = ScriptedMember("a", [(0.0, TICK), (0.3, ended("resize"))])
    play = Play(here, ScriptedCrew(first, ScriptedMember("a", [(0.3, ended("resize"))])))
    threading.Timer(0.1, lambda: setattr(play.watch, "stop_reason", "SIGINT")).start()
    assert play() == {"status": "interrupted", "ended_by": "SIGINT"} and play.gang.starts == 1


def test_a_stop_before_the_first_step_ends_workers_that_do_not_answer_to_it(here: Path) -> None:
    """They may be building a model for minutes; whether they were asked to make room for others does not matter."""
    members = [ScriptedMember("a", [(0.0, {"starting_s": 1.0})]) for _ in range(2)]
    play = Play(here, ScriptedCrew(*members))
    threading.Timer(0.2, lambda: setattr(play.watch, "stop_reason", "SIGINT")).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        play()
    assert time.monotonic() - began < 2.0
    assert all(member.called("kill") and not member.called("stop") for member in members)


def test_after_a_restart_a_stop_ends_workers_that_get_ready_and_keeps_what_was_saved(here: Path) -> None:
    first = ScriptedMember("a", [(0.0, TICK), (0.1, DIED)])
    play = Play(here, ScriptedCrew(first, ScriptedMember("a")))
    (here / "run" / "checkpoints" / "step-00000007").mkdir(parents=True)
    (here / "run" / "checkpoints" / "step-00000007" / "manifest.json").touch()
    (here / "run" / "recipe.yaml").touch()
    threading.Timer(1.5, lambda: setattr(play.watch, "stop_reason", "SIGTERM")).start()
    summary = play()
    assert play.gang.starts == 2 and first.called("kill")
    assert (summary["status"], summary["ended_by"], summary["step"]) == ("interrupted", "SIGTERM", 7)


@pytest.mark.parametrize("has_stepped", [False, True])
def test_the_folder_of_a_run_without_a_step_goes_unless_somebody_trained_there(here: Path, has_stepped: bool) -> None:
    play = Play(here, ScriptedCrew(*[ScriptedMember("a") for _ in range(2)]))
    threading.Timer(0.2, lambda: setattr(play.watch, "stop_reason", "SIGINT")).start()
    run = here / "run"
    run.mkdir()
    for name in (".lock", "recipe.yaml"):
        (run / name).touch()
    event = {"time": 1.0, "event": "first_step" if has_stepped else "start", "step": 1}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    if has_stepped:
        assert play()["status"] == "interrupted" and run.is_dir()
    else:
        with pytest.raises(KeyboardInterrupt):
            play()
        assert not run.exists()


def test_a_preemption_before_the_start_starts_again(here: Path) -> None:
    early = {"what": "ended", "summary": {"status": "interrupted", "ended_by": None, "before_start": True}}
    crew = ScriptedCrew(*[ScriptedMember("a", [(0.0, early)], [(0.0, DONE)]) for _ in range(2)])
    play = Play(here, crew)
    assert play()["status"] == "done" and play.gang.starts == 2 and play.gang.account.restarts == 0


def test_machines_that_do_not_come_back_are_waited_for_only_so_long(here: Path) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.1, BROKEN)]), ScriptedMember("b", [(0.0, OSError("gone"))]))
    play = Play(here, crew, **{"failures.machine_timeout_s": 0.5})
    with pytest.raises(NoRoomError, match=r"^cluster.workers: waited \d s for another place; given up$"):
        play()


class FullCrew(ScriptedCrew):
    """Of a cluster that others have filled."""

    def obstacle(self) -> str | None:
        return "2 workers need 2 CPU and the cluster has 1"


@pytest.mark.parametrize("crew", [ScriptedCrew, FullCrew])
def test_who_is_told_to_give_up_soon_does_so_whatever_stands_in_the_way(here: Path, crew: type[ScriptedCrew]) -> None:
    play, began = Play(here, crew(ScriptedMember("a")), give_up_s=0.3), time.monotonic()
    with pytest.raises(NoRoomError, match=r"^cluster.workers: waited \d s for another place; given up$") as caught:
        play()
    assert isinstance(caught.value, RunError) and 0.3 <= time.monotonic() - began < 5
    assert not (here / "run").exists() and play.gang.starts == 0


def test_without_that_what_can_never_fit_is_wrong_input_at_once(here: Path) -> None:
    with pytest.raises(UserError, match=r"^cluster.workers: 2 workers need 2 CPU .*; ask for fewer or smaller ones"):
        Play(here, FullCrew(ScriptedMember("a")))()


def test_who_is_told_to_give_up_soon_does_so_after_a_loss_too(here: Path) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.1, BROKEN)]), ScriptedMember("b", [(0.0, OSError("gone"))]))
    play = Play(here, crew, give_up_s=0.3, **{"failures.machine_timeout_s": 600})
    with pytest.raises(NoRoomError, match="given up"):
        play()
    assert play.gang.starts == 1 and play.gang.account.restarts == 1


@pytest.mark.parametrize(
    ("said", "raised", "cause"),
    [
        (failed("loss is nan", "run", of="DivergedError"), RunError, "DivergedError"),
        (failed("out of memory", "run", of="NoMemoryError"), RunError, "NoMemoryError"),
        (failed("boom", "exception"), WorkerError, "ValueError"),
        (DIED, RunError, "died"),
    ],
    ids=["diverged", "memory", "exception", "died"],
)
def test_an_error_says_how_the_worker_ended(here: Path, said: Any, raised: type[RunError], cause: str) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.0, said)]), ScriptedMember("a", [(0.0, TICK)]))
    with pytest.raises(RunError) as caught:
        Play(here, crew, **{"failures.max_restarts": 0})()
    assert type(caught.value) is raised and caught.value.cause == cause
    assert RunError("of no worker").cause == ""


def test_while_machines_are_waited_for_a_stop_ends_it(here: Path) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.1, BROKEN)]), ScriptedMember("b", [(0.0, OSError("gone"))]))
    play = Play(here, crew)
    threading.Timer(0.6, lambda: setattr(play.watch, "stop_reason", "SIGINT")).start()
    with pytest.raises(KeyboardInterrupt):  # nothing was ever written
        play()


def test_what_is_waited_for_is_told_with_the_seconds_that_are_left(here: Path) -> None:
    crew = ScriptedCrew(ScriptedMember("a", [(0.0, DONE)]))
    play = Play(here, crew)
    threading.Timer(2.4, lambda: crew.places.append(ScriptedMember("a", [(0.0, DONE)]))).start()
    assert play()["status"] == "done"
    assert play.shown("waiting") == [{"for": "another place", "seconds_left": 118}]


def test_all_ranks_of_a_machine_are_neighbours(here: Path) -> None:
    crew = ScriptedCrew(*[ScriptedMember(node, [(0.0, DONE)]) for node in "abab"])
    play = Play(here, crew, Size(4, 4), **{"cluster.workers": 4})
    play()
    jobs = sorted((member.called("start")[0][0] for member in crew.places), key=lambda job: job["meeting"]["rank"])
    assert [job["node"] for job in jobs] == ["a", "a", "b", "b"]
    assert [job["local_rank"] for job in jobs] == [0, 1, 0, 1] and {job["local_world_size"] for job in jobs} == {2}
    assert len({str(job["recipe"]) for job in jobs}) == 1
    assert not any("site-packages" in path for path in jobs[0]["paths"])


def test_a_hang_blames_the_slowest_if_nobody_is_stopped(here: Path) -> None:
    crew = ScriptedCrew(
        ScriptedMember("a", [(0.0, {"still_s": 0.2}), (0.2, None)], [(0.0, DONE)]),
        ScriptedMember("b", [(0.1, {"still_s": 1.5})], [(0.0, DONE)]),
    )
    play = Play(here, crew, **{"failures.hang_timeout_s": 1})
    assert play()["status"] == "done"
    (hang,) = play.shown("hang")
    assert hang == {"ranks": [1], "timeout_s": 1.0, "stacks": {"0": "stacks on a", "1": "stacks on b"}}
    assert [(fields["rank"], fields["message"]) for fields in play.shown("failure")] == [(1, "no progress for 1 s")]


def test_a_slow_start_is_told_once_with_the_stacks_and_ends_nobody(here: Path) -> None:
    crew = ScriptedCrew(
        ScriptedMember("a", [(0.0, {"starting_s": 0.9}), (0.6, DONE)]),
        ScriptedMember("b", [(0.0, {"starting_s": 1.1}), (0.1, {"starting_s": 1.2}), (0.3, DONE)]),
    )
    play = Play(here, crew, **{"failures.hang_timeout_s": 1})
    assert play()["status"] == "done"
    (slow,) = play.shown("slow_start")
    assert slow == {"ranks": [1], "timeout_s": 1.0, "stacks": {"0": "stacks on a", "1": "stacks on b"}}
    assert not play.shown("failure")
