"""`ray up` files: what a recipe needs is in them, and nothing is open."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core import remote
from shoal.core.errors import UserError
from shoal.deploy.aws import HEAD, WORKERS, cluster_file, shipped_files, write_files
from shoal.deploy.aws_machines import INSTANCES, AwsOptions
from shoal.deploy.extras import extras
from shoal.deploy.files import shipped
from shoal.observe.track.section import SINKS
from shoal.recipe.load import load_recipe

EFS, IMAGE = "fs-0123456789abcdef0", "ami-0123456789abcdef0"
PROFILE = "arn:aws:iam::123456789012:instance-profile/head"


def made(options: AwsOptions | None = None, **cluster: Any) -> dict[str, Any]:
    overrides = {f"cluster.{name}": value for name, value in cluster.items()} | {"train.global_batch": 9600}
    return cluster_file(load_recipe(["digits"], overrides).recipe, options or AwsOptions(efs=EFS, image=IMAGE))


def of_workers(contents: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = contents["available_node_types"][WORKERS]
    return found


def test_the_files_of_the_repository_are_what_is_made() -> None:
    files = shipped_files()
    assert set(files) == {path.name for path in shipped("aws").glob("*")}
    for name, text in files.items():
        assert (shipped("aws") / name).read_text(encoding="utf-8") == text, (
            "python -m shoal.deploy.aws writes them anew"
        )


def test_they_are_written_where_one_says(tmp_path: Any) -> None:
    write_files(tmp_path / "aws")
    assert {path.name for path in (tmp_path / "aws").iterdir()} == {"cpu.yaml", "gpu.yaml", "spot.yaml"}


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml", "spot.yaml"])
def test_ray_takes_them(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from ray.autoscaler._private.util import validate_config

    contents = yaml.safe_load(shipped_files()[name])
    validate_config(contents)
    with pytest.raises(jsonschema.ValidationError):
        validate_config(contents | {"max_workers": -1})


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml", "spot.yaml"])
def test_nothing_is_open_and_nothing_secret_is_inside(name: str) -> None:
    text = shipped_files()[name]
    contents = yaml.safe_load(text)
    for node_type in contents["available_node_types"].values():
        config = node_type["node_config"]
        assert config["MetadataOptions"]["HttpTokens"] == "required"
        assert all(device["Ebs"]["Encrypted"] for device in config["BlockDeviceMappings"])
    starts = contents["head_start_ray_commands"] + contents["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=token ray" in command for command in starts)
    assert "--dashboard-host=127.0.0.1" in starts[1] and "0.0.0.0" not in text
    assert contents["file_mounts"]["/home/ubuntu/.ray/auth_token"] == "~/.ray/auth_token"
    assert "security_group" not in contents["provider"], "so that Ray opens SSH, and the rest to the group alone"
    assert {"runs", ".env", ".venv"} <= set(contents["rsync_exclude"])


def test_the_head_takes_no_training() -> None:
    contents = made(workers=2)
    assert contents["head_node_type"] == HEAD
    assert contents["available_node_types"][HEAD]["resources"] == {"CPU": 0, "GPU": 0}
    assert "--num-cpus=0" in contents["head_start_ray_commands"][1]


@pytest.mark.parametrize(
    ("cluster", "kind", "machines"),
    [
        ({"workers": 2}, "m7i.xlarge", 1),
        ({"workers": 16}, "m7i.4xlarge", 1),
        ({"workers": 4, "cpus_per_worker": 8}, "m7i.8xlarge", 1),
        ({"workers": 200}, "m7i.24xlarge", 3),
        ({"workers": 3, "cpus_per_worker": 50}, "m7i.24xlarge", 3),
        ({"workers": 1, "gpus_per_worker": 1}, "g6.2xlarge", 1),
        ({"workers": 4, "gpus_per_worker": 1}, "g6.12xlarge", 1),
        ({"workers": 20, "gpus_per_worker": 1}, "g6.48xlarge", 3),
        ({"workers": 2, "gpus_per_worker": 1, "cpus_per_worker": 16}, "g6.12xlarge", 1),
    ],
)
def test_machines_are_chosen_that_have_room_for_all_workers(cluster: dict[str, Any], kind: str, machines: int) -> None:
    contents = made(**cluster)
    workers = of_workers(contents)
    assert workers["node_config"]["InstanceType"] == kind
    assert workers["max_workers"] == contents["max_workers"] == machines
    assert workers["resources"].get("GPU", 0) == INSTANCES[kind].gpus


def test_what_is_said_goes_before_what_is_chosen() -> None:
    options = AwsOptions(
        efs=EFS,
        instance_type="g7.8xlarge",
        machine_cpus=32,
        machine_gpus=2,
        spot=True,
        min_machines=1,
        max_machines=3,
        security_group="sg-0123456789abcdef0",
        head_profile=PROFILE,
        image=IMAGE,
    )
    contents = made(options, workers=2, gpus_per_worker=1)
    workers, head = of_workers(contents), contents["available_node_types"][HEAD]
    assert (workers["min_workers"], workers["max_workers"]) == (1, 3)
    assert workers["resources"] == {"CPU": 32, "GPU": 2}
    assert workers["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert "InstanceMarketOptions" not in head["node_config"], "a head that is taken away takes all with it"
    assert head["node_config"]["IamInstanceProfile"]["Arn"].endswith("/head")
    for node_type in (workers, head):
        assert node_type["node_config"]["SecurityGroupIds"] == ["sg-0123456789abcdef0"]
        assert node_type["node_config"]["ImageId"] == IMAGE
    assert any(EFS in command for command in contents["setup_commands"])
    assert json.dumps(contents)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (AwsOptions(), "--efs: is missing; 2 machines"),
        (AwsOptions(efs="efs"), "--efs: 'efs' should be as in fs-0123456789abcdef0"),
        (AwsOptions(efs=EFS, region="Frankfurt"), "--region: 'Frankfurt' should be as in us-west-2"),
        (AwsOptions(efs=EFS, name="my cluster"), "--name: 'my cluster' should be as in my-cluster-2: letters, digits"),
        (AwsOptions(efs=EFS, ssh_user="ubuntu; id"), "--ssh-user: 'ubuntu; id' should be as in ubuntu"),
        (AwsOptions(efs=EFS, image="ubuntu"), "--image: 'ubuntu' should be as in ami-0123456789abcdef0"),
        (AwsOptions(efs=EFS, security_group="sg"), "--security-group: 'sg' should be as in sg-0123456789abcdef0"),
        (AwsOptions(efs=EFS, head_profile="me"), "should be as in arn:aws:iam::123456789012:instance-profile/NAME"),
        (AwsOptions(efs=EFS, instance_type="g6.2xlage"), "--instance-type: 'g6.2xlage' is not in Shoal's table"),
        (AwsOptions(efs=EFS, instance_type="m7i.large"), "has 2 CPU and 0 GPU, and a worker needs 1 CPU and 1 GPU"),
        (AwsOptions(efs=EFS, machine_gpus=1), "--instance-type: is missing"),
        (AwsOptions(efs=EFS, min_machines=3), "--min-machines: 3 is more than the 2"),
        (AwsOptions(efs=EFS, max_machines=0), "--max-machines: 0 should be 1 or more"),
        (
            AwsOptions(efs=EFS, image=IMAGE, instance_type="p4d.24xlarge", max_machines=1),
            "--max-machines: 1 p4d.24xlarge holds 8 of the 16 workers; give 2, or --workers 8:16",
        ),
        (AwsOptions(image=IMAGE, instance_type="p4d.24xlarge"), "with --max-machines 1 --workers 8:16"),
        (AwsOptions(efs=EFS, disk_gib=8), "--disk-gib: 8 should be 50 or more"),
    ],
)
def test_what_cannot_work_is_refused_by_its_option(options: AwsOptions, told: str) -> None:
    with pytest.raises(UserError) as refused:
        made(options, workers=16, gpus_per_worker=1)
    assert told in str(refused.value)


def test_one_machine_needs_no_shared_storage() -> None:
    contents = made(AwsOptions(max_machines=1, image=IMAGE), workers=2)
    assert not any("/shared" in command for command in contents["setup_commands"])


def test_fewer_machines_will_do_where_fewer_workers_will() -> None:
    options = AwsOptions(efs=EFS, image=IMAGE, instance_type="p4d.24xlarge", max_machines=1)
    assert of_workers(made(options, workers=16, min_workers=8, gpus_per_worker=1))["max_workers"] == 1
    with pytest.raises(UserError, match=r"1 p4d\.24xlarge holds 8 of the 9 workers; give 2, or --workers 8:16"):
        made(options, workers=16, min_workers=9, gpus_per_worker=1)


@pytest.mark.parametrize(("gpus", "parameter"), [(0, "canonical/ubuntu/server/24.04"), (1, "deeplearning/ami/x86_64")])
def test_an_image_is_named_unless_the_head_may_look_it_up(gpus: int, parameter: str) -> None:
    cluster = {"workers": 1, "gpus_per_worker": gpus}
    with pytest.raises(UserError) as refused:
        made(AwsOptions(efs=EFS, region="eu-west-1"), **cluster)
    told = str(refused.value)
    assert told.startswith("--image: is missing") and "--head-profile, whose role may do ssm:GetParameters" in told
    assert "aws ssm get-parameters --region eu-west-1" in told and f"--names /aws/service/{parameter}" in told
    with pytest.raises(UserError, match="--image: resolve:ssm:/mine is a name; the head may not look it up"):
        made(AwsOptions(efs=EFS, image="resolve:ssm:/mine"), **cluster)
    looked_up = of_workers(made(AwsOptions(efs=EFS, head_profile=PROFILE), **cluster))["node_config"]["ImageId"]
    assert looked_up.startswith(f"resolve:ssm:/aws/service/{parameter}")


def test_shipped_files_say_what_to_replace() -> None:
    for text in shipped_files().values():
        comment = text.partition("cluster_name:")[0]
        assert "fs-00000000000000000" in comment and "ami-00000000000000000" in comment
        assert "resolve:ssm" not in text and text.count("ImageId: ami-00000000000000000") == 2
        kind = "deeplearning" if "GPU: 8" in text or "GPU: 1" in text else "canonical"
        assert "aws ssm get-parameters --region us-west-2" in comment and f"--names /aws/service/{kind}/" in comment


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ({}, []),
        (
            {"track.mlflow": True, "track.tensorboard": True, "track.wandb": True, "track.otlp": True},
            ["mlflow", "otlp", "tensorboard", "wandb"],
        ),
        ({"checkpoint.upload_to": "s3://bucket/runs"}, ["s3"]),
        ({"checkpoint.upload_to": "gs://bucket/runs"}, ["gcs"]),
        ({"checkpoint.upload_to": "az://bucket/runs"}, ["azure"]),
        ({"checkpoint.upload_to": "file:///shared/runs"}, []),
        ({"parallel.strategy": "deepspeed", "cluster.workers": 2}, ["deepspeed"]),
        ({"model": {"name": "torchvision:resnet18"}}, ["torchvision"]),
        ({"model": {"name": "transformers:ViTForImageClassification"}}, ["transformers"]),
        ({"model": {"name": "mine:Model"}}, []),
        ({"data": {"name": "image_folder", "dir": "s3://bucket/images"}}, ["images", "parquet", "s3"]),
        ({"data": {"name": "mine:rows", "loader": "ray"}}, ["ray"]),
    ],
)
def test_extras_are_those_that_the_recipe_needs(overrides: dict[str, Any], needed: list[str]) -> None:
    assert extras(load_recipe(["digits"], overrides).recipe) == needed


@pytest.mark.parametrize(("tokenizer", "needed"), [("chars", []), ("bytes", []), ("bpe.json", ["text"])])
def test_a_tokenizer_of_a_file_needs_its_library(tokenizer: str, needed: list[str]) -> None:
    assert extras(load_recipe(["shakespeare"], {"data.tokenizer": tokenizer}).recipe) == needed


def test_extras_are_installed_and_exist() -> None:
    contents = cluster_file(load_recipe(["imagenet"]).recipe, AwsOptions(image=IMAGE))
    (install,) = (command for command in contents["setup_commands"] if "torch &&" in command)
    assert install.endswith(" ~/shoal'[images,parquet]'")
    assert made(workers=2)["setup_commands"][3].endswith(" ~/shoal")
    optional = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {"images", "parquet", "text", *SINKS, *remote.EXTRAS.values()} <= set(optional["optional-dependencies"])
    assert "constraints.txt boto3" in contents["head_setup_commands"][0], "or botocore is newer than s3fs bears"
