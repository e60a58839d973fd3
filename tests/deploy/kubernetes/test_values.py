"""A recipe in terms of pods: pure functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import UserError
from shoal.deploy.kubernetes.chart import Group
from shoal.deploy.kubernetes.job import data_elsewhere, entrypoint, job_name, not_scaled
from shoal.deploy.kubernetes.need import need_of
from shoal.deploy.kubernetes.values import (
    Machines,
    Need,
    group_values,
    over_quota,
    own_group,
    pod_memory,
    too_large,
    workers_per_pod,
    workers_values,
)
from shoal.recipe.load import load_recipe
from shoal.recipe.schema import Recipe

GIB = 1 << 30
CPU = Need(device=GIB, host=0, on_gpu=False)
GPU = Need(device=60 * GIB, host=10 * GIB, on_gpu=True)


@pytest.mark.parametrize(("workers", "per_machine", "each"), [(1, 8, 1), (16, 8, 8), (12, 8, 6), (3, 8, 3), (5, 2, 2)])
def test_workers_share_the_gpus_of_a_machine(workers: int, per_machine: int, each: int):
    assert workers_per_pod(workers, True, per_machine) == each
    assert workers_per_pod(workers, False, per_machine) == 1


@given(st.integers(1, 600), st.integers(1, 16))
def test_there_is_place_for_all_workers_and_no_pod_is_larger_than_a_machine(workers: int, per_machine: int):
    each = workers_per_pod(workers, True, per_machine)
    pods = -(-workers // each)
    assert each <= per_machine and pods == -(-workers // per_machine)  # as few as it takes


@given(st.integers(0, 200 * GIB), st.integers(0, 200 * GIB), st.booleans(), st.integers(1, 8))
def test_a_pod_holds_its_workers_and_its_shared_memory(device: int, host: int, on_gpu: bool, workers: int):
    memory, shm = pod_memory(Need(device, host, on_gpu), workers)
    own = host if on_gpu else device + host
    assert memory % GIB == 0 and shm % GIB == 0 and 0 < shm < memory
    assert memory - shm >= workers * (own + GIB) + GIB


def _recipe(**cluster: float) -> Recipe:
    return load_recipe(["digits", {"train": {"global_batch": 120}, "cluster": cluster}]).recipe


def test_a_group_of_a_recipe():
    recipe = _recipe(workers=12, min_workers=5, gpus_per_worker=1)
    group = group_values(recipe, GPU, Machines(gpus_per_machine=4))
    assert (group["minReplicas"], group["maxReplicas"], group["gpus"]) == (2, 3, 4)
    assert group["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    recipe = _recipe(workers=3, cpus_per_worker=5)
    group = group_values(recipe, CPU, Machines())
    assert (group["minReplicas"], group["maxReplicas"], group["cpu"], group["gpus"]) == (3, 3, 5, 0)
    assert group_values(recipe, CPU, Machines(cpus=9))["cpu"] == 9
    with pytest.raises(UserError, match="part of a GPU"):
        group_values(_recipe(workers=1, gpus_per_worker=0.5), CPU, Machines())


SMALL = Group(gpus=0, cpu=4, memory=16 * GIB)
LARGE = Group(gpus=8, cpu=96, memory=900 * GIB, has_selector=True)
LEADER = Group(gpus=0, cpu=2, memory=8 * GIB, leads=True)


def test_the_recipe_takes_the_place_of_the_group_of_its_kind():
    there = {"leader": LEADER, "cpu": SMALL, "big": LARGE}
    on_cpu, on_gpu = _recipe(), _recipe(gpus_per_worker=1)
    assert own_group(on_cpu, there) == "cpu" and own_group(on_gpu, there) == "big"
    assert own_group(on_cpu, {"leader": LEADER, "big": LARGE}) == "cpu" and own_group(on_gpu, {}) == "gpu"
    gpu = {"gpus": 2, "nodeSelector": {"nvidia.com/gpu.present": "true"}}
    assert workers_values(gpu, "big", there) == {"cpu": None, "big": {"gpus": 2}}  # its own selector stays
    assert workers_values({"gpus": 0}, "cpu", there) == {"cpu": {"gpus": 0}, "big": None}
    assert workers_values(gpu, "gpu", {"leader": LEADER}) == {"gpu": gpu}


def test_pods_are_no_larger_than_those_of_the_group_where_nobody_asks_for_more():
    recipe = _recipe(workers=15, gpus_per_worker=1)
    assert group_values(recipe, GPU, Machines())["gpus"] == 8
    four = Group(gpus=4, cpu=24, memory=900 * GIB)
    group = group_values(recipe, GPU, Machines(), four)
    assert (group["gpus"], group["cpu"], group["maxReplicas"]) == (4, 24, 4)
    assert too_large(group, "gpu", four) == []
    assert group_values(_recipe(workers=1), CPU, Machines(), Group(0, 0.5, 4 * GIB))["cpu"] == 0.5


def test_a_pod_has_the_cores_that_its_workers_ask_ray_for():
    """Without them no worker would find a place, and the pods would be held for nothing."""
    of_gpu = _recipe(workers=8, gpus_per_worker=1)
    with pytest.raises(UserError, match=r"--cpus: 4 is too few: a pod has 8 of the workers, .* for 8 cores"):
        group_values(of_gpu, GPU, Machines(cpus=4))
    assert group_values(of_gpu, GPU, Machines(cpus=8))["cpu"] == 8
    assert group_values(of_gpu, GPU, Machines(), Group(8, 4, 900 * GIB))["cpu"] == 8  # more than there, which is told
    assert group_values(of_gpu, GPU, Machines(), Group(8, 12, 900 * GIB))["cpu"] == 12
    assert group_values(_recipe(workers=2, cpus_per_worker=3), CPU, Machines(), SMALL)["cpu"] == 3
    data = {"loader": "ray", "workers": 3}
    read_by_ray = load_recipe(["synthetic_mlp", {"data": data, "cluster": {"workers": 2}}]).recipe
    assert group_values(read_by_ray, CPU, Machines(), SMALL)["cpu"] == 5  # itself, 3 that read, one for validation


def test_where_the_need_is_not_known_memory_stays_as_it_is_installed():
    there = {"leader": LEADER, "gpu": Group(gpus=4, cpu=32, memory=300 * GIB, most=2)}
    group = group_values(_recipe(workers=12, gpus_per_worker=1), None, Machines(), there["gpu"])
    assert (group["gpus"], group["maxReplicas"], group["cpu"]) == (4, 3, 32)
    assert "memory" not in group and "shm" not in group
    assert too_large(group, "gpu", there["gpu"]) == []
    told = over_quota({"gpu": group}, there)  # counted all the same
    assert told == [told[0]] and "(12 GPUs of 8, 96 cores of 64, 900 GiB of 600)" in told[0]


def test_a_job_that_the_quota_does_not_count_is_told():
    there = {"leader": LEADER, "cpu": Group(gpus=0, cpu=4, memory=16 * GIB, most=4)}
    group = {"maxReplicas": 4, "cpu": 4, "memory": "16Gi", "gpus": 0}
    assert over_quota({"cpu": group, "gpu": None}, there) == []
    (told,) = over_quota({"cpu": {**group, "maxReplicas": 5, "cpu": 2}}, there)
    assert told.startswith("its workers take more than the chart's quota counts for a job (80 GiB of 64):")
    (told,) = over_quota({"gpu": {**group, "gpus": 1, "cpu": 5}}, there)
    assert "(4 GPUs of 0, 20 cores of 16)" in told


def test_a_job_that_nothing_scales_is_told():
    group = {"groupName": "gpu", "replicas": 1, "minReplicas": 1, "maxReplicas": 2}
    cluster = {"enableInTreeAutoscaling": False, "workerGroupSpecs": [group]}
    (told,) = not_scaled({"spec": {"rayClusterSpec": cluster}})
    assert "it has 1 pods of 'gpu' from beginning to end" in told and "for 2 say --workers without a range" in told
    assert not_scaled({"spec": {"rayClusterSpec": {**cluster, "enableInTreeAutoscaling": True}}}) == []
    assert not_scaled({"spec": {"rayClusterSpec": {**cluster, "workerGroupSpecs": [{**group, "replicas": 2}]}}}) == []


def test_data_that_pods_do_not_have_are_told():
    def told(name: str, folder: str | None = None) -> list[str]:
        overrides = {} if folder is None else {"data.dir": folder}
        return data_elsewhere(load_recipe([name], overrides).recipe, ["/shared", "/datasets"])

    assert told("digits") == told("synthetic_mlp") == []
    assert told("imagenet", "/datasets/imagenet") == told("mnist", "/shared") == told("gpt2", "s3://bucket/owt") == []
    (words,) = told("gpt2")
    assert "is on no volume of the pods" in words and "(storage.datasets of the chart, /shared/... or" in words
    assert "is on no volume" in told("imagenet", "/datasets2/imagenet")[0]
    assert "downloads the data into it by HTTPS" in told("mnist")[0] and "networkPolicy.https" in told("mnist")[0]


def test_pods_that_are_larger_are_told():
    recipe = _recipe(workers=8, gpus_per_worker=1, cpus_per_worker=16)
    group = group_values(recipe, GPU, Machines(gpus_per_machine=8), Group(4, 32, 64 * GIB))
    told = too_large(group, "gpu", Group(4, 32, 64 * GIB))
    assert [line.split(", and")[0] for line in told] == [
        "its pods take 8 GPUs",
        "its pods take 128 cores",
        f"its pods take {group['memory']}",
    ]
    assert all("of the group 'gpu'" in line and "they may find no machine; " in line for line in told)
    assert too_large(group, "gpu", None) == []


def test_memory_is_that_of_the_fewest_workers():
    """With fewer of them each holds more: of the batch, and of what is divided."""

    def need(**cluster: int) -> Need:
        sizes = {"model": {"hidden": [2048, 2048]}, "train": {"global_batch": 128}}
        recipe = load_recipe(["synthetic_mlp", sizes, {"parallel": {"strategy": "fsdp"}, "cluster": cluster}]).recipe
        return need_of(recipe, None)[0]

    assert need(workers=2).device > 1.3 * need(workers=8).device
    assert need(workers=8, min_workers=2) == need(workers=2)
    assert need(workers=8, min_workers=3).device > need(workers=4).device  # 128 is not divided evenly among 3


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("digits-20261118-221436-6cb8", "digits-20261118-221436-6cb8"),
        ("My_Run.2-20261118-221436-6cb8", "my-run-2-20261118-221436-6cb8"),
        ("7b-20261118-221436-6cb8", "run-7b-20261118-221436-6cb8"),
        (f"{'a' * 60}-20261118-221436-6cb8", f"{'a' * 26}-20261118-221436-6cb8"),
    ],
)
def test_names_that_kuberay_takes(wanted: str, name: str):
    assert job_name(wanted) == name


@given(st.text(min_size=1, max_size=80))
def test_any_name_becomes_one_that_kuberay_takes(wanted: str):
    name = job_name(f"{wanted}-20261118-221436-6cb8")
    assert len(name) <= 47 and name[0].isalpha() and name[-1].isalnum()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert name.endswith("20261118-221436-6cb8")


def test_a_folder_with_a_space_stays_one_word():
    assert "--run-dir '/shared/my runs/x' --or-resume" in entrypoint("/shared/my runs/x", 600)
