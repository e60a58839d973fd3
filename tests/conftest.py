"""Fixtures for every test, among them one that fails a test which leaves something behind in the process."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import tests.forks  # noqa: F401
from shoal.launch.api import train
from tests.many import Ranks

if TYPE_CHECKING:
    from tests.store import Proxy

settings.register_profile("shoal", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("shoal")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what they do not wait for
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else what tests start would not hear it either

_OTHERS = ("PYTEST_CURRENT_TEST", "CUBLAS_", "KMP_", "TORCH", "_TORCH", "TRITON", "RAY_CLIENT_MODE")
"""Variables that pytest, torch, scikit-learn and Ray set for themselves."""


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No test changes environment variables, torch's settings, or leaves threads running."""
    variables = environment()
    threads = set(threading.enumerate())
    torch_state = (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype())
    yield
    assert environment() == variables, "the test changed environment variables"
    leaked = [t for t in threading.enumerate() if t not in threads and t.is_alive() and not t.daemon]
    if "torch._inductor.async_compile" in sys.modules:  # which keeps a pool of its own
        leaked = [t for t in leaked if not t.name.startswith("ThreadPoolExecutor")]
    assert not leaked, f"the test left threads running: {leaked}"
    assert torch_state == (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype())


@pytest.fixture
def without_coverage() -> dict[str, str]:
    """The environment for a process whose speed or disk is measured, which coverage would disturb."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Tests that draw without a seed of their own draw the same."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def train_here(here: Path) -> Callable[..., dict[str, Any]]:
    """`shoal.train` in an empty folder, one thread, without output."""

    def run(*args: Any, overrides: dict[str, Any] | None = None, **kwargs: Any) -> dict[str, Any]:
        overrides = {"cluster.threads_per_worker": 1, "cluster.gpus_per_worker": 0} | (overrides or {})
        return train(*args, overrides=overrides, progress="silent", **kwargs)

    return run


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(N)`: N worker processes that are joined for all tests of a file.

    Not for longer: PyTorch keeps the groups of every mesh, whose threads look now and then whether there is work.
    """
    made: dict[int, Ranks] = {}
    yield lambda world_size: made.setdefault(world_size, Ranks(world_size))
    for processes in made.values():
        processes.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of its own with room for 2 MB, which a test may fill."""
    folder = tmp_path / "small-disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,nr_inodes=1000", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """A real S3 server on loopback."""
    from tests.store import s3_server

    with s3_server() as port:
        yield port


@pytest.fixture
def s3(s3_port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator["Proxy"]:
    """An empty bucket `bucket`, and the proxy by which it is reached, which may be told to fail."""
    import boto3

    from tests.store import Proxy

    proxy = Proxy(s3_port)
    names = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in (names | {"AWS_ENDPOINT_URL": proxy.url}).items():
        monkeypatch.setenv(name, value)
    bucket = boto3.resource("s3", endpoint_url=f"http://127.0.0.1:{s3_port}").create_bucket(Bucket="bucket")
    bucket.objects.all().delete()
    try:
        yield proxy
    finally:
        proxy.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real datasets, where they lie beside the checkout."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real datasets are not beside this checkout")
    return folder
