"""What there is to show of a run at one moment, as values: what a frame is drawn from, and what `--json` prints."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.observe.ledger import make_ledger
from shoal.observe.monitor.curve import Curve
from shoal.observe.monitor.estimate import left_s
from shoal.observe.monitor.reports import RECENT_S, Reports
from shoal.observe.monitor.standing import status_of
from shoal.observe.monitor.values import is_count, number, numbers
from shoal.observe.monitor.watch import RunWatch
from shoal.observe.monitor.worker_rows import Worker, worker_rows
from shoal.observe.verdict import judge


@dataclass(frozen=True)
class Rate:
    """Samples or tokens a second."""

    now: float
    """Over the last minute."""
    mean: float
    """Over the run."""


@dataclass(frozen=True)
class Checkpoint:
    """The newest one."""

    step: int
    age_s: float
    size_bytes: float | None
    stall_s: float | None
    """For how long training stood still."""
    seconds: float | None
    """How long it took to write."""


@dataclass(frozen=True)
class Facts:
    """A run, now."""

    run: str
    run_dir: str
    status: str
    strategy: str
    device: str
    world_size: int | None
    step: int
    num_steps: int | None
    epoch: float | None
    epochs: float | None
    elapsed_s: float | None
    left_s: float | None
    waits_s: float | None
    """For how long the workers have been getting ready; None while they train."""
    silent_s: float
    metrics: Mapping[str, float]
    curves: Mapping[str, Curve]
    rates: Mapping[str, Rate]
    phases: Mapping[str, float]
    """phase -> share."""
    phases_over_s: float
    """Of these last seconds; of an ended run, of all."""
    verdict: str
    bottleneck: str
    workers: Sequence[Worker]
    last_checkpoint: Checkpoint | None
    saving_fails: str
    """Why, if it does."""
    failures: Sequence[Mapping[str, Any]]
    num_failures: int
    restarts: int
    events: Sequence[Mapping[str, Any]]
    goodput: float | None
    cost: float | None
    cost_at_end: float | None
    error: str
    """What a failed run failed of."""
    clock: float
    """The time on the machine that writes."""
    read_share: float
    """How much of the run's files was read: less than 1 while catching up with a long run."""
    watched: str
    """The metric that checkpoints are kept by."""
    launch: Mapping[str, Any]
    """Launcher and address that were asked for."""


def facts_of(watch: RunWatch) -> Facts:
    """What is known now."""
    reports, happened, status, clock = watch.reports, watch.happened, status_of(watch), watch.clock()
    start, is_running = happened.start, status == "running"
    summary = watch.summary if happened.ended_by else {}
    num_steps = start.get("num_steps") if is_count(start.get("num_steps")) else None
    world_size = start.get("world_size") if is_count(start.get("world_size")) else None
    left = _left_s(reports, happened.start, num_steps, clock) if is_running else None
    goodput, cost, at_end = _account(watch, summary, left, is_running)
    phases, over_s = _phases(reports, summary)
    verdict, bottleneck = _verdict(watch, summary, phases, over_s)
    checkpoint = watch.recipe.get("checkpoint")
    return Facts(
        run=watch.path.resolve().name,
        run_dir=str(watch.path),
        status=status,
        strategy=str(start.get("strategy") or ""),
        device=str(start.get("device") or ""),
        world_size=world_size,
        step=max(reports.step, summary["step"] if is_count(summary.get("step")) else 0),
        num_steps=num_steps,
        epoch=reports.epoch,
        epochs=_epochs(watch.recipe),
        elapsed_s=_elapsed_s(watch, clock, is_running),
        left_s=left,
        waits_s=_waits_s(watch, clock) if is_running else None,
        silent_s=watch.silent_s(),
        metrics=reports.metrics,
        curves=reports.curves,
        rates=_rates(reports, summary if happened.starts == 1 else {}),
        phases=phases,
        phases_over_s=over_s,
        verdict=verdict,
        bottleneck=bottleneck,
        workers=worker_rows(_present(watch.workers, start), happened.workers),
        last_checkpoint=_checkpoint(happened.save, clock),
        saving_fails=str(happened.save_failed.get("message") or ""),
        failures=list(happened.failures),
        num_failures=happened.num_failures,
        restarts=happened.restarts,
        events=list(happened.told),
        goodput=goodput,
        cost=cost,
        cost_at_end=at_end,
        error=str(happened.ended_by.get("message") or summary.get("error") or "") if status == "failed" else "",
        clock=clock,
        read_share=watch.read_share() if watch.is_behind else 1.0,
        watched=str(checkpoint.get("metric") or "") if isinstance(checkpoint, dict) else "",
        launch=start["launch"] if isinstance(start.get("launch"), dict) else {},
    )


