"""`shoal submit --kubernetes`: a run as a RayJob, followed from here or left alone."""

import contextlib
import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.job_log import LogView
from shoal.cli.kubernetes_options import check_settings, files_of, gpu_memory_of
from shoal.cli.words import recipes_and_overrides
from shoal.core.errors import UserError
from shoal.core.storage import to_json_line

if TYPE_CHECKING:
    from shoal.cli.submit import Asked
    from shoal.deploy.kubernetes.cluster import Cluster
    from shoal.deploy.kubernetes.follow import JobState
    from shoal.deploy.kubernetes.job import JobOptions, KubernetesJob
    from shoal.deploy.kubernetes.values import Machines

_WAIT_S = 600.0
"""How long the run waits for workers whose pods have started and have not joined yet."""


def submit(
    asked: "Asked",
    as_json: bool,
    how: str,
    *,
    context: str | None,
    namespace: str,
    release: str,
    preset: str | None,
    values_files: tuple[str, ...],
    settings: tuple[str, ...],
    gpus_per_machine: int,
    gpu_memory: str | None,
    cpus: int | None,
    queue: str,
    retries: int,
    ttl_s: int,
    deadline_s: int,
    secrets: tuple[str, ...],
    dry_run: bool,
) -> int:
    """Make the job and do as `how` says: follow, wait, or neither; or follow or stop one that is there."""
    from shoal.deploy.kubernetes.cluster import Cluster
    from shoal.deploy.kubernetes.job import JobOptions
    from shoal.deploy.kubernetes.values import Machines

    cluster = Cluster(namespace, context)
    there, option = (asked.follow, "--follow") if asked.follow is not None else (asked.stop, "--stop")
    if there is not None:
        if asked.words or asked.workers or asked.gpu or asked.run_dir or (asked.follow and asked.stop):
            raise UserError(f"{option}: is for a job that was sent; give it alone with --kubernetes")
        if option == "--stop":
            return _stop(cluster, there, as_json, how)
        return _attend(cluster, there, None, as_json, how)
    if asked.resume is not None:
        raise UserError("--resume: is not for --kubernetes; submit the recipe with the run's folder as --run-dir again")
    check_settings(settings)
    with contextlib.ExitStack() as stack:
        files = files_of(preset, values_files) or [stack.enter_context(_of_release(release, namespace, context))]
        options = JobOptions(
            release=release,
            namespace=namespace,
            retries=retries,
            ttl_s=ttl_s,
            deadline_s=deadline_s,
            queue=queue,
            wait_s=asked.cluster_s or _WAIT_S,
            secrets=secrets,
            files=files,
            settings=settings,
        )
        job = _made(asked, files, options, gpu_memory, Machines(gpus_per_machine=gpus_per_machine, cpus=cpus))
    if dry_run:
        click.echo(job.to_yaml(), nl=False)
        return 0
    _send(cluster, job)
    _say(f"job {job.name} is made in the namespace {namespace}")
    _say(f"  run folder  {job.run_dir} (in the pods)")
    _say(f"  kubectl get rayjob {job.name} --namespace {namespace}")
    return _attend(cluster, job.name, job.run_dir, as_json, how)


@contextlib.contextmanager
def _of_release(release: str, namespace: str, context: str | None) -> Iterator[Path]:
    """The values with which the chart was installed."""
    from shoal.deploy.kubernetes.chart import installed_values

    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "installed.yaml"
        file.write_text(installed_values(release, namespace, context), encoding="utf-8")
        yield file


def _made(
    asked: "Asked",
    files: list[Path],
    options: "JobOptions",
    gpu_memory: str | None,
    machines: "Machines",
) -> "KubernetesJob":
    """The job, checked here: nothing is sent before it is."""
    from shoal.deploy.kubernetes.chart import groups, setting
    from shoal.deploy.kubernetes.job import code_values, job_name, make_job
    from shoal.deploy.kubernetes.need import need_of
    from shoal.deploy.kubernetes.values import group_values, workers_values
    from shoal.launch.environment import referenced_environment
    from shoal.launch.run import new_run_dir
    from shoal.recipe.load import load_recipe
    from shoal.train.track import check_tracking

    recipes, overrides = recipes_and_overrides(asked.words, asked.workers, asked.gpu)
    if asked.name is not None:
        overrides.append(f"name={json.dumps(asked.name)}")
    loaded = load_recipe(recipes, overrides)
    check_tracking(loaded, is_here=False)
    code, left_out = code_values(asked.working_dir)
    for what in left_out:
        _say(f"warning: --working-dir: {what} is not sent; keep data on the volume of datasets")
    if not options.secrets and (names := sorted(referenced_environment(loaded))):
        _say(f"warning: the recipe refers to {', '.join(names)}; give the Secret that has it as --secret NAME")
    need, warnings = need_of(loaded.recipe, gpu_memory_of(gpu_memory))
    for warning in warnings:
        _say(f"warning: {warning}")
    unique = new_run_dir(loaded.recipe.name).name
    run_dir = asked.run_dir or f"{setting(files, 'storage.runs.mountPath')}/runs/{unique}"
    if not run_dir.startswith("/"):
        raise UserError(f"--run-dir: {run_dir!r} should be a whole path in the pods, as in /shared/runs/first")
    workers = workers_values(group_values(loaded.recipe, need, machines), groups(files))
    return make_job(job_name(unique), loaded.to_yaml(), run_dir, workers, code, options)


