"""`shoal submit`: a run as a Ray job, followed from here or left alone."""

import json
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shoal.cli.job_log import LogView
from shoal.cli.kubernetes_options import kubernetes_options
from shoal.cli.words import GPU, RESUME, WORDS, WORKERS, recipes_and_overrides
from shoal.core.errors import UserError

if TYPE_CHECKING:
    from shoal.launch.submit import Job, Jobs, State


@click.command("submit")
@WORDS
@click.option(
    "--address", metavar="URL", envvar="RAY_API_SERVER_ADDRESS", help="The cluster's dashboard: http://HEAD:8265."
)
@WORKERS
@GPU
@click.option("--name", metavar="NAME", help="What the run is called; otherwise as the recipe.")
@click.option(
    "--run-dir", metavar="DIR", help="The run's folder, on storage that all machines share; else runs/NAME-DATE-ID."
)
@RESUME
@click.option(
    "--working-dir", metavar="DIR", help="A folder with your code; it is sent along and becomes the working directory."
)
@click.option(
    "--wait-for-cluster",
    "cluster_s",
    type=click.FloatRange(min=0),
    default=0,
    metavar="S",
    help="How long the job waits where the cluster is full or too small; as shoal train --wait S.",
)
@click.option("--wait", "is_waited", is_flag=True, help="Wait for the end without showing the log.")
@click.option("--no-follow", is_flag=True, help="Return as soon as the job is sent.")
@click.option("--follow", metavar="JOB", help="Show the log of a job that was sent before, from its beginning.")
@click.option("--stop", metavar="JOB", help="Stop a job: it saves a checkpoint and ends.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
@click.option("--kubernetes", is_flag=True, help="As a RayJob with its own cluster, by kubectl; all below is for it.")
@click.option("--context", metavar="NAME", help="kubectl's context.")
@kubernetes_options
@click.option("--queue", default="", metavar="NAME", help="Kueue's LocalQueue, which lets it start.")
@click.option(
    "--retries",
    type=click.IntRange(0, 2**31 - 1),
    default=3,
    metavar="N",
    help="Tries on new clusters (default: 3).",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=click.IntRange(0, 2**31 - 1),
    default=60,
    metavar="S",
    help="The cluster stays so long after the end (default: 60).",
)
@click.option(
    "--secret",
    "secrets",
    multiple=True,
    metavar="NAME",
    help="A Secret whose keys become variables.",
)
@click.option("--dry-run", is_flag=True, help="Print what --kubernetes would make, and stop.")
def command(
    words: tuple[str, ...],
    address: str | None,
    workers: str | None,
    gpu: bool,
    name: str | None,
    run_dir: str | None,
    resume: str | None,
    working_dir: str | None,
    cluster_s: float,
    is_waited: bool,
    no_follow: bool,
    follow: str | None,
    stop: str | None,
    as_json: bool,
    kubernetes: bool,
    **of_kubernetes: Any,
) -> int:
    """Train a RECIPE on a Ray cluster, as a job that goes on there when this command ends.

    \b
    shoal submit cifar10 data.dir=/shared/data --workers 4 --run-dir /shared/runs/first --address http://HEAD:8265
    shoal submit --follow JOB --address http://HEAD:8265
    shoal submit --stop JOB --address http://HEAD:8265
    shoal submit gpt2 data.dir=/datasets/owt --workers 16 --gpu --kubernetes
    """
    if is_waited and no_follow:
        raise UserError("--wait: waits for the job's end, and --no-follow does not; give one of them")
    how = "wait" if is_waited else "neither" if no_follow else "follow"
    asked = Asked(words, workers, gpu, name, run_dir, resume, working_dir, cluster_s, follow, stop)
    asked.check("--kubernetes" if kubernetes else "--address")
    if kubernetes:
        from shoal.cli.submit_kubernetes import submit

        if click.get_current_context().get_parameter_source("address") == ParameterSource.COMMANDLINE:
            raise UserError("--address: is a cluster's that is there, and --kubernetes makes one; give one of them")
        return submit(asked, as_json, how, **of_kubernetes)
    _refuse_kubernetes_options(of_kubernetes)
    if stop is not None:
        return _stop(_jobs(address), stop, as_json, how)
    if follow is not None:
        return _attend(_jobs(address), follow, as_json, how)
    job, code = _checked(asked)
    return _send(_jobs(address), job, code, as_json, how)


@dataclass(frozen=True)
class Asked:
    """What is asked of a job, wherever it runs."""

    words: tuple[str, ...] = ()
    workers: str | None = None
    gpu: bool = False
    name: str | None = None
    run_dir: str | None = None
    resume: str | None = None
    working_dir: str | None = None
    cluster_s: float = 0
    follow: str | None = None
    stop: str | None = None

    def check(self, place: str) -> None:
        """Of a job that was sent before, nothing can be changed; `place` is the option that says where it is."""
        for option, job, alone in (
            ("--follow", self.follow, Asked(follow=self.follow)),
            ("--stop", self.stop, Asked(stop=self.stop)),
        ):
            if job is not None and self != alone:
                raise UserError(f"{option}: is for a job that was sent; give it alone with {place}")


def _refuse_kubernetes_options(given: dict[str, Any]) -> None:
    """Options that say something about Kubernetes are not passed over."""
    parameters = {parameter.name: parameter for parameter in command.params}
    for name, value in given.items():
        if value != parameters[name].get_default(click.get_current_context()) and value not in ((), None, False):
            raise UserError(f"{parameters[name].opts[-1]}: is for --kubernetes; give that too, or leave this out")


def _checked(asked: Asked) -> tuple["Job", Path | None]:
    """The job, and the folder that goes along; whatever is wrong with them is found here, before anything is sent."""
    from shoal.core.storage import expand_home
    from shoal.launch.run import new_run_dir, prepare
    from shoal.launch.submit import make_job

    recipes, overrides = recipes_and_overrides(asked.words, asked.workers, asked.gpu)
    if asked.name is not None:
        if asked.resume is not None:
            raise UserError("--name: the run has one; leave this out with --resume")
        overrides.append(f"name={json.dumps(asked.name)}")
    prepared = prepare(recipes, overrides, run_dir=asked.run_dir, resume=asked.resume)
    if prepared.finished is not None:
        raise UserError(f"--resume: {prepared.run_dir} is already done; to train on, raise train.epochs or train.steps")
    code = expand_home(asked.working_dir) if asked.working_dir is not None else None
    if code is not None and not code.is_dir():
        raise UserError(f"--working-dir: {code} is no folder")
    if code is None:
        warn_of_own_code(prepared.loaded.tree())
    # A folder of a new name names the job too; one that was given may have been given before.
    is_new = asked.run_dir is None and asked.resume is None
    job_id = (prepared.run_dir if is_new else new_run_dir(prepared.loaded.recipe.name)).name
    return make_job(prepared, overrides, job_id, asked.cluster_s), code


def warn_of_own_code(recipe: dict[str, Any]) -> None:
    """Code beside the recipe is not on the cluster."""
    for section in ("task", "model", "data"):
        module, is_own, _ = str((recipe.get(section) or {}).get("name", "")).partition(":")
        top = module.partition(".")[0]
        if is_own and (Path(f"{top}.py").is_file() or Path(top).is_dir()):
            _say(f"warning: {section}.name: {module} is here but not sent; send its folder with --working-dir .")


def _jobs(address: str | None) -> "Jobs":
    from shoal.launch.dashboard import check_address
    from shoal.launch.submit import Jobs

    return Jobs(check_address(address))


def _send(jobs: "Jobs", job: "Job", code: Path | None, as_json: bool, how: str) -> int:
    """Submit it, then do as `how` says: follow, wait, or neither."""
    try:
        left_out = jobs.send(job, code)
    except KeyboardInterrupt:
        _say(f"interrupted while the job was sent; to see whether it runs:\n  {_again('--follow', job.job_id, jobs)}")
        return 130
    for what in left_out:
        _say(f"warning: --working-dir: {what} is not sent; keep data on storage that all machines share")
    _say(f"job {job.job_id} is sent to {jobs.address}")
    _say(f"  run folder  {job.run_dir} (must be on storage that all machines share)")
    _say(f"  dashboard   {jobs.page(job.job_id)}")
    return _attend(jobs, job.job_id, as_json, how)


def _stop(jobs: "Jobs", job_id: str, as_json: bool, how: str) -> int:
    """Ask a job to end, and wait until it has saved."""
    _say(f"job {job_id} " + ("is asked to save and end" if jobs.stop(job_id) else "has already ended"))
    if how == "neither":
        _print_json(as_json, jobs.state(job_id), None)
        return 0
    _attend(jobs, job_id, as_json, "wait")
    return 0 if jobs.state(job_id).is_over else 130


def _attend(jobs: "Jobs", job_id: str, as_json: bool, how: str) -> int:
    """Follow a job to its end, or wait for it; a Ctrl-C ends the following alone, and not the job."""
    view = LogView(as_json)
    try:
        if how == "follow":
            state = jobs.follow(job_id, view, _say)
        else:
            state = jobs.wait(job_id, _say) if how == "wait" else jobs.state(job_id)
    except KeyboardInterrupt:
        state = jobs.state(job_id)
    if state.is_over:
        return _tell_end(jobs, state, as_json, view)
    _say(f"job {job_id} goes on there")
    _say(f"  follow  {_again('--follow', job_id, jobs)}")
    _say(f"  stop    {_again('--stop', job_id, jobs)}")
    _print_json(as_json, state, None)
    return 0 if how == "neither" else 130


def _tell_end(jobs: "Jobs", state: "State", as_json: bool, view: LogView) -> int:
    """How the job ended: in words, as JSON, and as the exit status."""
    from shoal.launch.submit import status_of
    from shoal.observe.console import describe

    summary = view.summary or jobs.summary(state)
    if state.status == "failed" and not view.num_lines:
        _say(state.message.strip())  # with the end of the log
    status = f"{summary['status']} at step {summary['step']:,}" if summary and "step" in summary else state.status
    metrics = describe(summary["metrics"], ("train_loss",)) if summary and summary.get("metrics") else ""
    _say(f"job {state.job_id}: {status}  {metrics}".rstrip())
    if state.status == "failed" and (hint := _hint(state)):
        _say(f"error: {hint}")
    if summary and state.run_dir and "step" in summary:
        run_dir = shlex.quote(str(state.run_dir))
        _say(f"  shoal runs show {run_dir}")
        if summary["status"] != "done":
            _say(f"  shoal submit --resume {run_dir} --address {jobs.address}")
    _print_json(as_json, state, summary)
    return status_of(state)


def _hint(state: "State") -> str | None:
    """What may be wrong with the cluster itself."""
    if state.exit_code == 127 or "No module named shoal" in state.message or "No module named 'shoal'" in state.message:
        return "the cluster's machines need Shoal in the Python that is first on the path where ray start was called"
    return None


def _again(option: str, job_id: str, jobs: "Jobs") -> str:
    return f"shoal submit {option} {job_id} --address {jobs.address}"


def _print_json(as_json: bool, state: "State", summary: dict[str, Any] | None) -> None:
    from shoal.core.storage import to_json_line

    if not as_json:
        return
    run_dir = str(state.run_dir) if state.run_dir is not None else None
    record = {"job_id": state.job_id, "run_dir": run_dir, "status": state.status}
    print(to_json_line(record | ({"summary": summary} if summary is not None else {})))
    sys.stdout.flush()


def _say(message: str) -> None:
    click.echo(message, err=True)
