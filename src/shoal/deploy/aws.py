"""`ray up` files for AWS, from a recipe: `python -m shoal.deploy.aws` writes those of `deploy/aws/`."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.core.errors import UserError
from shoal.deploy.files import shipped
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import ClusterSection, Recipe

HEAD, WORKERS = "ray.head.default", "ray.worker.default"
_EXAMPLE_EFS = "fs-00000000000000000"


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
_IMAGES = {
    False: "resolve:ssm:/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
    True: "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
}
"""By whether there are GPUs: AWS's own names for the newest image, which it looks up when a machine starts."""


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
    ssh_user: str = "ubuntu"
    security_group: str | None = None
    """One of the user's own; None: Ray makes one."""
    head_profile: str | None = None
    """The ARN of the head's instance profile; None: Ray makes one, which may do everything with EC2 and S3."""
    disk_gib: int = 150
    idle_minutes: int = 10


def cluster_file(recipe: Recipe, options: AwsOptions) -> dict[str, Any]:
    """What `ray up` is given for a recipe."""
    _check(options)
    kind, instance = choose_instance(recipe.cluster, options)
    machines = options.max_machines or math.ceil(recipe.cluster.workers / workers_on(recipe.cluster, kind, instance))
    if options.min_machines > machines:
        raise UserError(f"--min-machines: {options.min_machines} is more than the {machines} there may be")
    if machines > 1 and options.efs is None:
        raise UserError(
            f"--efs: is missing; {machines} machines have to share the run's folder: name an EFS file system, or take "
            "one machine with --max-machines 1"
        )
    activate = "source ~/venv/bin/activate"
    ray = f"{activate} && RAY_AUTH_MODE=token ray"
    return {
        "cluster_name": options.name,
        "max_workers": machines,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": options.idle_minutes,
        # Machines that were stopped would cost their disks, and come back with an old Shoal.
        "provider": {"type": "aws", "region": options.region, "cache_stopped_nodes": False},
        "auth": {"ssh_user": options.ssh_user},
        "available_node_types": {
            HEAD: {
                "resources": {"CPU": 0, "GPU": 0},
                "node_config": _node_config(options, options.head_type, is_head=True, has_gpus=False),
            },
            WORKERS: {
                "min_workers": options.min_machines,
                "max_workers": machines,
                "resources": {"CPU": instance.cpus} | ({"GPU": instance.gpus} if instance.gpus else {}),
                "node_config": _node_config(options, kind, is_head=False, has_gpus=bool(instance.gpus)),
            },
        },
        "head_node_type": HEAD,
        "file_mounts": {
            f"/home/{options.ssh_user}/shoal": ".",
            f"/home/{options.ssh_user}/.ray/auth_token": "~/.ray/auth_token",
        },
        "cluster_synced_files": [],
        "rsync_exclude": ["**/.git", "**/.git/**", ".venv", "runs", ".env", "**/__pycache__", "**/.*_cache"],
        "initialization_commands": [],
        "setup_commands": _setup(options, machines),
        "head_setup_commands": [f"{activate} && pip install --quiet boto3"],
        "worker_setup_commands": [],
        "head_start_ray_commands": [
            f"{ray} stop",
            # The dashboard stays on the head itself: `ray dashboard FILE` makes the way to it, by SSH.
            f"ulimit -n 65536; {ray} start --head --port=6379 --num-cpus=0 --dashboard-host=127.0.0.1 "
            "--autoscaling-config=~/ray_bootstrap_config.yaml --disable-usage-stats",
        ],
        "worker_start_ray_commands": [
            f"{ray} stop",
            f"ulimit -n 65536; {ray} start --address=$RAY_HEAD_IP:6379 --disable-usage-stats",
        ],
    }


def _check(options: AwsOptions) -> None:
    """Refuse what cannot be right, before anything is made of it."""
    patterns = {
        "name": r"[a-zA-Z][a-zA-Z0-9-]{0,60}",
        "region": r"[a-z]{2}(-[a-z]+)+-\d",
        "efs": r"fs-[0-9a-f]{8,17}",
        "image": r"ami-[0-9a-f]{8,17}|resolve:ssm:/\S+",
        "ssh_user": r"[a-z_][a-z0-9_-]*",
        "security_group": r"sg-[0-9a-f]{8,17}",
        "head_profile": r"arn:aws[a-z-]*:iam::\d{12}:instance-profile/\S+",
    }
    for field, pattern in patterns.items():
        value = getattr(options, field)
        if value is not None and not re.fullmatch(pattern, value):
            raise UserError(f"{_option(field)}: {value!r} is not the form that AWS gives it ({pattern})")
    for field, least in {"min_machines": 0, "max_machines": 1, "disk_gib": 50, "idle_minutes": 1}.items():
        value = getattr(options, field)
        if value is not None and value < least:
            raise UserError(f"{_option(field)}: {value} should be {least} or more")


