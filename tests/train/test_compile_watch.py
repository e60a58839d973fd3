"""What a run tells of torch.compile: real compilations of tiny models."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.core.compile_cache import VARIABLE
from shoal.launch.run import Launch, launch, prepare
from shoal.observe.console import SilentConsole
from shoal.observe.runs import read_events

TASKS = """
import torch
from torch import nn

class Model(nn.Module):
    mode = "a"
    breaks = False
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
    def forward(self, x):
        y = self.layer(x) * 2.0 if self.mode == "never" else self.layer(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return y.tanh()

class Even:
    samples, made = 64, None
    def model(self):
        self.made = Model()
        return self.made
    def datasets(self):
        x = torch.arange(3.0 * self.samples).reshape(-1, 3) / 192
        pairs = list(zip(x, x.sum(1, keepdim=True)))
        return {"train": pairs, "val": pairs[:8]}
    def loss(self, model, batch):
        if model.training:
            self.before()
        return (model(batch[0]) - batch[1]).square().mean()
    def before(self):
        pass

class Uneven(Even):
    samples = 20

class Changing(Even):
    def before(self):
        self.made.mode += "a"

class Broken(Even):
    def model(self):
        model = super().model()
        model.breaks = True
        return model

class Own(Even):
    "Compiles what it likes, whatever the recipe says."
    def loss(self, model, batch):
        return torch.compile(square)(model(batch[0]) - batch[1]).mean()

def square(x):
    return x * x + 1
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def trained(here: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`trained(task, **train)`: the summary and the events of a run with a compiled model."""
    (here / "compiled_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def run(task: str, console: Any = None, **train: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        torch._dynamo.reset()
        recipe = {
            "name": "compiled",
            "task": {"name": f"compiled_tasks:{task}"},
            "train": {"steps": 12, "global_batch": 8, "compile": True} | train,
            "evaluate": {"every_steps": 4},
            "observe": {"every_steps": 2},
            "cluster": {"threads_per_worker": 1, "gpus_per_worker": 0},
        }
        prepared = prepare([recipe], {}, run_dir=here / task)
        summary = launch(prepared, Launch(console or SilentConsole(), lambda: None))
        return summary, read_events(here / task)

    yield run
    sys.modules.pop("compiled_tasks", None)
    torch._dynamo.reset()


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


def test_what_is_compiled_is_told_before_and_after_and_is_no_time_of_steps(
    trained: Callable[..., Any], cache: Path
) -> None:
    summary, events = trained("Even")
    names = [event["event"] for event in events]
    assert names.count("compiling") == 1
    assert names.index("compiling") < names.index("compiled") < names.index("save")
    training, evaluation = named(events, "compiled")
    assert (training["for"], training["step"], training["graphs"]) == ("training", 1, 1)
    assert (evaluation["for"], evaluation["step"]) == ("evaluation", 4)
    assert training["hits"] + training["misses"] == 2, "forward and backward"
    assert training["seconds"] > 0.05 and training["graph_breaks"] == 0
    folder = Path(training["cache"])
    assert folder.is_relative_to(cache / "shoal" / "compile") and any(folder.iterdir())
    assert not named(events, "recompiled") and "recompil" not in summary["verdict"]
    told_s = training["seconds"] + evaluation["seconds"]
    assert summary["seconds"]["compile"] == pytest.approx(told_s, rel=0.2, abs=0.2)
    assert summary["ledger"]["seconds"]["compile"] == pytest.approx(summary["seconds"]["compile"], abs=0.05)
    assert summary["ledger"]["seconds"]["useful"] < 0.5 * told_s, "compiling is not training"
    # Once more, in the same process, with what the cache has.
    _, events = trained("Own", compile=False)
    (own,) = named(events, "compiled")[:1]
    assert own["graphs"] == 1 and own["for"] == "training", "asked of the compiler, not of the recipe"


def test_the_last_short_batch_is_compiled_once_more_and_the_verdict_says_so(trained: Callable[..., Any]) -> None:
    summary, events = trained("Uneven")
    (again,) = named(events, "recompiled")
    assert again["step"] == 3 and again["count"] == 1 and again["function"].startswith("forward (compiled_tasks.py:")
    assert again["reason"] == "a batch of another shape: dimension 0 of x was 8, then 4"
    assert "1 recompilation took" in summary["verdict"] and again["reason"] in summary["verdict"]
    assert "mark_dynamic" in summary["verdict"] and "train.compile=false" in summary["verdict"]


def test_where_the_compiler_gives_up_it_is_told_and_lines_stay_few(trained: Callable[..., Any]) -> None:
    with torch._dynamo.config.patch(recompile_limit=9):
        summary, events = trained("Changing")
    again = named(events, "recompiled")
    assert len(again) == 5 and again[-1]["words"].endswith("(what follows is in the verdict)")
    assert "self.mode ==" in again[0]["guard"]
    limit = named(events, "recompile_limit")
    assert limit and limit[0]["function"].startswith("forward (compiled_tasks.py:")
    # Nine versions but for the first one of each kind; with those that had no line.
    count = int(summary["verdict"].partition(" recompilations")[0].rsplit(" ", 1)[1])
    assert count == 7 and "PyTorch has given up compiling forward" in summary["verdict"]


def test_graph_breaks_are_named(trained: Callable[..., Any]) -> None:
    _, events = trained("Broken", steps=4)
    training = named(events, "compiled")[0]
    assert training["graphs"] == 2 and training["graph_breaks"] == 1
    assert "graph_break" in training["breaks"][0] and "1 graph break" in training["words"]


class FromElsewhere(SilentConsole):
    """Compiles in a thread of its own after the first step, as a library might."""

    def tick(self, step: int) -> None:
        if step == 1:
            thread = threading.Thread(target=lambda: torch.compile(torch.nn.Linear(2, 2))(torch.zeros(1, 2)))
            thread.start()
            thread.join()


def test_what_another_thread_compiles_is_not_booked_to_the_steps(trained: Callable[..., Any]) -> None:
    summary, events = trained("Even", FromElsewhere(), compile=False, steps=3)
    assert not named(events, "compiling") and "compile" not in summary["seconds"]
    assert not torch._dynamo.callback_handler.start_callbacks, "nothing stays registered"


def test_a_cache_that_cannot_be_used_is_told(
    trained: Callable[..., Any], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _, events = trained("Even", steps=2)
    (warning,) = [event for event in named(events, "warning") if "compiled code" in event["message"]]
    assert "is not a folder" in warning["message"] and VARIABLE in warning["message"]


def test_a_run_that_compiles_nothing_tells_nothing_and_makes_no_folder(
    trained: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    summary, events = trained("Even", compile=False)
    assert not [event for event in events if "compil" in event["event"]] and "compile" not in summary["seconds"]
    assert not (tmp_path / "empty").exists()


def test_the_compiler_is_not_loaded_to_watch_it() -> None:
    code = "import sys, shoal.train.compile_watch; print('torch._dynamo' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == "False"


LATE = """
import sys, types, torch
from shoal.core.group import Group
from shoal.observe.clock import Clock
from shoal.train.compile_watch import CompileWatch
from shoal.train.vitals import Vitals

class Shown:
    def event(self, name, fields): print(name, fields.get("graphs", ""))
    def tick(self, step): pass

assert "torch._dynamo" not in sys.modules
run = types.SimpleNamespace(observer=Shown(), clock=Clock(), vitals=Vitals(Group(), Clock()))
run.state = types.SimpleNamespace(step=1)
watch = CompileWatch(run, rank=0)
watch.tick(1)
torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.zeros(1, 2))
watch.tick(2)
torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1, 2))
watch.event("last", {})
watch.tick(3)
watch.detach()
"""


def test_what_is_compiled_before_anybody_looked_is_not_missed() -> None:
    told = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.split("\n")[:4] == ["compiled 1", "compiling ", "last ", "compiled 1"], told.stdout
