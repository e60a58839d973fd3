"""The text that Prometheus reads, and what it costs a run to have it ready."""

import subprocess
import threading
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.observe.prometheus.exposition import Exposition
from shoal.observe.prometheus.names import TABLE
from shoal.observe.records import Observers, Report
from tests.observe.prometheus.servers import binary, go_on, gpu_workers, train_on_gpus

SECRETS = ["hunter2secret", "hf_abcdefghijklmnopqrstuvwxyz", "AKIAABCDEFGHIJKLMNOP"]


def trained() -> Exposition:
    exposition = Exposition()
    train_on_gpus(exposition)
    return exposition


def test_it_reads_back_with_types_and_help() -> None:
    families = {family.name: family for family in text_string_to_metric_families(trained().text())}
    for metric in TABLE.values():
        family = families[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)


def test_prometheus_own_tool_finds_nothing_to_complain_about() -> None:
    found = subprocess.run(
        [binary("promtool"), "check", "metrics"], input=trained().text(), capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


def test_odd_names_are_escaped() -> None:
    exposition = Exposition('a "run"\nwith\\everything')
    exposition.event("start", {"world_size": 1, "strategy": 'x"} 1\nevil 2'})
    (family, *_) = text_string_to_metric_families(exposition.text())
    (sample,) = family.samples
    assert sample.labels["run"] == 'a "run"\nwith\\everything' and sample.labels["strategy"] == 'x"} 1\nevil 2'


def test_secrets_are_not_told(tmp_path: Path) -> None:
    password, token, key = SECRETS
    exposition = Exposition(f"s3://user:{password}@host-{key}")
    exposition.event("start", {"world_size": 1, "strategy": f"token={token}", "device": f"cpu {token}"})
    exposition.event("failure", {"kind": "died", "message": f"password={password}"})
    exposition.event("warning", {"message": f"https://u:{password}@host"})
    exposition.report(Report(1, 0.1, {f"loss of {token}": 1.0}, {}, workers=None))
    text = exposition.text()
    assert "shoal_metric" in text and not [secret for secret in SECRETS if secret in text]


@pytest.mark.alone
def test_telling_it_costs_next_to_nothing() -> None:
    exposition = trained()
    steps = range(100_000)
    took_s = []
    for _ in range(5):
        began = time.perf_counter()
        for step in steps:
            exposition.tick(step)
        took_s.append(time.perf_counter() - began)
    assert min(took_s) / len(steps) < 1e-5  # below one microsecond; coverage makes more of it
    report = Report(60, 1.0, {f"m{i}": 1.0 for i in range(20)}, {"data": 0.1}, workers=gpu_workers(size=64))
    began = time.perf_counter()
    for _ in range(1000):
        exposition.report(report)
    assert (time.perf_counter() - began) / 1000 < 2e-3


def test_a_reader_does_not_hold_up_who_tells() -> None:
    """A thousand workers are much to write out; what is told meanwhile waits for a copy, not for the writing."""
    exposition = Exposition()
    exposition.event("start", {"run": "r", "world_size": 1000, "step": 0})
    large = Report(10, 1.0, {"train_loss": 1.0}, {"data": 0.1}, workers=gpu_workers(size=1000))
    exposition.report(large)
    small = Report(20, 1.0, {"train_loss": 1.0}, {"data": 0.1})
    closed = threading.Event()
    written = []

    def read() -> None:
        while not closed.is_set():
            written.append(len(exposition.text()))

    reader = threading.Thread(target=read)
    reader.start()
    waited = []
    try:
        deadline = time.monotonic() + 20
        while len(written) < 3 and time.monotonic() < deadline:
            began = time.perf_counter()
            with exposition._lock:
                waited.append(time.perf_counter() - began)
            exposition.report(small)
            time.sleep(0.001)
    finally:
        closed.set()
        reader.join()
    assert min(written) > 1_000_000
    # Another thread may have the interpreter for 5 ms at a time, so most of them count, not the worst.
    assert sorted(waited)[len(waited) // 2] < 1e-3


def test_it_is_an_observer_among_others() -> None:
    exposition = Exposition()
    observers = Observers(exposition)
    observers.event("start", {"run": "r", "world_size": 1, "step": 0})
    observers.tick(1)
    go_on(exposition, 10)
    assert 'shoal_run_step{run="r"} 10.0' in exposition.text()