def _option(field: str) -> str:
    return f"--{field.replace('_', '-')}"


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


def _node_config(options: AwsOptions, kind: str, *, is_head: bool, has_gpus: bool) -> dict[str, Any]:
    """What EC2 is asked for."""
    disk = {"VolumeSize": options.disk_gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    found: dict[str, Any] = {
        "InstanceType": kind,
        "ImageId": options.image or _IMAGES[has_gpus],
        "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": disk}],
        # Without a session's token, whoever makes a program fetch a page would get the machine's rights.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
    }
    if options.security_group:
        found["SecurityGroupIds"] = [options.security_group]
    if is_head and options.head_profile:
        found["IamInstanceProfile"] = {"Arn": options.head_profile}
    if not is_head and options.spot:
        found["InstanceMarketOptions"] = {"MarketType": "spot"}
    return found


def _setup(options: AwsOptions, machines: int) -> list[str]:
    """What is done on every machine before Ray starts; it may be done again."""
    pip = "source ~/venv/bin/activate && pip install --quiet --constraint ~/shoal/constraints.txt"
    commands = [
        "sudo apt-get update -qq && sudo apt-get install -qq -y python3-venv nfs-common",
        "test -x ~/venv/bin/python || python3 -m venv ~/venv",
        "grep -q venv/bin/activate ~/.bashrc || echo 'source ~/venv/bin/activate' >> ~/.bashrc",
        f"{pip} torch && pip install --quiet --constraint ~/shoal/constraints.txt ~/shoal",
        "chmod 700 ~/.ray && chmod 600 ~/.ray/auth_token",
    ]
    if options.efs is not None:
        where = f"{options.efs}.efs.{options.region}.amazonaws.com:/"
        how = "nfsvers=4.1,rsize=1048576,wsize=1048576,hard,timeo=600,retrans=2,noresvport"
        commands.append(
            "sudo mkdir -p /shared && { mountpoint -q /shared || "
            f"sudo mount -t nfs4 -o {how} {where} /shared; }} && sudo chown $USER /shared"
        )
    return commands


def to_text(contents: Mapping[str, Any], comment: str) -> str:
    """The file."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.safe_dump(dict(contents), sort_keys=False, width=1000)


_START = f"""\
From the top of a checkout of Shoal, with a token in ~/.ray/auth_token (ray get-auth-token --generate):
  ray up deploy/aws/NAME.yaml && ray dashboard deploy/aws/NAME.yaml &
  shoal submit RECIPE --wait-for-cluster 900 --run-dir /shared/runs/first --address http://localhost:8265
  ray down deploy/aws/NAME.yaml
Replace {_EXAMPLE_EFS} by your EFS file system. Made by `python -m shoal.deploy.aws`; docs/machines.md tells more."""
SHIPPED: Mapping[str, tuple[str, dict[str, Any], AwsOptions]] = {
    "cpu": (
        "Up to four machines with CPUs.",
        {"cluster.workers": 64, "cluster.min_workers": 1},
        AwsOptions(name="shoal-cpu", instance_type="m7i.4xlarge", efs=_EXAMPLE_EFS),
    ),
    "gpu": (
        "Up to four machines with eight GPUs each.",
        {"cluster.workers": 32, "cluster.gpus_per_worker": 1},
        AwsOptions(name="shoal-gpu", instance_type="g6.48xlarge", efs=_EXAMPLE_EFS),
    ),
    "spot": (
        "Up to eight spot machines with a GPU each; train with --workers 1:8, as they come and go.",
        {"cluster.workers": 8, "cluster.min_workers": 1, "cluster.gpus_per_worker": 1},
        AwsOptions(name="shoal-spot", instance_type="g6.2xlarge", spot=True, efs=_EXAMPLE_EFS),
    ),
}
"""What each file is, the recipe's part in it, and the rest."""


def shipped_files() -> dict[str, str]:
    """The files of `deploy/aws/`, by name."""
    found = {}
    for name, (words, overrides, options) in SHIPPED.items():
        loaded = load_recipe(["digits"], overrides)
        comment = f"{words}\n{_START.replace('NAME', name)}"
        found[f"{name}.yaml"] = to_text(cluster_file(loaded.recipe, options), comment)
    return found


def write_files(folder: Path) -> None:
    """Write them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in shipped_files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_files(shipped("aws"))
