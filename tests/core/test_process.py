import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.process import choose_device

has_gpu = torch.cuda.is_available()


def test_a_worker_without_gpus_computes_on_the_cpu() -> None:
    assert choose_device(0) == torch.device("cpu")
    assert choose_device(0, local_rank=3) == torch.device("cpu")


def test_without_a_wish_a_gpu_is_taken_where_there_is_one() -> None:
    assert choose_device(None).type == ("cuda" if has_gpu else "cpu")


@pytest.mark.skipif(has_gpu, reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        UserError, match=r"^cluster.gpus_per_worker: .*sees none; .*cluster.gpus_per_worker=0.*nvidia-smi"
    ):
        choose_device(1)


@pytest.mark.skipif(not has_gpu, reason="this machine has no GPU")
def test_each_local_rank_takes_its_own_gpu_and_one_too_many_is_told() -> None:
    count = torch.cuda.device_count()
    assert choose_device(1, local_rank=count - 1) == torch.device("cuda", count - 1)
    with pytest.raises(UserError, match=rf"^cluster.workers: worker {count + 1} of this machine .*sees {count}; start"):
        choose_device(1, local_rank=count)
