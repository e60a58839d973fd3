"""Unit tests of the alert rules, for `promtool test rules`: each fires and clears, and a run that is well, starts, goes
on after days, or has ended is left in peace."""

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.observe.prometheus.rules import ALERTS

_EVERY = "1m"
"""A sample, and a look at the rules."""
_LONG = 60 * 6
"""Minutes."""


def flat(value: float, minutes: int = _LONG) -> str:
    """The same all the time."""
    return f"{value:g}x{minutes}"


def growing(per_minute: float, minutes: int = _LONG, start: float = 0.0) -> str:
    """More with every sample."""
    return f"{start:g}+{per_minute:g}x{minutes}"


def then(*parts: str) -> str:
    """One after the other."""
    return " ".join(parts)


def phase(name: str, rank: int = 0) -> str:
    """The name of a series of seconds."""
    return f'shoal_phase_seconds_total{{run="r", rank="{rank}", phase="{name}"}}'


def failures(kind: str) -> str:
    """The name of a series of failures."""
    return f'shoal_failures_total{{run="r", kind="{kind}"}}'


ACTIVE, STARTED = 'shoal_run_active{run="r"}', 'shoal_run_start_timestamp_seconds{run="r"}'
PROGRESS = 'shoal_run_progress_timestamp_seconds{run="r"}'
SAVED, INTERVAL = 'shoal_checkpoint_last_timestamp_seconds{run="r"}', 'shoal_checkpoint_interval_seconds{run="r"}'
SAVE_FAILURES, RATE = 'shoal_checkpoint_failures_total{run="r"}', 'shoal_samples_per_second{run="r"}'
GPU = 'shoal_gpu_memory_used_ratio{run="r", rank="0"}'
HEALTHY: dict[str, str] = {
    ACTIVE: flat(1),
    STARTED: flat(0),
    PROGRESS: growing(60),
    SAVED: growing(60),
    INTERVAL: flat(300),
    SAVE_FAILURES: flat(0),
    RATE: flat(1000),
    GPU: flat(0.8),
    failures("lost"): flat(0),
    failures("out_of_memory"): flat(0),
    phase("data"): growing(3),
    phase("forward"): growing(15),
    phase("backward"): growing(30),
    phase("comm"): growing(6),
    phase("optimizer"): growing(3),
    'up{job="ray", instance="a"}': flat(1),
    'up{job="ray", instance="b"}': flat(1),
}
"""A run that is well, from minute 0 on."""
_RUN = {"run": "r"}
_NOBODY: tuple[str, Mapping[str, str]] | None = None


def rule_tests() -> dict[str, Any]:
    """As promtool reads them."""
    return {"rule_files": ["alerts.yml"], "evaluation_interval": _EVERY, "tests": [*_quiet(), *_loud()]}


def _quiet() -> list[dict[str, Any]]:
    new = {STARTED: flat(0, 30), ACTIVE: flat(1, 30), SAVE_FAILURES: flat(0, 30), failures("lost"): flat(0, 30)}
    ended = HEALTHY | {ACTIVE: then(flat(1, 30), flat(0)), PROGRESS: then(growing(60, 30), flat(1800))}
    ended |= {SAVED: then(growing(60, 30), flat(1800)), RATE: then(flat(1000, 30), flat(0))}
    ended |= {GPU: then(flat(0.8, 30), flat(0.99))}
    # Three failures, a full disk and a checkpoint of long ago; then started again at minute 120.
    resumed = {name: f"_x120 {values}" for name, values in HEALTHY.items() if not name.startswith("up")}
    resumed |= {STARTED: f"_x120 {flat(7200)}", PROGRESS: f"_x120 {growing(60, start=7200)}"}
    resumed |= {SAVED: f"_x120 {flat(60, 4)} {growing(60, start=7440)}"}
    resumed |= {name: f"_x120 {flat(3)}" for name in (failures("lost"), SAVE_FAILURES)}
    # Gone from one scrape to the next, as the endpoint of a run that has ended.
    gone = {name: f"{values.rpartition('x')[0]}x30 stale" for name, values in HEALTHY.items() if name[:2] != "up"}
    down = {f'up{{job="ray", instance="{name}"}}': then(flat(1, 30), flat(0)) for name in "ab"}
    return [
        _case("a run that is well", HEALTHY, *[(minute, _NOBODY) for minute in (1, 5, 20, 60, 180, 300)]),
        _case("a run that only starts", new, *[(minute, _NOBODY) for minute in (1, 10, 25)]),
        _case("a run that has ended", ended, *[(minute, _NOBODY) for minute in (31, 45, 60, 180)]),
        _case("a run whose endpoint has gone", gone, *[(minute, _NOBODY) for minute in (31, 33, 45, 180)]),
        _case("a run that is resumed after hours", resumed, *[(minute, _NOBODY) for minute in (121, 124, 150, 200)]),
        _case("a cluster that is taken down", HEALTHY | down, *[(minute, _NOBODY) for minute in (31, 35, 60)]),
    ]


