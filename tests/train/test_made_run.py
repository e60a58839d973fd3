"""That the folder which readers are tested with is like one that a run leaves."""

import json
from pathlib import Path
from typing import Any

from shoal.launch.crew import LocalCrew
from shoal.launch.run import prepare
from tests.launch.gangs import Watch, run_gang
from tests.launch.test_gang import kill
from tests.made_run import make_run


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_a_real_run_that_loses_a_worker_leaves_the_same_files_events_and_fields(tmp_path: Path) -> None:
    made, real = make_run(tmp_path / "made"), tmp_path / "real"
    settings = {"train.steps": 100, "checkpoint.every_steps": 40, "observe.workers_every_s": 0.1, "cluster.workers": 2}
    watch = Watch(real)
    watch.when_step(60, kill(1))
    crew = LocalCrew(2)
    try:
        run_gang(crew, prepare(["digits"], settings, run_dir=real), watch)
    finally:
        crew.close()
    assert {path.name for path in made.iterdir()} <= {path.name for path in real.iterdir()}
    for name in ("metrics", "workers"):
        assert set(lines(made, name)[0]) == set(lines(real, name)[0])
    made_events = {event["event"]: set(event) for event in lines(made, "events")}
    real_events = {event["event"]: set(event) for event in lines(real, "events")}
    assert made_events.keys() <= real_events.keys()
    for name, fields in made_events.items():
        assert fields <= real_events[name], name
    made_summary, real_summary = (json.loads((folder / "summary.json").read_text()) for folder in (made, real))
    assert made_summary.keys() <= real_summary.keys()
    order = [event["event"] for event in lines(real, "events")]
    assert order.index("failure") < order.index("restart") < order.index("forgotten") < order.index("resume")
