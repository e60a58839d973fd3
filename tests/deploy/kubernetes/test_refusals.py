"""Values that cannot work are refused in a line that names them."""

import pytest

from tests.deploy.kubernetes.rendering import CHART_FOLDER, NAMED, helm, template

WRONG = {
    "workers.cpu.gpus=-1": ("/workers/cpu/gpus", "got -1, want 0"),
    "workers.cpu.minReplicas=-2": ("/workers/cpu/minReplicas", "got -2, want 0"),
    "workers.cpu.minReplicas=9": ("workers.cpu.minReplicas: 9 is more than maxReplicas, 4",),
    "workers.cpu.replicas=7": ("workers.cpu.replicas: 7 is not between minReplicas, 0, and maxReplicas, 4",),
    "workers.cpu.shm=32Gi": ("workers.cpu.shm: 32Gi is more than the pod's memory, 16Gi",),
    "workers.cpu.leads=true": ("workers.cpu.minReplicas: jobs are led from this group, so it has at least one pod",),
    "workers.cpu.resources.memory=64Gi": ("workers.cpu.resources: memory is said as workers.cpu.memory",),
    "workers.cpu.resources.nvidia\\.com/gpu=2": ("nvidia.com/gpu is said as workers.cpu.gpus",),
    "workers.cpu.resources.a\\.b/c=xyz": ("/workers/cpu/resources/a.b", "does not match"),
    "workers.cpu.leads=true,workers.cpu.minReplicas=1,workers.cpu.gpus=2": (
        "workers.cpu.leads: a group that leads does not train",
    ),
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
    "storage.runs.mountPath=/tmp": (
        "storage.runs.mountPath: /tmp is taken by /tmp of the image",
        "/shared for example",
    ),
    "storage.runs.mountPath=/home": ("storage.runs.mountPath: /home is taken by /home/shoal of the image",),
    "storage.runs.mountPath=/etc/shoal": ("storage.runs.mountPath: /etc/shoal is taken by /etc of the image",),
    "storage.runs.mountPath=/shared/": ("storage.runs.mountPath: /shared/ should be written as /shared",),
    "storage.datasets.enabled=true,storage.datasets.storageClass=x,storage.datasets.mountPath=/shared": (
        "storage.datasets.mountPath: /shared is where the runs are",
    ),
    "storage.s3.endpoint=s3.example.com": ("/storage/s3/endpoint", "does not match"),
    "workers.head.cpu=1,workers.head.memory=4Gi,workers.head.minReplicas=0,workers.head.maxReplicas=1": (
        "workers.head: is what the head's own group is called",
    ),
    "workers.cpu.shm=128Mi": ("workers.cpu.shm: 128Mi is too small: Ray's store has half of it",),
    "head.shm=64Gi": ("head.shm: 64Gi is more than the pod's memory, 8Gi",),
    "limitRange.max.cpu=1": ("limitRange.max.cpu: 1 is less than head.cpu, 2, whose pods would be refused",),
    "limitRange.max.memory=12Gi": ("limitRange.max.memory: 12Gi is less than workers.cpu.memory, 16Gi",),
    "limitRange.max.memory=16Gi,mlflow.enabled=true,mlflow.memory=32Gi": ("is less than mlflow.memory, 32Gi",),
    "limitRange.max.memory=16Gi,autoscaler.memory=17Gi": ("is less than autoscaler.memory, 17Gi",),
    "limitRange.max.memory=256Mi,head.memory=256Mi,head.shm=256Mi": ("is less than a job's submitter.memory, 512Mi",),
    "networkPolicy.apiServer.ports=null": ("/networkPolicy/apiServer", "ports"),
    "workers=null": ("missing property 'workers'",),
    "head=null": ("missing property 'head'",),
    "storage.runs=null": ("/storage", "missing property 'runs'"),
    "mlflow.postgresql=null": ("/mlflow", "missing property 'postgresql'"),
    "environment=null": ("missing property 'environment'",),
    "storage.datasets.enabled=true,storage.datasets.storageClass=x,storage.datasets.mountPath=/data,"
    "storage.runs.mountPath=/data/runs": ("storage.runs.mountPath: /data/runs is inside of the datasets, /data",),
    "quota.hard.pods=100K": ("/quota/hard/pods", "does not match"),
    "dcgm.enabled=true,dcgm.namespace=ml": ("dcgm.namespace: ml is the namespace of Ray's pods",),
    "storage.runs.mountPath=shared": ("/storage/runs/mountPath", "does not match"),
    "mlflow.postgresql.user=a-b": ("/mlflow/postgresql/user", "does not match"),
    "quota.hard.pods=abc": ("/quota/hard/pods", "does not match"),
    "quota.hard.foo=3": ("/quota/hard", "foo"),
    "rbac.submitters[0].foo=bar": ("/rbac/submitters/0", "foo"),
    "rbac.submitters[0].kind=Team,rbac.submitters[0].name=a": ("/rbac/submitters/0/kind", "ServiceAccount"),
    "networkPolicy.egress[0].too[0].a=b": ("/networkPolicy/egress/0", "too"),
    "networkPolicy.apiServer.cidrs={999.1.1.1/8}": ("/networkPolicy/apiServer/cidrs/0", "does not match"),
    "workers.cpu.maxReplicas=99999999999": ("/workers/cpu/maxReplicas", "maximum: got"),
    **{
        f"environment.{name}=x": (f"environment.{name}: is set by KubeRay as auth, tls, gcsFaultTolerance and",)
        for name in ("RAY_AUTH_MODE", "RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "RAY_USE_TLS", "RAY_enable_autoscaler_v2")
    },
    "rbac.submitters[0].kind=ServiceAccount,rbac.submitters[0].name=a": ("the service account a needs its namespace",),
    "monitoring.labels=null": ("/monitoring", "labels"),
    "nccl.environment.RAY_AUTH_MODE=disabled": ("nccl.environment.RAY_AUTH_MODE: is set by KubeRay",),
    "job.enabled=true": ("job.name: is missing",),
    "job.name=My_Job": ("/job/name", "does not match"),
}


@pytest.mark.parametrize("setting", WRONG)
def test_refused(setting: str):
    result = template([*NAMED, setting])
    assert result.returncode == 1 and result.stdout == ""
    for words in WRONG[setting]:
        assert words in result.stderr


def test_what_kubernetes_takes_is_taken():
    assert template([*NAMED, "quota.hard.hugepages-2Mi=4Gi", "environment.REDIS_URL=redis://x"]).returncode == 0


@pytest.mark.parametrize("path", ["/tmp/runs", "/home/shoal/runs", "/opt/runs", "/var/lib/shoal"])
def test_a_mount_that_hides_nothing_is_taken(path: str):
    assert template([*NAMED, f"storage.runs.mountPath={path}"]).returncode == 0


@pytest.mark.parametrize("release", ["1st", "My", "a.b", "a" * 41, "shoal-"])
def test_names_that_services_cannot_have(release: str):
    result = helm("template", release, str(CHART_FOLDER), "--set", NAMED[0])
    assert result.returncode == 1
    assert "a release's name has at most 40 small letters" in result.stderr or "invalid release name" in result.stderr
