"""A real Prometheus with the configuration that ships, and small servers of what others export."""

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.bench.cluster import free_ports
from shoal.observe.prometheus.exposition import Exposition
from shoal.observe.prometheus.shipped_files import SHIPPED
from shoal.observe.records import Report, Workers
from shoal.observe.system import NAMES


def binary(name: str) -> str:
    """Where a program of Prometheus is."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt install prometheus)")
    return found


@contextlib.contextmanager
def text_server(text: Callable[[], str]) -> Iterator[int]:
    """An exporter that tells this; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


def shipped_config(shoal: Sequence[int], ray: Sequence[int], dcgm: Sequence[int], folder: Path) -> dict[str, Any]:
    """As it ships, but with these ports, and read every second."""
    config: dict[str, Any] = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    for name, ports in {"shoal": shoal, "dcgm": dcgm}.items():
        jobs[name]["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    discovered = folder / "ray.json"  # in the form that Ray writes
    discovered.write_text(json.dumps([{"labels": {"job": "ray"}, "targets": [f"127.0.0.1:{port}" for port in ray]}]))
    jobs["ray"]["file_sd_configs"] = [{"files": [str(discovered)]}]
    return config


class Prometheus:
    """One that runs."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[dict[str, Any]]:
        result: list[dict[str, Any]] = self.get("/api/v1/query", query=expr)["result"]
        return result


@contextlib.contextmanager
def prometheus(folder: Path, config: dict[str, Any]) -> Iterator[Prometheus]:
    """Started with this configuration and the alerts that ship."""
    (port,) = free_ports(1)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copyfile(SHIPPED / "alerts.yml", folder / "alerts.yml")
    command = [
        *(binary("prometheus"), f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"),
    ]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        server = Prometheus(port)
        deadline = time.monotonic() + 30
        while True:
            try:
                server.query("vector(1)")
                break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "prometheus.log").read_text()
                time.sleep(0.1)
        yield server
    finally:
        process.kill()
        process.wait()


def gpu_workers(step_s: float = 0.1, size: int = 2) -> Workers:
    """Ten steps of workers with a GPU each."""
    shares = {"data": 0.1, "forward": 0.3, "backward": 0.5, "comm": 0.08, "optimizer": 0.02}
    system: dict[str, list[float | None]] = {name: [None] * size for name in NAMES}
    known = {"gpu_busy": 0.93, "gpu_memory_bytes": 7.1e10, "gpu_memory_used": 0.88, "gpu_power_w": 612.0}
    known |= {"gpu_celsius": 61.0, "cpu_cores": 1.2, "memory_bytes": 4e9, "host_memory_used": 0.3}
    known |= {"disk_read_bytes_per_s": 1e6, "disk_written_bytes_per_s": 2e6}
    known |= {"net_received_bytes_per_s": 1e8, "net_sent_bytes_per_s": 1e8}
    system |= {name: [value] * size for name, value in known.items()}
    seconds = {phase: [share * step_s * 10] * size for phase, share in shares.items()}
    return Workers(10 * step_s, seconds, system, "compute", "compute: 90% of the time is computing")


def train_on_gpus(observer: Exposition, run: str = "gpt2-on-gpus", steps: int = 50) -> None:
    """Tell of a run with GPUs that counts tokens, as a real one does."""
    start = {"run": run, "world_size": 2, "strategy": "fsdp", "device": "cuda:0", "num_steps": 1000, "step": 0}
    observer.event("start", start | {"global_batch": 16, "asked": time.time() - 60, "clock": time.time()})
    for step in range(10, steps + 1, 10):
        go_on(observer, step)
    observer.event("save", {"step": steps, "bytes": 10**9, "stall_s": 0.2, "seconds": 3.5})


def go_on(observer: Exposition, step: int) -> None:
    """Ten steps more."""
    observer.tick(step)
    metrics = {"train_loss": 3.0, "lr": 1e-3, "samples_per_s": 160.0, "tokens_per_s": 163840.0, "val_accuracy": 0.4}
    seconds = {phase: values[0] for phase, values in gpu_workers().seconds.items()}
    observer.report(Report(step, step / 100, metrics, seconds, 16 * step, workers=gpu_workers()))
