import json
from pathlib import Path

import pytest

from shoal.observe.track.facts import read_facts
from tests.made_run import BEGAN, make_run


def test_what_a_run_is(tmp_path: Path) -> None:
    facts = read_facts(make_run(tmp_path / "digits-a"), is_at_work=False)
    assert (facts.name, facts.recipe_name, facts.status) == ("digits-a", "digits", "done")
    assert facts.started == BEGAN + 5 and facts.ended is not None and facts.ended > facts.started
    assert facts.params["train.global_batch"] == "64" and facts.params["model.name"] == "simple_cnn"
    tags = {name.removeprefix("shoal."): value for name, value in facts.tags.items()}
    assert (tags["world_size"], tags["restarts"], tags["strategy"]) == ("2", "1", "ddp")
    assert tags["bottleneck"] == "compute" and tags["verdict"].startswith("compute")


@pytest.mark.parametrize(("ended", "status"), [("failed", "failed"), ("interrupted", "interrupted"), (None, "stopped")])
def test_how_it_ended(tmp_path: Path, ended: str | None, status: str) -> None:
    folder = make_run(tmp_path / "run", ended=ended)
    assert read_facts(folder, is_at_work=False).status == status
    assert read_facts(folder, is_at_work=True).status == (ended or "running")


def test_the_key_is_that_of_the_run_and_of_its_copies(tmp_path: Path) -> None:
    one, copy = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run")
    other = make_run(tmp_path / "a" / "other")
    keys = [read_facts(folder, is_at_work=False).key for folder in (one, copy, other)]
    assert keys[0] == keys[1] != keys[2]


def test_files_that_are_missing_or_no_good(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "summary.json").write_text("{")
    (folder / "recipe.yaml").write_text(": :")
    assert read_facts(folder, is_at_work=False).params == {}
    (folder / "events.jsonl").unlink()
    assert read_facts(folder, is_at_work=True).status == "running"


def test_secrets_in_a_recipe_or_an_error_are_not_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ended=None)
    (folder / "recipe.yaml").write_text("data: {url: 'http://me:hunter2@host', api_key: abcdef, dir: '${env:DIR}'}\n")
    event = {"time": BEGAN + 99, "event": "failed", "message": "could not reach s3://key:hunter3@bucket"}
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    facts = read_facts(folder, is_at_work=False)
    assert facts.params == {"data.url": "http://***@host", "data.api_key": "***", "data.dir": "${env:DIR}"}
    assert facts.tags["shoal.error"] == "could not reach s3://***@bucket"
