import os
import threading

import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.process import Process, choose_device, pinned

has_gpu = torch.cuda.is_available()


def test_a_worker_without_gpus_computes_on_the_cpu() -> None:
    assert choose_device(0) == torch.device("cpu")
    assert choose_device(0, local_rank=3) == torch.device("cpu")


def test_without_a_wish_a_gpu_is_taken_where_there_is_one() -> None:
    assert choose_device(None).type == ("cuda" if has_gpu else "cpu")


@pytest.mark.skipif(has_gpu, reason="this machine has a GPU")
@pytest.mark.parametrize("gpus", [1, 0.5])
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do(gpus: float) -> None:
    with pytest.raises(
        UserError, match=rf"^cluster.gpus_per_worker: {gpus} GPU .*sees none; .*cluster.gpus_per_worker=0.*nvidia-smi"
    ):
        choose_device(gpus)


@pytest.mark.skipif(not has_gpu, reason="this machine has no GPU")
def test_a_share_of_a_gpu_is_that_gpu() -> None:
    assert choose_device(0.5) == torch.device("cuda", 0)


@pytest.mark.skipif(not has_gpu, reason="this machine has no GPU")
def test_each_local_rank_takes_its_own_gpu_and_one_too_many_is_told() -> None:
    count = torch.cuda.device_count()
    assert choose_device(1, local_rank=count - 1) == torch.device("cuda", count - 1)
    with pytest.raises(UserError, match=rf"^cluster.workers: worker {count + 1} of this machine .*sees {count}; start"):
        choose_device(1, local_rank=count)


def worker(local_rank: int, local_world_size: int) -> Process:
    cpu = torch.device("cpu")
    return Process(local_rank, local_world_size, cpu, local_rank=local_rank, local_world_size=local_world_size)


@pytest.mark.parametrize("threads", [1, None])
def test_a_pinned_worker_has_cores_of_its_own_with_all_its_threads(threads: int | None) -> None:
    cores = sorted(os.sched_getaffinity(0))
    workers = len(cores)
    done, other = threading.Event(), []
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        for rank in range(workers):
            with pinned(worker(rank, workers), threads):
                other.append(os.sched_getaffinity(thread.native_id or 0))
                assert os.sched_getaffinity(0) == other[-1] and len(other[-1]) == 1
            assert os.sched_getaffinity(0) == os.sched_getaffinity(thread.native_id or 0) == set(cores)
    finally:
        done.set()
        thread.join()
    assert sorted(core for own in other for core in own) == cores


def test_workers_that_need_more_cores_than_there_are_are_not_pinned() -> None:
    cores = len(os.sched_getaffinity(0))
    message = f"^cluster.pin_cores: 1 workers with {cores + 1} threads each need {cores + 1} cores .*there are {cores};"
    with pytest.raises(UserError, match=message), pinned(worker(0, 1), cores + 1):
        pass
