"""A job's two objects made in the cluster: both, or neither; where an answer is lost, what became of them is told."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from shoal.core.errors import RunError, UserError
from shoal.deploy.kubernetes.cluster import Cluster, NoAnswerError
from shoal.deploy.kubernetes.follow import RAY_JOBS
from shoal.deploy.kubernetes.job import KubernetesJob

Tell = Callable[[str], None]


@contextlib.contextmanager
def before_anything_is_made() -> Iterator[None]:
    """A cluster that does not answer is then a wrong context, and no failure of the job."""
    try:
        yield
    except NoAnswerError as error:
        raise UserError(str(error)) from error


def send(cluster: Cluster, job: KubernetesJob, tell: Tell) -> None:
    """Make both objects: the ConfigMap first, which costs nothing if the rest fails; then it belongs to the job."""
    _create_config_map(cluster, job, tell)
    try:
        made = _create_job(cluster, job, tell)
    except KeyboardInterrupt:
        tell(f"interrupted while the job was made; to see whether it runs: kubectl get rayjob {job.name}")
        raise
    owner = {"apiVersion": made["apiVersion"], "kind": made["kind"]}
    owner |= {name: made["metadata"][name] for name in ("name", "uid")}
    try:
        cluster.patch("configmaps", job.name, {"metadata": {"ownerReferences": [owner]}})
    except RunError as error:  # the job runs; this is about what it leaves behind
        tell(f"warning: the ConfigMap {job.name} will stay when the job is deleted ({error})")


def _create_config_map(cluster: Cluster, job: KubernetesJob, tell: Tell) -> None:
    try:
        with before_anything_is_made():
            cluster.create(job.config_map)
    except UserError as error:
        if isinstance(error.__cause__, NoAnswerError) and "refused" not in str(error):  # it may have been made
            _remove_config_map(cluster, job, tell)
        raise


def _remove_config_map(cluster: Cluster, job: KubernetesJob, tell: Tell) -> None:
    """Of a job that was not made. What hinders it is told, and does not hide why there is no job."""
    try:
        cluster.delete("configmaps", job.name)
    except RunError as error:
        tell(f"warning: the ConfigMap {job.name} may be there, and belongs to nothing ({error})")


def _create_job(cluster: Cluster, job: KubernetesJob, tell: Tell) -> dict[str, Any]:
    """Make the RayJob. Where the answer is lost it may have been made all the same: then it is looked for."""
    try:
        return cluster.create(job.ray_job)
    except NoAnswerError as error:
        try:
            made = cluster.get(RAY_JOBS, job.name)
        except RunError:
            tell(f"whether the job was made is not known; it has what it needs: kubectl get rayjob {job.name}")
            raise error from None
        if made is None:
            _remove_config_map(cluster, job, tell)
            raise
        return made
    except (RunError, UserError):
        _remove_config_map(cluster, job, tell)
        raise
