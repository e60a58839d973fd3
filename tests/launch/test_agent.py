"""An agent with real trainers of a task whose code says what each test is about."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.agent import Agent
from shoal.launch.nursery import new_nursery_name
from tests.launch.processes import is_alive, num_descriptors, parent_of, wait_until_dead
from tests.tiny import own_recipe, write_own_task


@pytest.fixture(scope="module")
def agent() -> Iterator[Agent]:
    agent = Agent(new_nursery_name(), lease_s=None)
    yield agent
    agent.close()


def job(folder: Path, in_loss: str, starts: int = 0, steps: int = 8, **overrides: Any) -> dict[str, Any]:
    """That of the only worker of a run; `in_loss` runs in every step."""
    folder.mkdir(exist_ok=True)
    write_own_task(folder, "agents_task", in_loss)
    recipe = own_recipe("agents_task") | {"train": {"steps": steps, "global_batch": 8}} | overrides
    return {
        "recipe": recipe,
        "run_dir": str(folder / "run"),
        "resume": False,
        "restarts": 0,
        "starts": starts,
        "started": time.time(),
        "marks": {},
        "first_step_s": None,
        "threads": 1,
        "node": "here",
        "address": "127.0.0.1",
        "local_rank": 0,
        "local_world_size": 1,
        "environment": {},
        "directory": str(folder),
        "paths": [],
        "meeting": {"rank": 0, "world_size": 1, "host": "127.0.0.1", "port": 0, "timeout_s": 60},
    }


def follow(agent: Agent, until: Callable[[dict[str, Any]], bool], attempt: int = 0) -> list[dict[str, Any]]:
    """All messages up to the one that was waited for."""
    found: list[dict[str, Any]] = []
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for message in agent.poll(attempt, 1.0)["messages"]:
            found.append(message)
            if until(message):
                return found
    raise AssertionError(f"never said, after {found}")


def is_end(message: dict[str, Any]) -> bool:
    return message["what"] in ("ended", "failed", "died")


def printed(text: str) -> Callable[[dict[str, Any]], bool]:
    return lambda message: message["what"] == "print" and text in message["line"]


def test_a_trainer_tells_what_happens_to_the_end(agent: Agent, here: Path) -> None:
    pid = agent.start(job(here, "pass"))
    messages = follow(agent, is_end)
    assert messages[-1]["what"] == "ended" and messages[-1]["summary"]["status"] == "done"
    events = [message["name"] for message in messages if message["what"] == "event"]
    assert events[:2] == ["start", "workers"] and events[-1] == "done"
    reports = [message["report"]["step"] for message in messages if message["what"] == "report"]
    assert reports == [1, 2, 4, 6, 8, 8]
    wait_until_dead(pid)
    assert agent.poll(0, 0.0)["messages"] == []
    agent.kill()


def test_prints_of_both_streams_come_in_order_before_what_was_said_after_them(agent: Agent, here: Path) -> None:
    code = (
        "import sys; model.training and (print('out', step, 'ä' * 2), print('err', step, file=sys.stderr), "
        "os.write(1, b'raw\\n'), print('long' * 9999) if step == 3 else None)"
    )
    agent.start(job(here, code, steps=4))
    messages = follow(agent, is_end)
    lines = {
        name: [m["line"] for m in messages if m["what"] == "print" and m["stream"] == name]
        for name in ("stdout", "stderr")
    }
    assert [line for line in lines["stdout"] if line.startswith("out")] == [f"out {step} ää" for step in (1, 2, 3, 4)]
    assert [line for line in lines["stderr"] if line.startswith("err")] == [f"err {step}" for step in (1, 2, 3, 4)]
    assert lines["stdout"].count("raw") == 4
    (cut,) = [line for line in lines["stdout"] if line.startswith("long")]
    assert cut == ("long" * 9999)[:10_000]
    order = [
        f"step {m['report']['step']}" if m["what"] == "report" else m["line"][:5]
        for m in messages
        if m["what"] == "report" or (m["what"] == "print" and m["stream"] == "stdout" and m["line"].startswith("out"))
    ]
    assert order.index("out 1") < order.index("step 1") < order.index("step 2") < order.index("step 4")
    assert order.index("out 2") < order.index("step 2") and order.index("out 4") < order.index("step 4")
    agent.kill()


def test_a_line_without_an_end_is_told_when_the_trainer_ends(agent: Agent, here: Path) -> None:
    agent.start(job(here, "os.write(2, b'terminate called') and os.abort()"))
    messages = follow(agent, is_end)
    assert messages[-1] == {"what": "died", "status": -signal.SIGABRT, "because": None}
    assert [message["line"] for message in messages if message["what"] == "print"][-1] == "terminate called"


def test_a_line_without_an_end_comes_before_the_end_that_is_told(agent: Agent, here: Path) -> None:
    agent.start(job(here, "step == 8 and model.training and os.write(1, b'almost done')"))
    messages = follow(agent, is_end)
    assert messages[-1]["what"] == "ended"
    assert [message["line"] for message in messages if message["what"] == "print"][-1] == "almost done"
    agent.kill()


def test_stop_saves_and_ends(agent: Agent, here: Path) -> None:
    agent.start(job(here, "import time; time.sleep(0.02)", steps=1000, checkpoint={"every_steps": 1000}))
    follow(agent, lambda message: message["what"] == "report")
    agent.stop(7, "SIGINT")  # meant for another start
    time.sleep(0.3)
    agent.stop(0, "SIGINT")
    summary = follow(agent, is_end)[-1]["summary"]
    assert summary["status"] == "interrupted" and summary["ended_by"] == "SIGINT" and summary["step"] > 8
    assert (here / "run" / "checkpoints" / f"step-{summary['step']:08d}").is_dir()
    agent.kill()


def test_sigterm_to_a_trainer_is_a_preemption(agent: Agent, here: Path) -> None:
    pid = agent.start(job(here, "import time; time.sleep(0.02)", steps=1000))
    follow(agent, lambda message: message["what"] == "report")
    os.kill(pid, signal.SIGTERM)
    assert follow(agent, is_end)[-1]["summary"]["ended_by"] == "preemption"
    agent.kill()


def test_the_stacks_of_a_busy_trainer_name_the_line_that_keeps_it_busy(agent: Agent, here: Path) -> None:
    busy = "step == 2 and print('busy', flush=True); step == 2 and sum(iter(int, 1))"  # for ever, and in C
    agent.start(job(here, busy))
    follow(agent, printed("busy"))
    for _ in range(2):
        stacks = agent.stacks()
        assert "agents_task.py" in stacks and "in loss" in stacks and "run_loop" in stacks
        assert stacks.count("agents_task.py") == 1, "not what an earlier call wrote"
    agent.kill()
    assert agent.stacks() == "no trainer"


def test_a_trainer_whose_code_takes_the_signal_away_is_not_ended_by_asking_for_its_stacks(
    agent: Agent, here: Path
) -> None:
    pid = agent.start(job(here, "import signal, time; signal.signal(signal.SIGUSR1, signal.SIG_DFL); time.sleep(0.05)"))
    follow(agent, lambda message: message["what"] == "report")
    assert "has given up SIGUSR1" in agent.stacks()
    assert is_alive(pid)
    agent.kill()


def test_the_stacks_of_a_stopped_trainer_say_so_and_it_can_be_killed(agent: Agent, here: Path) -> None:
    pid = agent.start(job(here, "import time; time.sleep(0.02)", steps=1000))
    follow(agent, lambda message: message["what"] == "report")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2)
    assert f"process {pid} is stopped (state T)" in agent.stacks()
    before_s = agent.poll(0, 0.0)["still_s"]
    assert before_s > 0.5 and agent.poll(0, 0.0)["starting_s"] == 0.0
    os.kill(pid, signal.SIGCONT)
    time.sleep(1.0)
    assert agent.poll(0, 0.0)["still_s"] < before_s, "it moves again"
    os.kill(pid, signal.SIGSTOP)
    agent.kill()
    wait_until_dead(pid)


def test_a_trainer_that_loads_its_data_does_not_count_as_standing(agent: Agent, here: Path) -> None:
    told = job(here, "pass")
    task = here / "agents_task.py"
    task.write_text(f"import time; print('loading', flush=True); time.sleep(600)\n{task.read_text()}")
    pid = agent.start(told)
    follow(agent, printed("loading"))
    time.sleep(1.2)
    answer = agent.poll(0, 0.0)
    assert answer["still_s"] == 0.0 and answer["starting_s"] > 0.5
    os.kill(pid, signal.SIGSTOP)  # which is another matter
    time.sleep(1.2)
    assert agent.poll(0, 0.0)["still_s"] > 0.4
    agent.kill()


def test_modules_are_found_on_the_launchers_path_where_its_folder_is_not_there(agent: Agent, here: Path) -> None:
    agent.start(job(here, "print('found')") | {"directory": "/nowhere", "paths": ["/nor-here", str(here)]})
    messages = follow(agent, is_end)
    assert messages[-1]["what"] == "ended" and any(printed("found")(message) for message in messages)
    agent.kill()


def test_what_a_trainer_has_started_ends_with_it(agent: Agent, here: Path) -> None:
    """As loader workers, which would hold its lock and its pipes for seconds."""
    code = "import subprocess; step == 1 and print('child', subprocess.Popen(['sleep', '600']).pid, flush=True)"
    for end in (signal.SIGKILL, signal.SIGSEGV):
        pid = agent.start(job(here / str(int(end)), f"{code}; import time; time.sleep(0.05)", steps=1000))
        line = follow(agent, printed("child"))[-1]["line"]
        asked = time.monotonic()
        os.kill(pid, end)
        assert follow(agent, is_end)[-1] == {"what": "died", "status": -end, "because": None}
        assert time.monotonic() - asked < 3.0
        wait_until_dead(int(line.split()[1]))


def test_an_exit_and_a_silent_end_are_told_apart(agent: Agent, here: Path) -> None:
    agent.start(job(here / "a", "import sys; sys.exit('enough')"))
    failed = follow(agent, is_end)[-1]
    assert (failed["what"], failed["kind"], failed["type"], failed["message"]) == (
        "failed",
        "exception",
        "SystemExit",
        "enough",
    )
    agent.start(job(here / "b", "os._exit(7)"))
    assert follow(agent, is_end)[-1] == {"what": "died", "status": 7, "because": None}


def test_an_error_of_the_user_is_told_with_their_lines_and_without_ours_before_them(agent: Agent, here: Path) -> None:
    agent.start(job(here, "raise KeyError('gloo says connection reset by peer')"))
    failed = follow(agent, is_end)[-1]
    assert failed["kind"] == "exception" and failed["type"] == "KeyError" and not failed["by_network"]
    lines = failed["traceback"].splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("KeyError: ")
    assert "agents_task.py" in failed["traceback"] and "shoal/launch" not in failed["traceback"]


@pytest.mark.parametrize(
    ("code", "kind", "by_network"),
    [
        ("raise RuntimeError('[gloo/transport/tcp/pair.cc:534] Connection closed by peer')", "exception", True),
        ("raise torch.distributed.DistNetworkError('x')", "exception", True),
        ("raise RuntimeError('shapes differ')", "exception", False),
        ("raise __import__('shoal').RunError('connection refused by the database')", "run", False),
        ("raise __import__('shoal').UserError('data: nccl.bin is corrupt')", "run", False),
    ],
)
def test_errors_of_the_network_are_told_from_others(
    agent: Agent, here: Path, code: str, kind: str, by_network: bool
) -> None:
    agent.start(job(here, code))
    failed = follow(agent, is_end)[-1]
    assert (failed["kind"], failed["by_network"]) == (kind, by_network)


def test_a_new_start_ends_what_is_left_and_its_messages_are_not_mixed_with_the_old(agent: Agent, here: Path) -> None:
    first = agent.start(job(here / "a", "print('old', step, flush=True); import time; time.sleep(0.01)", steps=1000))
    follow(agent, printed("old"))
    second = agent.start(job(here / "b", "print('new', step, flush=True)", starts=1))
    assert not is_alive(first) and second != first
    # Asked late, for the old one: it is gone, and what the new one says is left to those who ask for that.
    assert agent.poll(0, 5.0)["messages"] == [{"what": "died", "status": None, "because": None}]
    messages = follow(agent, is_end, attempt=1)
    assert not any(printed("old")(message) for message in messages)
    assert next(message["line"] for message in messages if message["what"] == "print") == "new 1"
    assert messages[-1]["what"] == "ended"
    agent.kill()


@pytest.mark.parametrize("way", ["killed", "dies"])
def test_what_a_trainer_has_started_goes_with_it_in_whatever_group_it_is(agent: Agent, here: Path, way: str) -> None:
    """As ninja starts compilers."""
    line = (
        "import subprocess, time; child = subprocess.Popen(['sh', '-c', 'sleep 300 & wait'], process_group=0); "
        f"print('child', child.pid, flush=True); time.sleep({60 if way == 'killed' else 1}); os._exit(3)"
    )
    agent.start(job(here, line))
    found = follow(agent, printed("child"))[-1]["line"]
    child = int(found.split()[-1])
    while not (below := Path(f"/proc/{child}/task/{child}/children").read_text().split()):
        time.sleep(0.05)
    if way == "killed":
        agent.kill()
    else:
        follow(agent, is_end)
    wait_until_dead(child, *map(int, below))


def test_whoever_waits_for_news_learns_of_a_kill(agent: Agent, here: Path) -> None:
    import threading

    agent.start(job(here, "import time; time.sleep(60)"))
    follow(agent, lambda message: message["what"] == "event" and message["name"] == "workers")
    answers: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(agent.poll(0, 30.0)))
    thread.start()
    time.sleep(0.1)
    agent.kill()
    thread.join(timeout=5.0)
    assert answers[0]["messages"][-1]["what"] == "died"


def test_when_the_warm_process_was_killed_the_trainer_is_dead_and_the_next_start_makes_another(here: Path) -> None:
    agent = Agent(new_nursery_name(), lease_s=None)
    pid = agent.start(job(here / "a", "import time; time.sleep(0.02)", steps=1000))
    follow(agent, lambda message: message["what"] == "report")
    os.kill(parent_of(pid), signal.SIGKILL)
    died = follow(agent, is_end)[-1]
    assert died == {"what": "died", "status": None, "because": "the process that the worker was forked from is gone"}
    wait_until_dead(pid)
    agent.start(job(here / "b", "pass", starts=1))
    assert follow(agent, is_end, attempt=1)[-1]["what"] == "ended"
    agent.close()


@pytest.mark.slow
def test_a_trainer_whose_launcher_is_silent_is_ended(here: Path) -> None:
    agent = Agent(new_nursery_name(), lease_s=1.0)
    pid = agent.start(job(here, "import time; time.sleep(0.02)", steps=100_000))
    follow(agent, lambda message: message["what"] == "report")
    for _ in range(6):  # as long as somebody asks, it goes on
        time.sleep(0.3)
        agent.poll(0, 0.0)
    assert is_alive(pid)
    wait_until_dead(pid, within_s=5.0)
    died = follow(agent, is_end)[-1]
    assert died["because"] == "the worker was ended because nobody had asked for it for 1 s"
    agent.close()


def test_the_port_is_open_at_the_given_address_only(agent: Agent) -> None:
    port = agent.open_port("127.0.0.1")
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    again = agent.open_port("127.0.0.1")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)
    socket.create_connection(("127.0.0.1", again), timeout=5).close()


def test_starts_leave_no_descriptors_and_no_threads_behind(agent: Agent, here: Path) -> None:
    import threading

    agent.start(job(here / "first", "os._exit(3)"))
    follow(agent, is_end)
    agent.kill()
    descriptors, threads = num_descriptors(os.getpid()), threading.active_count()
    for number in range(3):
        agent.open_port("127.0.0.1")
        agent.start(job(here / str(number), "os._exit(3)"))
        follow(agent, is_end)
        agent.kill()
    assert (num_descriptors(os.getpid()), threading.active_count()) == (descriptors, threads)
