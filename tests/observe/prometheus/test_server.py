"""A real Prometheus reads a real run by the configuration that ships, and every panel has something to show."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.cluster import free_ports
from shoal.observe.prometheus.endpoint import serve
from shoal.observe.prometheus.exposition import Exposition
from shoal.observe.prometheus.rules import ALERTS
from shoal.observe.prometheus.shipped_files import SHIPPED
from tests.observe.prometheus import recorded
from tests.observe.prometheus.servers import (
    Prometheus,
    binary,
    go_on,
    prometheus,
    shipped_config,
    text_server,
    train_on_gpus,
)

WITHIN_S = 90.0
_RECIPE = [
    *("digits", "train.steps=1000000", "checkpoint.every_steps=300", "evaluate.every_steps=300"),
    *("cluster.gpus_per_worker=0", "cluster.threads_per_worker=1", "observe.workers_every_s=1"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, which reads a real run, one with GPUs that is told by hand, a machine of Ray, and two GPUs."""
    binary("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "shoal.cli.main", "train", *_RECIPE, f"observe.metrics_port={port}"]
    command += ["--run-dir", str(folder / "digits-real")]
    with (folder / "train.log").open("w") as log:
        training = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
    by_hand = Exposition()
    train_on_gpus(by_hand)
    endpoint = serve(by_hand, "127.0.0.1", 0)
    closed = threading.Event()

    def go_on_training() -> None:
        step = 50
        while not closed.wait(1.0):
            step += 10
            go_on(by_hand, step)

    goes_on = threading.Thread(target=go_on_training)
    goes_on.start()
    try:
        with text_server(recorded.ray) as ray, text_server(recorded.dcgm) as dcgm:
            config = shipped_config([port, endpoint.port], [ray], [dcgm], folder)
            with prometheus(folder, config) as found:
                _wait_for(found, 'rate(shoal_phase_seconds_total{run="digits-real"}[30s])', training, folder)
                yield found
    finally:
        closed.set()
        goes_on.join()
        endpoint.close()
        if training.poll() is None:
            os.killpg(training.pid, signal.SIGKILL)
        training.wait()


def _wait_for(found: Prometheus, expr: str, training: "subprocess.Popen[bytes]", folder: Path) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not found.query(expr):
        assert training.poll() is None, (folder / "train.log").read_text()[-3000:]
        assert time.monotonic() < deadline, f"nothing after {WITHIN_S:g} s: {expr}"
        time.sleep(0.2)


def _as_grafana_asks(expr: str) -> str:
    for name, value in {"$__rate_interval": "30s", "$run": ".*", "$rank": ".*"}.items():
        expr = expr.replace(name, value)
    assert "$" not in expr
    return expr


def test_every_question_of_the_dashboard_has_an_answer(server: Prometheus) -> None:
    panels = json.loads((SHIPPED / "dashboard.json").read_text())["panels"]
    asked = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])]
    assert len(asked) > 40
    deadline = time.monotonic() + 30
    while silent := [(title, expr) for title, expr in asked if not server.query(_as_grafana_asks(expr))]:
        assert time.monotonic() < deadline, silent
        time.sleep(0.5)


def test_the_variables_of_the_dashboard_find_runs_and_workers(server: Prometheus) -> None:
    runs = server.get("/api/v1/label/run/values", **{"match[]": "shoal_run_info"})
    assert {"digits-real", "gpt2-on-gpus"} <= set(runs)
    ranks = server.get("/api/v1/label/rank/values", **{"match[]": 'shoal_phase_seconds_total{run=~"gpt2.*"}'})
    assert ranks == ["0", "1"]


def test_every_alert_is_loaded_and_none_fires(server: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = server.get("/api/v1/rules")["groups"][0]["rules"]
        return found

    deadline = time.monotonic() + 20
    while any(rule["health"] == "unknown" for rule in rules()) and time.monotonic() < deadline:
        time.sleep(0.2)
    loaded = {rule["name"]: (rule["health"], rule["state"]) for rule in rules()}
    assert loaded == dict.fromkeys([alert.name for alert in ALERTS], ("ok", "inactive"))


def test_what_ray_tells_has_the_names_of_the_endpoint(server: Prometheus) -> None:
    (found,) = server.query('shoal_run_step{run="run-on-ray"}')
    assert found["metric"]["job"] == "ray" and not [name for name in found["metric"] if name.startswith("otel")]
    assert not server.query('{__name__=~"ray_shoal_.*"}')


def test_numbers_of_the_real_run(server: Prometheus) -> None:
    (step,) = server.query('shoal_run_step{run="digits-real"}')
    assert float(step["value"][1]) > 0
    (rate,) = server.query('shoal_samples_per_second{run="digits-real"}')
    assert float(rate["value"][1]) > 0
    # Every second is in some phase, and in no more than one.
    (passed,) = server.query('time() - shoal_run_start_timestamp_seconds{run="digits-real"}')
    (booked,) = server.query('sum(shoal_phase_seconds_total{run="digits-real", rank="0", phase!="start"})')
    assert 0 < float(booked["value"][1]) < float(passed["value"][1]) + 1.0
