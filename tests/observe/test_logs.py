"""Log messages reach the user, in the form that was asked for."""

import io
import json
import logging
from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.observe.logs import hide_logs, show_logs


@pytest.mark.parametrize("as_json", [False, True])
def test_messages_are_shown_between_show_and_hide(as_json: bool) -> None:
    stream = io.StringIO()
    handler = show_logs(as_json, stream)
    logging.getLogger("shoal.data").info("downloading %s", "x")
    hide_logs(handler)
    logging.getLogger("shoal.data").info("not shown")
    (line,) = stream.getvalue().splitlines()
    assert (json.loads(line)["message"] if as_json else line) == "downloading x"


def test_a_download_that_fails_is_told_of_while_it_is_tried(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shoal.data import idx

    monkeypatch.setitem(idx.MIRRORS, "mnist", ("http://127.0.0.1:1/",))
    assert run(["train", "mnist", "data.dir=d", "--log-json"]) == 2
    lines = capfd.readouterr().err.splitlines()
    logged = json.loads(lines[0])
    assert logged["level"] == "warning" and "127.0.0.1" in logged["message"]
    told = json.loads(lines[-1])
    assert told["level"] == "error" and told["message"].startswith("data.dir: train-images-idx3-ubyte.gz not found")