def to_json(facts: Facts) -> dict[str, Any]:
    """As `shoal monitor --json` prints it."""
    left_out = ("curves", "events", "clock", "read_share", "watched", "launch")
    record = {name: value for name, value in vars(facts).items() if name not in left_out}
    record["rates"] = {name: vars(rate) for name, rate in facts.rates.items()}
    record["workers"] = [worker.to_record() for worker in facts.workers]
    if facts.last_checkpoint is not None:
        record["last_checkpoint"] = vars(facts.last_checkpoint)
    named = ("time", "rank", "node", "kind", "message")
    record["failures"] = [{name: event.get(name) for name in named} for event in facts.failures]
    return record


def _present(workers: Mapping[str, Any], start: Mapping[str, Any]) -> Mapping[str, Any]:
    """The line on the workers of now: after a restart the newest may be on those before."""
    return workers if (number(workers.get("time")) or 0.0) >= (number(start.get("time")) or 0.0) else {}


def _left_s(reports: Reports, start: Mapping[str, Any], num_steps: int | None, clock: float) -> float | None:
    if num_steps is None:
        return None
    began = number(start.get("time")) or 0.0
    paces = [pace for pace in reports.recent if pace.time >= began]
    return left_s(num_steps - reports.step, paces, reports.habits, clock - reports.time)


def _elapsed_s(watch: RunWatch, clock: float, is_running: bool) -> float | None:
    happened = watch.happened
    if not happened.start:
        return None
    if not happened.session_began:
        return happened.worked_s
    until = clock if is_running else max(happened.newest, watch.reports.time)
    return happened.worked_s + max(0.0, until - happened.session_began)


def _waits_s(watch: RunWatch, clock: float) -> float | None:
    """Workers get ready, for the first time or after a failure."""
    if watch.happened.is_stepping:
        return None
    since = watch.happened.waits_since
    return max(0.0, clock - since) if since else watch.silent_s()


def _epochs(recipe: Mapping[str, Any]) -> float | None:
    train = recipe.get("train")
    is_by_steps = isinstance(train, dict) and train.get("steps") is not None
    return number(train.get("epochs")) if isinstance(train, dict) and not is_by_steps else None


def _rates(reports: Reports, summary: Mapping[str, Any]) -> dict[str, Rate]:
    """By the reports; the mean of a run that ended with its only start as its summary has it."""
    found = {}
    for name, (total, seconds) in reports.rates.items():
        late = reports.rate_of[name]
        late_s = sum(s for _, _, s in late)
        if seconds > 0 and late_s > 0:
            told = number(summary.get(name))
            mean = total / seconds if told is None else told
            found[name] = Rate(sum(rate * s for _, rate, s in late) / late_s, mean)
    return found


def _phases(reports: Reports, summary: Mapping[str, Any]) -> tuple[dict[str, float], float]:
    """phase -> share of the last minute, and how long that was; of an ended run, of all of it."""
    seconds = numbers(summary.get("seconds"))
    if not seconds:
        late = [pace for pace in reports.recent if pace.time > reports.time - RECENT_S] or list(reports.recent)[-1:]
        for pace in late:
            for phase, value in pace.seconds.items():
                seconds[phase] = seconds.get(phase, 0.0) + max(value, 0.0)
    total = sum(seconds.values())
    return ({phase: value / total for phase, value in seconds.items()} if total > 0 else {}), total


def _verdict(
    watch: RunWatch, summary: Mapping[str, Any], phases: Mapping[str, float], over_s: float
) -> tuple[str, str]:
    """In words and as a name: as the run tells it; of one that tells none yet, from its reports."""
    for source in (summary, watch.workers):
        if isinstance(source.get("verdict"), str) and source["verdict"]:
            return source["verdict"], str(source.get("bottleneck") or "")
    if not phases:
        return "", ""
    found = judge([{phase: share * over_s for phase, share in phases.items()}])
    return str(found), found.bottleneck


def _checkpoint(save: Mapping[str, Any], clock: float) -> Checkpoint | None:
    step, when = save.get("step"), number(save.get("time"))
    if not isinstance(step, int) or when is None:
        return None
    facts = [number(save.get(name)) for name in ("bytes", "stall_s", "seconds")]
    return Checkpoint(step, max(0.0, clock - when), *facts)


def _account(
    watch: RunWatch, summary: Mapping[str, Any], left: float | None, is_running: bool
) -> tuple[float | None, float | None, float | None]:
    """Goodput, and what the run has cost until now and will have cost at its end, where there is a price."""
    if not watch.happened.start:
        return None, None, None
    until = watch.clock() if is_running else None
    ledger = make_ledger(watch.happened.kept, watch.reports.blocks.reports(), until)
    told = number(summary.get("goodput"))
    goodput = told if told is not None else ledger.goodput if ledger.worker_s > 0 else None
    cluster = watch.recipe.get("cluster")
    price = number(cluster.get("price_per_hour")) if isinstance(cluster, dict) else None
    if price is None:
        return goodput, None, None
    cost = ledger.cost(price)["total"]
    workers = number(watch.happened.start.get("world_size"))
    return goodput, cost, None if left is None or workers is None else cost + left / 3600 * price * workers