def _loud() -> list[dict[str, Any]]:
    other = 'shoal_failures_total{run="r", kind="lost", instance="other"}'
    moved = {failures("lost"): f"{flat(0, 20)} stale", other: f"_x21 {flat(1)}"}
    down = {'up{job="ray", instance="b"}': then(flat(1, 20), flat(0, 10), flat(1))}
    stuck = {PROGRESS: then(growing(60, 20), flat(1200, 30), growing(60, start=3000))}
    never = {ACTIVE: flat(1), STARTED: flat(0), PROGRESS: f"_x40 {growing(60, start=2400)}"}
    memory = {failures("out_of_memory"): then(flat(0, 20), flat(1))}
    full = {GPU: then(flat(0.8, 20), flat(0.99, 20), flat(0.8))}
    failing = {SAVE_FAILURES: then(flat(0, 20), flat(2))}
    stale = {SAVED: then(growing(60, 60), flat(3600, 60), growing(60, start=7200))}
    unsaved = {SAVED: f"_x150 {growing(60, start=9000)}", INTERVAL: f"_x150 {flat(300)}"}
    slower = {RATE: then(flat(1000, 60), flat(500, 20), flat(1000))}
    talking = {phase("comm"): then(growing(6, 60), growing(120, 30, start=360), growing(6, start=3960))}
    starving = {phase("data"): then(growing(3, 60), growing(60, 30, start=180), growing(3, start=1980))}
    gpu = _RUN | {"rank": "0"}
    return [
        _fires("ShoalNodeLost", moved, _RUN, before=20, during=(22, 30), after=40),
        _fires("ShoalNodeDown", down, {"job": "ray", "instance": "b"}, before=21, during=(23, 29), after=33),
        _fires("ShoalNoProgress", stuck, _RUN, before=34, during=(37, 49), after=53),
        _fires("ShoalNoProgress", never, _RUN, before=30, during=(32, 39), after=41, onto={}),
        _fires("ShoalGpuOutOfMemory", memory, _RUN, before=20, during=(21, 34), after=37),
        _fires("ShoalGpuMemoryNearlyFull", full, gpu, before=24, during=(27, 39), after=43),
        _fires("ShoalCheckpointFailing", failing, _RUN, before=20, during=(21, 34), after=37),
        _fires("ShoalCheckpointStale", stale, _RUN, before=85, during=(95, 119), after=122),
        _fires("ShoalCheckpointStale", unsaved, _RUN, before=120, during=(127, 149), after=152),
        _fires("ShoalThroughputDrop", slower, _RUN, before=62, during=(72, 79), after=84),
        _fires("ShoalHighCommunication", talking, _RUN, before=68, during=(75, 89), after=96),
        _fires("ShoalDataStarvation", starving, _RUN, before=68, during=(75, 89), after=96),
    ]


def _fires(
    alert: str,
    changed: Mapping[str, str],
    labels: Mapping[str, str],
    *,
    before: int,
    during: Sequence[int],
    after: int,
    onto: Mapping[str, str] = HEALTHY,
) -> dict[str, Any]:
    """It is the only one to fire, while it lasts."""
    times = [(before, _NOBODY), *[(minute, (alert, labels)) for minute in during], (after, _NOBODY)]
    return _case(f"{alert} fires and clears", {**onto, **changed}, *times)


def _case(
    name: str, series: Mapping[str, str], *expected: tuple[int, tuple[str, Mapping[str, str]] | None]
) -> dict[str, Any]:
    severity = {alert.name: alert.severity for alert in ALERTS}
    tests = []
    for minute, alert in expected:
        samples = []
        if alert is not None:
            labels = {"alertname": alert[0], "alertstate": "firing", "severity": severity[alert[0]], **alert[1]}
            told = ", ".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
            samples = [{"labels": f"ALERTS{{{told}}}", "value": 1}]
        tests.append({"expr": 'ALERTS{alertstate="firing"}', "eval_time": f"{minute}m", "exp_samples": samples})
    inputs = [{"series": selector, "values": values} for selector, values in series.items()]
    return {"name": name, "interval": _EVERY, "input_series": inputs, "promql_expr_test": tests}
