"""A run's folder as a run leaves it, made by hand: two workers, one of them killed on the way, and started again.

What a reader of folders may count on; what a real run writes is held against it in tests/train/test_made_run.py.
"""

import json
import math
from pathlib import Path
from typing import Any

from shoal.observe.phases import PHASES
from shoal.observe.system import NAMES
from shoal.recipe.load import load_recipe

BEGAN = 1_794_850_000.0
"""When the user asked, in unix seconds."""
STEP_S = 0.1
"""What a step takes, all in all."""
RESTART_S = 12.0
WORKER = {"node": "vm", "agent_pid": 90, "host": "vm", "address": "127.0.0.1", "device": "cpu", "device_name": "cpu"}


def make_run(folder: Path, *, steps: int = 400, ended: str | None = "done", fails_at: int | None = 250) -> Path:
    """Write a run of `steps` steps that reports every 10 and saves every 100; `ended` None: it still runs."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(load_recipe(["digits"], {"cluster.workers": 2, "train.steps": 400}).to_yaml())
    now = BEGAN + 5.0
    events: list[dict[str, Any]] = []
    reports: list[dict[str, Any]] = []
    workers: list[dict[str, Any]] = []

    def tell(event: str, **fields: Any) -> None:
        events.append({"time": round(now, 3), "event": event, **fields})

    def start(step: int) -> None:
        tell(
            *("start",),
            run=folder.name,
            asked=BEGAN,
            clock=now,
            startup_s={"prepared": 0.5, "agents": 0.6, "trainer": 4.1, "joined": 4.2, "built": 4.9},
            world_size=2,
            strategy="ddp",
            parameters=13754,
            device="cpu",
            train_samples=1438,
            num_steps=400,
            step=step,
            global_batch=64,
            micro_batch=32,
            accumulation=1,
        )
        tell("workers", workers=[{"rank": rank, "pid": 100 + rank, "threads": 1, **WORKER} for rank in range(2)])

    def train(first: int, last: int) -> None:
        nonlocal now
        for step in range(first + 1, last + 1):
            now += STEP_S
            if step == first + 1:
                tell("first_step", step=step)
            if step % 10 == 0:
                reports.append(_report(step, now))
            if step % 50 == 0:
                workers.append(_workers(step, now))
            if step % 100 == 0:
                loss, accuracy = math.exp(-step / 100), 1 - math.exp(-step / 80)
                metrics = {"val_loss": loss, "val_accuracy": accuracy}
                reports.append(_report(step, now, metrics, {"evaluate": 0.0}))
                path = f"{folder}/checkpoints/step-{step:08d}"
                tell("save", step=step, path=path, bytes=223212, stall_s=0.001, seconds=0.02)

    start(0)
    if fails_at is not None:
        train(0, fails_at)
        tell("failure", rank=1, node="vm", kind="died", message="the worker's process was killed by SIGKILL")
        saved = fails_at // 100 * 100
        tell("restart", restarts=1, from_step=saved)
        now += RESTART_S
        lost = [report for report in reports if report["step"] > saved]
        seconds = {phase: sum(report["seconds"].get(phase, 0.0) for report in lost) for phase in PHASES}
        tell("forgotten", after_step=saved, to_step=fails_at, until=now - RESTART_S, seconds=seconds)
        reports[:] = [report for report in reports if report["step"] <= saved]
        tell("resume", step=saved, path=f"{folder}/checkpoints/step-{saved:08d}")
        start(saved)
        train(saved, steps)
    else:
        train(0, steps)
    if ended is not None:
        tell(ended, step=steps, seconds={"end": 0.0})
        _write_summary(folder, ended, steps, 0 if fails_at is None else 1)
    for name, lines in {"events": events, "metrics": reports, "workers": workers}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _report(
    step: int, now: float, metrics: dict[str, float] | None = None, seconds: dict[str, float] | None = None
) -> dict[str, Any]:
    """Ten steps; half of the time is the backward pass, a fifth each data and forward, the rest communication."""
    shares = {"data": 0.2, "forward": 0.2, "backward": 0.5, "comm": 0.08, "optimizer": 0.02}
    trained = {"train_loss": 2.3 * math.exp(-step / 120), "lr": 0.003 * (1 - step / 400), "samples_per_s": 640.0}
    return {
        "time": round(now, 3),
        "step": step,
        "epoch": round(step / 23, 6),
        "samples": 64 * step,
        "metrics": trained if metrics is None else metrics,
        "seconds": {name: share * 10 * STEP_S for name, share in shares.items()} if seconds is None else seconds,
    }


def _workers(step: int, now: float) -> dict[str, Any]:
    """Fifty steps; rank 1 is a little slower, and rank 0 waits for it."""
    shares = {"data": (0.2, 0.2), "forward": (0.2, 0.22), "backward": (0.5, 0.54), "comm": (0.08, 0.02)}
    system: dict[str, list[float | None]] = {name: [None, None] for name in NAMES}
    system |= {"cpu_cores": [0.97, 0.99], "memory_bytes": [4.1e8, 4.2e8], "host_memory_used": [0.31, 0.31]}
    system |= {"net_sent_bytes_per_s": [1.5e6, 1.5e6], "net_received_bytes_per_s": [1.5e6, 1.5e6]}
    return {
        "time": round(now, 3),
        "step": step,
        "over_s": 50 * STEP_S,
        "seconds": {name: [share * 50 * STEP_S for share in pair] for name, pair in shares.items()},
        "system": system,
        "bottleneck": "compute",
        "verdict": "compute: 72% of a step is computing",
    }


def _write_summary(folder: Path, status: str, step: int, restarts: int) -> None:
    summary = {
        "run": folder.name,
        "run_dir": str(folder),
        "status": status,
        "step": step,
        "epoch": round(step / 23, 4),
        "metrics": {"train_loss": 0.08, "val_loss": 0.06, "val_accuracy": 0.98},
        "weights_sha256": "f22d2a0f5773ab6503d6504a4ae03ce395302be76f7d73a50e3ce6f3fe97ccd8",
        "samples_per_s": 640.0,
        "time_to_first_step_s": 5.1,
        "restarts": restarts,
        "resumed_from_step": 200 if restarts else None,
        "world_size": 2,
        "goodput": 0.8,
        "verdict": "compute: 72% of a step is computing",
        "bottleneck": "compute",
        "seconds": {"start": 5.0, "data": 8.0, "forward": 8.0, "backward": 20.0, "comm": 3.2, "optimizer": 0.8},
        "data": {"wait_share": 0.2, "skipped": 0},
        "ended_by": status,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