def _send(cluster: "Cluster", job: "KubernetesJob") -> None:
    """Make both objects; the ConfigMap belongs to the job, and goes with it."""
    from shoal.deploy.kubernetes.follow import RAY_JOBS

    made = cluster.create(job.ray_job)
    owner = {name: made[name] for name in ("apiVersion", "kind")} | {
        name: made["metadata"][name] for name in ("name", "uid")
    }
    metadata = dict(job.config_map["metadata"]) | {"ownerReferences": [owner]}
    try:
        cluster.create({**job.config_map, "metadata": metadata})
    except BaseException:
        cluster.delete(RAY_JOBS, job.name)  # whose pods would wait for it for ever
        raise


def _stop(cluster: "Cluster", name: str, as_json: bool, how: str) -> int:
    """Ask a job to save and end, and wait until it has."""
    from shoal.deploy.kubernetes.follow import NoJobError, look, stop

    _say(f"job {name} " + ("is asked to save and end" if stop(cluster, name) else "has already ended"))
    if how == "neither":
        return 0
    try:
        _attend(cluster, name, None, as_json, "wait")
        return 0 if look(cluster, name).is_over else 130
    except NoJobError:  # it had not begun, and was removed
        _print_json(as_json, name, None, "stopped", None)
        return 0


def _attend(cluster: "Cluster", name: str, run_dir: str | None, as_json: bool, how: str) -> int:
    """Follow a job to its end, or wait for it; a Ctrl-C ends the following alone, and not the job."""
    from shoal.deploy.kubernetes.follow import Follower, look, run_dir_of

    view = LogView(as_json)
    run_dir = run_dir or run_dir_of(cluster, name)
    try:
        if how == "neither":
            state = look(cluster, name)
        else:
            state = Follower(cluster, name, _say).wait(view if how == "follow" else None)
    except KeyboardInterrupt:
        state = look(cluster, name)
    if state.is_over:
        return _tell_end(state, cluster, run_dir, as_json, view)
    where = "".join(f" --{option} {value}" for option, value in _place(cluster))
    _say(f"job {name} goes on there")
    _say(f"  follow  shoal submit --kubernetes --follow {name}{where}")
    _say(f"  stop    shoal submit --kubernetes --stop {name}{where}")
    _print_json(as_json, name, run_dir, state.status, None)
    return 0 if how == "neither" else 130


def _tell_end(state: "JobState", cluster: "Cluster", run_dir: str | None, as_json: bool, view: LogView) -> int:
    """How the job ended: in words, as JSON, and as the exit status."""
    from shoal.observe.console import describe

    summary = view.summary
    status = f"{summary['status']} at step {summary['step']:,}" if summary and "step" in summary else state.status
    metrics = describe(summary["metrics"], ("train_loss",)) if summary and summary.get("metrics") else ""
    _say(f"job {state.name}: {status}  {metrics}".rstrip())
    if state.status == "failed":
        if state.message:
            _say(f"error: {state.message.strip()}")
        _say(f"  kubectl describe rayjob {state.name} --namespace {cluster.namespace}")
    if run_dir is not None and state.status != "succeeded":
        _say(f"  to go on: submit the same with --run-dir {shlex.quote(run_dir)}")
    _print_json(as_json, state.name, run_dir, state.status, summary)
    return {"succeeded": 0, "stopped": 130}.get(state.status, 1)


def _place(cluster: "Cluster") -> Iterator[tuple[str, str]]:
    """The options that name the cluster."""
    if cluster.namespace != "shoal":
        yield "namespace", cluster.namespace
    if cluster.context is not None:
        yield "context", cluster.context


def _print_json(as_json: bool, name: str, run_dir: str | None, status: str, summary: dict[str, Any] | None) -> None:
    if as_json:
        record = {"job_id": name, "run_dir": run_dir, "status": status}
        click.echo(to_json_line(record | ({"summary": summary} if summary is not None else {})))


def _say(message: str) -> None:
    click.echo(message, err=True)
