"""Which of AWS's machines a recipe's workers run on, how many of them, and what is refused of what the user says."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.errors import UserError
from shoal.recipe.schema import ClusterSection


@dataclass(frozen=True)
class Instance:
    """What a type of AWS's machines has."""

    cpus: int
    gpus: int = 0


# From AWS's pages of its instance types. How large a GPU's memory is does not decide here: `shoal plan` tells.
INSTANCES: Mapping[str, Instance] = {
    "m7i.large": Instance(2),
    "m7i.xlarge": Instance(4),
    "m7i.2xlarge": Instance(8),
    "m7i.4xlarge": Instance(16),
    "m7i.8xlarge": Instance(32),
    "m7i.24xlarge": Instance(96),
    "c7i.4xlarge": Instance(16),
    "c7i.24xlarge": Instance(96),
    "g6.xlarge": Instance(4, 1),
    "g6.2xlarge": Instance(8, 1),
    "g6.4xlarge": Instance(16, 1),
    "g6.12xlarge": Instance(48, 4),
    "g6.48xlarge": Instance(192, 8),
    "g6e.2xlarge": Instance(8, 1),
    "g6e.12xlarge": Instance(48, 4),
    "g6e.48xlarge": Instance(192, 8),
    "g5.2xlarge": Instance(8, 1),
    "g5.12xlarge": Instance(48, 4),
    "g5.48xlarge": Instance(192, 8),
    "p4d.24xlarge": Instance(96, 8),
    "p4de.24xlarge": Instance(96, 8),
    "p5.48xlarge": Instance(192, 8),
    "p5en.48xlarge": Instance(192, 8),
}
_BY_GPUS = ("g6.2xlarge", "g6.12xlarge", "g6.48xlarge")
_BY_CPUS = ("m7i.xlarge", "m7i.2xlarge", "m7i.4xlarge", "m7i.8xlarge", "m7i.24xlarge")
IMAGES = {
    False: "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
    True: "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
}
"""By whether there are GPUs: AWS's own names for the newest image, which who has ssm:GetParameters may look up."""
_FORMS = {
    "name": (
        r"[a-zA-Z][a-zA-Z0-9-]{0,60}",
        "my-cluster-2: letters, digits and hyphens, 61 at most, and a letter first",
    ),
    "region": (r"[a-z]{2}(-[a-z]+)+-\d", "us-west-2"),
    "efs": (r"fs-[0-9a-f]{8,17}", "fs-0123456789abcdef0"),
    "image": (r"ami-[0-9a-f]{8,17}|resolve:ssm:/\S+", "ami-0123456789abcdef0"),
    "ssh_user": (r"[a-z_][a-z0-9_-]*", "ubuntu"),
    "security_group": (r"sg-[0-9a-f]{8,17}", "sg-0123456789abcdef0"),
    "head_profile": (
        r"arn:aws[a-z-]*:iam::\d{12}:instance-profile/\S+",
        "arn:aws:iam::123456789012:instance-profile/NAME",
    ),
}
"""What a word should look like, and an example of it."""


@dataclass(frozen=True)
class AwsOptions:
    """What a recipe does not say."""

    name: str = "shoal"
    region: str = "us-west-2"
    instance_type: str | None = None
    """Of the machines that train; None: the smallest that fits, by the table."""
    machine_cpus: int | None = None
    """Of an instance type that the table does not have, as `machine_gpus`."""
    machine_gpus: int | None = None
    head_type: str = "m7i.large"
    min_machines: int = 0
    max_machines: int | None = None
    """None: as many as all workers of the recipe need."""
    spot: bool = False
    efs: str | None = None
    """The file system that all machines mount at /shared."""
    image: str | None = None
    """Of Ubuntu; None: the newest, which the role of `head_profile` has to be allowed to look up."""
    ssh_user: str = "ubuntu"
    security_group: str | None = None
    """One of the user's own; None: Ray makes one."""
    head_profile: str | None = None
    """The ARN of the head's instance profile; None: Ray makes one, which may do everything with EC2 and S3."""
    disk_gib: int = 150
    idle_minutes: int = 10


