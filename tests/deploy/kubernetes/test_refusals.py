"""Values that cannot work are refused in a line that names them."""

import pytest

from tests.deploy.kubernetes.rendering import NAMED, template

WRONG = {
    "workers.cpu.gpus=-1": ("/workers/cpu/gpus", "got -1, want 0"),
    "workers.cpu.minReplicas=-2": ("/workers/cpu/minReplicas", "got -2, want 0"),
    "workers.cpu.minReplicas=9": ("workers.cpu.minReplicas: 9 is more than maxReplicas, 4",),
    "workers.cpu.shm=32Gi": ("workers.cpu.shm: 32Gi is more than the pod's memory, 16Gi",),
    "workers.cpu.leads=true,workers.cpu.gpus=2": ("workers.cpu.leads: a group that leads does not train",),
    "workers.cpu.memory=16GB": ("/workers/cpu/memory", "does not match"),
    "workers.cpu.cpu=0": ("/workers/cpu/cpu", "got 0, want 0"),
    "workers.cpu.memroy=1Gi": ("/workers/cpu", "memroy"),
    "workers.Big.cpu=1": ("/workers", "Big"),
    "storage.runs.accessMode=ReadWriteSome": ("/storage/runs/accessMode", "ReadWriteMany"),
    "storage.runs.storageClass=": ("storage.runs.storageClass: is missing", "kubectl get storageclass"),
    "storage.datasets.enabled=true": ("storage.datasets.storageClass: is missing",),
    "aws.efs.enabled=true": ("aws.efs.fileSystemId: is missing",),
    "aws.efs.fileSystemId=efs-1": ("/aws/efs/fileSystemId", "does not match"),
    "mlflow.store=mysql": ("/mlflow/store", "postgresql"),
    "dcgm.enable=true": ("/dcgm", "enable"),
    "networkPolicy.apiServer.ports={70000}": ("/networkPolicy/apiServer/ports/0", "65,535"),
    "networkPolicy.apiServer.cidrs={1.2.3/99}": ("/networkPolicy/apiServer/cidrs/0", "does not match"),
    "environment.A B=1": ("/environment", "A B"),
    "workers.Big.cpu=2": ("/workers", "Big"),
    "image.tag=x: y": ("/image/tag", "does not match"),
    "storage.runs.mountPath=/tmp": ("storage.runs.mountPath: /tmp is taken",),
    "storage.runs.mountPath=shared": ("/storage/runs/mountPath", "does not match"),
    "mlflow.postgresql.user=a-b": ("/mlflow/postgresql/user", "does not match"),
    "quota.hard.pods=abc": ("/quota/hard/pods", "does not match"),
    "job.enabled=true": ("job.name: is missing",),
    "job.name=My_Job": ("/job/name", "does not match"),
}


@pytest.mark.parametrize("setting", WRONG)
def test_refused(setting: str):
    result = template([*NAMED, setting])
    assert result.returncode == 1 and result.stdout == ""
    for words in WRONG[setting]:
        assert words in result.stderr
