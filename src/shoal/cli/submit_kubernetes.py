"""`shoal submit --kubernetes`: a run as a RayJob, followed from here or left alone."""

import contextlib
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.job_log import LogView
from shoal.cli.kubernetes_options import check_settings, files_of, load_planning, workers_of
from shoal.cli.words import recipes_and_overrides
from shoal.core.errors import RunError, UserError
from shoal.core.storage import to_json_line

if TYPE_CHECKING:
    from shoal.cli.submit import Asked
    from shoal.deploy.kubernetes.cluster import Cluster
    from shoal.deploy.kubernetes.follow import JobState
    from shoal.deploy.kubernetes.job import JobOptions, KubernetesJob
    from shoal.deploy.kubernetes.values import Machines

_PLAIN_PATH = re.compile(r"[\w./@+=,: -]+", re.ASCII)
"""What no shell on the way to the run reads anything into, and what it quotes for the next one."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
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
    gpus_per_machine: int | None,
    gpu_memory: str | None,
    cpus: int | None,
    queue: str,
    retries: int,
    ttl_s: int,
    secrets: tuple[str, ...],
    dry_run: bool,
) -> int:
    """Make the job and do as `how` says: follow, wait, or neither; or follow or stop one that is there."""
    from shoal.deploy.kubernetes.cluster import Cluster
    from shoal.deploy.kubernetes.job import JobOptions
    from shoal.deploy.kubernetes.send import send
    from shoal.deploy.kubernetes.values import Machines

    check_settings(namespace, release, settings)
    for option, name in (("--stop", asked.stop), ("--follow", asked.follow)):
        if name is not None and not _NAME.fullmatch(name):
            raise UserError(f"{option}: {name!r} is no name of a job; kubectl get rayjobs --namespace {namespace}")
        if name is not None and dry_run:
            raise UserError(f"--dry-run: prints what would be made, and {option} makes nothing; leave it out")
    for secret in secrets:
        if not _NAME.fullmatch(secret):
            raise UserError(f"--secret: {secret!r} is no name of a Secret; kubectl get secrets --namespace {namespace}")
    cluster = Cluster(namespace, context)
    if asked.stop is not None:
        return _stop(cluster, asked.stop, as_json, how)
    if asked.follow is not None:
        return _attend(cluster, asked.follow, None, as_json, how)
    if asked.resume is not None:
        raise UserError("--resume: is not for --kubernetes; submit the recipe with the run's folder as --run-dir again")
    with contextlib.ExitStack() as stack:
        files = files_of(preset, values_files)
        load_planning()
        if preset is None:
            files.insert(0, stack.enter_context(_of_release(cluster, release)))
        options = JobOptions(
            release=release,
            namespace=namespace,
            retries=retries,
            ttl_s=ttl_s,
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
    send(cluster, job, _say)
    _say(f"job {job.name} is made in the namespace {namespace}")
    _say(f"  run folder  {job.run_dir} (in the pods)")
    _say(f"  kubectl get rayjob {job.name} --namespace {namespace}")
    return _attend(cluster, job.name, job.run_dir, as_json, how)


@contextlib.contextmanager
def _of_release(cluster: "Cluster", release: str) -> Iterator[Path]:
    """The values with which the chart was installed, which it tells in a ConfigMap."""
    from shoal.deploy.kubernetes.chart import with_nulls
    from shoal.deploy.kubernetes.send import before_anything_is_made

    with before_anything_is_made():
        found = cluster.get("configmaps", f"{release}-values")
    if found is None:
        raise UserError(
            f"--release: the chart is not installed as {release!r} in the namespace {cluster.namespace!r} "
            "(docs/kubernetes.md); install it, or say how pods look here: --preset NAME"
        )
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "installed.yaml"
        file.write_text(with_nulls(found["data"]["values.yaml"]), encoding="utf-8")
        yield file


def _made(
    asked: "Asked",
    files: list[Path],
    options: "JobOptions",
    gpu_memory: str | None,
    machines: "Machines",
) -> "KubernetesJob":
    """The job, checked here: nothing is sent before it is."""
    from shoal.cli.submit import warn_of_own_code
    from shoal.deploy.kubernetes.chart import installed
    from shoal.deploy.kubernetes.job import code_values, data_elsewhere, job_name, make_job, not_scaled
    from shoal.deploy.kubernetes.values import over_quota
    from shoal.launch.environment import referenced_environment
    from shoal.launch.run import new_run_dir
    from shoal.recipe.load import load_recipe
    from shoal.train.track import check_tracking

    recipes, overrides = recipes_and_overrides(asked.words, asked.workers, asked.gpu)
    if asked.name is not None:
        overrides.append(f"name={json.dumps(asked.name)}")
    loaded = load_recipe(recipes, overrides, is_elsewhere=bool(options.secrets))
    check_tracking(loaded, is_here=False)
    code, left_out = code_values(asked.working_dir)
    for what in left_out:
        _say(f"warning: --working-dir: {what} is not sent; keep data on the volume of datasets")
    if asked.working_dir is None:
        warn_of_own_code(loaded.tree())
    if not options.secrets and (names := sorted(referenced_environment(loaded))):
        _say(f"warning: the recipe refers to {', '.join(names)}; give the Secret that has it as --secret NAME")
    there = installed(options.release, options.namespace, files, options.settings)
    if there.runs_at is None:
        raise UserError("storage.runs.enabled: is false, and a run needs a folder that all its machines share")
    unique = new_run_dir(loaded.recipe.name).name
    run_dir = asked.run_dir or f"{there.runs_at}/runs/{unique}"
    if not _PLAIN_PATH.fullmatch(run_dir):
        raise UserError(
            f"--run-dir: {run_dir!r} holds signs that a shell would read; choose a name of letters, digits, spaces and "
            "._@+=,:-"
        )
    path = PurePosixPath(run_dir)
    if PurePosixPath(there.runs_at) not in path.parents or ".." in path.parts:
        raise UserError(f"--run-dir: {run_dir!r} is not on the storage for runs; give {there.runs_at}/runs/NAME")
    workers = workers_of(loaded.recipe, machines, gpu_memory, there.groups)
    job = make_job(job_name(unique), loaded.to_yaml(), run_dir, workers, code, options)
    data = data_elsewhere(loaded.recipe, there.volumes)
    for warning in (*data, *over_quota(workers, there.groups), *not_scaled(job.ray_job)):
        _say(f"warning: {warning}")
    return job


def _stop(cluster: "Cluster", name: str, as_json: bool, how: str) -> int:
    """Ask a job to save and end, and wait until it has."""
    from shoal.deploy.kubernetes.follow import NoJobError, look, run_dir_of, stop

    run_dir = run_dir_of(cluster, name)
    _say(f"job {name} {stop(cluster, name)}")
    if how == "neither":
        with contextlib.suppress(NoJobError):
            _print_json(as_json, name, run_dir, look(cluster, name).status, None)
            return 0
        _print_json(as_json, name, run_dir, "stopped", None)  # it was removed
        return 0
    try:
        _attend(cluster, name, run_dir, as_json, "wait")
        state = _last_known(cluster, name)
        return 0 if state is not None and state.is_over else 130
    except NoJobError:  # it was removed
        if run_dir is not None:
            _say(f"  to go on, if it has saved: submit the same with --run-dir {shlex.quote(run_dir)}")
        _print_json(as_json, name, run_dir, "stopped", None)
        return 0


def _attend(cluster: "Cluster", name: str, run_dir: str | None, as_json: bool, how: str) -> int:
    """Follow a job to its end, or wait for it; a Ctrl-C ends the following alone, and not the job."""
    from shoal.deploy.kubernetes.follow import Follower, look, run_dir_of

    view = LogView(as_json)
    state: JobState | None
    run_dir = run_dir or run_dir_of(cluster, name)
    try:
        if how == "neither":
            state = look(cluster, name)
        else:
            state = Follower(cluster, name, _say).wait(view if how == "follow" else None)
    except KeyboardInterrupt:
        state = _last_known(cluster, name)
    if state is not None and state.is_over:
        return _tell_end(state, cluster, run_dir, as_json, view)
    where = "".join(f" --{option} {value}" for option, value in _place(cluster))
    _say(f"job {name} goes on there")
    _say(f"  follow  shoal submit --kubernetes --follow {name}{where}")
    _say(f"  stop    shoal submit --kubernetes --stop {name}{where}")
    _print_json(as_json, name, run_dir, state.status if state is not None else "unknown", None)
    return 0 if how == "neither" else 130


def _last_known(cluster: "Cluster", name: str) -> "JobState | None":
    """How the job stands, if the cluster answers at once: whoever has pressed Ctrl-C does not want to wait."""
    from shoal.deploy.kubernetes.follow import NoJobError, look

    try:
        return look(cluster, name)
    except NoJobError:
        raise
    except RunError as error:
        _say(f"job {name}: how it stands is not known ({error})")
        return None


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
