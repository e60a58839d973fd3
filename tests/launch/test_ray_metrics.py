"""A run's metrics through Ray's own agent: a real Ray, a real run, and what the machine's metrics port says."""

import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest

from shoal.launch.environment import QUIET_RAY
from shoal.launch.ray_metrics import RayMetrics, ray_collects_metrics
from shoal.observe.prometheus.names import TABLE
from shoal.observe.records import Report
from tests.made_run import make_run

_SCRIPT = """
    import json, sys, threading, time, urllib.request
    import ray, shoal

    ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
             logging_level="ERROR", _system_config={"metrics_report_interval_ms": 1000})
    port = ray.nodes()[0]["MetricsExportPort"]
    overrides = {"train.steps": 100000, "cluster.workers": 2, "cluster.gpus_per_worker": 0, "cluster.pin_cores": False,
                 "checkpoint.every_steps": 200, "observe.every_steps": 10, "observe.workers_every_s": 1}
    run = {"run_dir": sys.argv[1], "progress": "silent", "launcher": "ray"}
    found = {}

    def look():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not ("step" in found and "ray_shoal_cpu_cores" in found["text"]):
            time.sleep(0.5)
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
            lines = [line for line in text.splitlines() if "shoal_" in line]
            found["text"] = "\\n".join(lines)
            if any(line.startswith("ray_shoal_run_step{") and not line.endswith(" 0.0") for line in lines):
                found["step"] = True
        import os, signal
        os.kill(os.getpid(), signal.SIGINT)  # the run saves and ends

    threading.Thread(target=look, daemon=True).start()
    summary = shoal.train("digits", overrides, **run)
    print(json.dumps({"status": summary["status"], "text": found["text"]}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Ray's port told of a run that then was interrupted."""
    folder = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-c", textwrap.dedent(_SCRIPT), str(folder / "digits-on-ray")]
    # Ray keeps sockets in its own, whose paths may not be long.
    with tempfile.TemporaryDirectory(prefix="shoal-ray-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        environment = os.environ | {"RAY_TMPDIR": ray_folder, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        found = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=180, check=False
        )
    assert found.returncode == 0, found.stderr[-3000:]
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_a_run_on_ray_is_told_by_the_metrics_port_of_the_machine(told: dict[str, Any]) -> None:
    assert told["status"] == "interrupted"
    names = set(re.findall(r"^ray_(shoal_\w+)\{", told["text"], re.MULTILINE))
    assert names <= set(TABLE)
    assert {"shoal_run_step", "shoal_step_seconds", "shoal_phase_seconds_total", "shoal_samples_total"} <= names
    assert {"shoal_failures_total", "shoal_restarts_total", "shoal_goodput_ratio", "shoal_cpu_cores"} <= names
    assert 'run="digits-on-ray"' in told["text"]
    assert re.search(r'^ray_shoal_cpu_cores\{.*rank="1".*\} \d', told["text"], re.MULTILINE)


def test_what_rank_0_tells_its_agent_is_seen(tmp_path: Path) -> None:
    make_run(tmp_path / "digits-1", ended=None)
    metrics = RayMetrics()
    metrics.begin(str(tmp_path / "digits-1"))
    report = Report(10, 0.1, {"train_loss": 1.0}, {"data": 0.1}, 640)
    metrics.see(
        [
            {"what": "print", "stream": "stdout", "line": "hello"},
            {"what": "event", "name": "start", "fields": {"run": "digits-1", "world_size": 2, "step": 0}},
            {"what": "tick", "step": 9},
            {"what": "report", "report": report.to_message()},
            {"what": "report", "report": {"nonsense": 1}},  # of no use, and no reason to fail
            {"what": "tick", "step": 12},
        ]
    )
    told = {(sample.name, sample.labels.get("kind")): sample.value for sample in metrics.exposition.samples()}
    metrics.close()
    assert told["shoal_run_step", None] == 12 and told["shoal_failures_total", "died"] == 1


def test_a_ray_of_its_own_collects_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ray_collects_metrics()
    for name, value in QUIET_RAY.items():
        monkeypatch.setenv(name, value)
    assert not ray_collects_metrics()
