"""`ray up` files for AWS, from a recipe: `python -m shoal.deploy.aws` writes those of `deploy/aws/`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.deploy.aws_machines import (
    IMAGES,
    AwsOptions,
    check_image,
    check_options,
    choose_instance,
    find_image,
    most_machines,
)
from shoal.deploy.extras import extras
from shoal.deploy.files import shipped
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe

HEAD, WORKERS = "ray.head.default", "ray.worker.default"
_EXAMPLE_EFS, _EXAMPLE_IMAGE = "fs-00000000000000000", "ami-00000000000000000"


_ACTIVATE = "source ~/venv/bin/activate"
_PIP = f"{_ACTIVATE} && pip install --quiet --constraint ~/shoal/constraints.txt"


def cluster_file(recipe: Recipe, options: AwsOptions) -> dict[str, Any]:
    """What `ray up` is given for a recipe."""
    check_options(options)
    kind, instance = choose_instance(recipe.cluster, options)
    machines = most_machines(recipe.cluster, options, kind, instance)
    check_image(options, has_gpus=bool(instance.gpus))
    ray = f"{_ACTIVATE} && RAY_AUTH_MODE=token ray"
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
        "setup_commands": _setup(options, extras(recipe)),
        "head_setup_commands": [f"{_PIP} boto3"],
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


def _node_config(options: AwsOptions, kind: str, *, is_head: bool, has_gpus: bool) -> dict[str, Any]:
    """What EC2 is asked for."""
    disk = {"VolumeSize": options.disk_gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True}
    found: dict[str, Any] = {
        "InstanceType": kind,
        "ImageId": options.image or f"resolve:ssm:{IMAGES[has_gpus]}",
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


def _setup(options: AwsOptions, needed: Sequence[str]) -> list[str]:
    """What is done on every machine before Ray starts; it may be done again."""
    shoal = f"~/shoal'[{','.join(needed)}]'" if needed else "~/shoal"
    commands = [
        "sudo apt-get update -qq && sudo apt-get install -qq -y python3-venv nfs-common",
        "test -x ~/venv/bin/python || python3 -m venv ~/venv",
        "grep -q venv/bin/activate ~/.bashrc || echo 'source ~/venv/bin/activate' >> ~/.bashrc",
        f"{_PIP} torch && pip install --quiet --constraint ~/shoal/constraints.txt {shoal}",
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
Replace {_EXAMPLE_EFS} by your EFS file system, and {_EXAMPLE_IMAGE} by the image that this names:
  FIND
Then, from the top of a checkout of Shoal, with a token in ~/.ray/auth_token (ray get-auth-token --generate):
  ray up deploy/aws/NAME.yaml && ray dashboard deploy/aws/NAME.yaml &
  shoal submit RECIPE --wait-for-cluster 900 --run-dir /shared/runs/first --address http://localhost:8265
  ray down deploy/aws/NAME.yaml
Made by `python -m shoal.deploy.aws`; docs/machines.md tells more."""
SHIPPED: Mapping[str, tuple[str, dict[str, Any], AwsOptions]] = {
    "cpu": (
        "Up to four machines with CPUs.",
        {"cluster.workers": 64, "cluster.min_workers": 1},
        AwsOptions(name="shoal-cpu", instance_type="m7i.4xlarge", efs=_EXAMPLE_EFS, image=_EXAMPLE_IMAGE),
    ),
    "gpu": (
        "Up to four machines with eight GPUs each.",
        {"cluster.workers": 32, "cluster.gpus_per_worker": 1},
        AwsOptions(name="shoal-gpu", instance_type="g6.48xlarge", efs=_EXAMPLE_EFS, image=_EXAMPLE_IMAGE),
    ),
    "spot": (
        "Up to eight spot machines with a GPU each; train with --workers 1:8, as they come and go.",
        {"cluster.workers": 8, "cluster.min_workers": 1, "cluster.gpus_per_worker": 1},
        AwsOptions(name="shoal-spot", instance_type="g6.2xlarge", spot=True, efs=_EXAMPLE_EFS, image=_EXAMPLE_IMAGE),
    ),
}
"""What each file is, the recipe's part in it, and the rest."""


def shipped_files() -> dict[str, str]:
    """The files of `deploy/aws/`, by name."""
    found = {}
    for name, (words, overrides, options) in SHIPPED.items():
        loaded = load_recipe(["digits"], overrides)
        find = find_image(options.region, has_gpus=bool(loaded.recipe.cluster.gpus_per_worker))
        comment = f"{words}\n{_START.replace('NAME', name).replace('FIND', find)}"
        found[f"{name}.yaml"] = to_text(cluster_file(loaded.recipe, options), comment)
    return found


def write_files(folder: Path) -> None:
    """Write them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in shipped_files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write_files(shipped("aws"))