def check_options(options: AwsOptions) -> None:
    """Refuse what cannot be right, before anything is made of it."""
    for field, (pattern, example) in _FORMS.items():
        value = getattr(options, field)
        if value is not None and not re.fullmatch(pattern, value):
            raise UserError(f"{_option(field)}: {value!r} should be as in {example}")
    for field, least in {"min_machines": 0, "max_machines": 1, "disk_gib": 50, "idle_minutes": 1}.items():
        value = getattr(options, field)
        if value is not None and value < least:
            raise UserError(f"{_option(field)}: {value} should be {least} or more")


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def most_machines(cluster: ClusterSection, options: AwsOptions, kind: str, instance: Instance) -> int:
    """How many machines there may be; refused where they are too few, or would have to share what is not there."""
    on_each = workers_on(cluster, kind, instance)
    machines = options.max_machines or math.ceil(cluster.workers / on_each)
    least, held = cluster.min_workers or cluster.workers, machines * on_each
    if held < least:
        raise UserError(
            f"--max-machines: {machines} {kind} {'holds' if machines == 1 else 'hold'} {held} of the {least} workers; "
            f"give {math.ceil(least / on_each)}, or --workers {held}:{cluster.workers}"
        )
    if options.min_machines > machines:
        raise UserError(f"--min-machines: {options.min_machines} is more than the {machines} there may be")
    if machines > 1 and options.efs is None:
        fewer = f" --workers {on_each}:{cluster.workers}" if on_each < least else ""
        raise UserError(
            f"--efs: is missing; {machines} machines have to share the run's folder: name an EFS file system, or take "
            f"one machine with --max-machines 1{fewer}"
        )
    return machines


def check_image(options: AwsOptions, *, has_gpus: bool) -> None:
    """Machines are started by the head, and the role that Ray makes for it may look up no name of an image."""
    if options.head_profile or (options.image or "").startswith("ami-"):
        return
    what = f"{options.image} is a name" if options.image else "is missing"
    raise UserError(
        f"--image: {what}; the head may not look it up when it starts machines: give --head-profile, whose role may do "
        f"ssm:GetParameters, or the image that this names: {find_image(options.region, has_gpus=has_gpus)}"
    )


def find_image(region: str, *, has_gpus: bool) -> str:
    """The command that names the newest image."""
    query = "--query 'Parameters[0].Value' --output text"
    return f"aws ssm get-parameters --region {region} {query} --names {IMAGES[has_gpus]}"


def choose_instance(cluster: ClusterSection, options: AwsOptions) -> tuple[str, Instance]:
    """The type of the machines that train, and what it has."""
    kind = options.instance_type
    if kind is not None:
        if options.machine_cpus:
            return kind, Instance(options.machine_cpus, options.machine_gpus or 0)
        if kind not in INSTANCES:
            raise UserError(
                f"--instance-type: {kind!r} is not in Shoal's table; say what it has with --machine-cpus and "
                f"--machine-gpus, or take one of {', '.join(INSTANCES)}"
            )
        return kind, INSTANCES[kind]
    if options.machine_cpus or options.machine_gpus:
        raise UserError("--instance-type: is missing; --machine-cpus and --machine-gpus say what that type has")
    gpus, cpus = _gpus(cluster) * cluster.workers, (cluster.cpus_per_worker or 1) * cluster.workers
    kinds, need = (_BY_GPUS, gpus) if gpus else (_BY_CPUS, cpus)
    chosen = kinds[-1]  # the largest, where one machine is not enough
    for name in reversed(kinds):
        has = INSTANCES[name]
        if (has.gpus if gpus else has.cpus) >= need and _fitting(cluster, has) >= cluster.workers:
            chosen = name
    return chosen, INSTANCES[chosen]


def _gpus(cluster: ClusterSection) -> float:
    """What each worker needs: without a word, none, as nothing can be looked up."""
    return float(cluster.gpus_per_worker or 0)


def _fitting(cluster: ClusterSection, instance: Instance) -> int:
    """How many workers a machine has room for."""
    rooms = [instance.cpus // (cluster.cpus_per_worker or 1)]
    if gpus := _gpus(cluster):
        rooms.append(math.floor(instance.gpus / gpus + 1e-9))
    return min(rooms)


def workers_on(cluster: ClusterSection, kind: str, instance: Instance) -> int:
    """How many workers each machine takes."""
    fitting = _fitting(cluster, instance)
    if not fitting:
        need = f"{cluster.cpus_per_worker or 1} CPU and {_gpus(cluster):g} GPU"
        raise UserError(
            f"--instance-type: {kind} has {instance.cpus} CPU and {instance.gpus} GPU, and a worker needs {need}; take "
            "a larger one, or less of cluster.cpus_per_worker or cluster.gpus_per_worker"
        )
    return min(fitting, cluster.workers)
