"""Reading on a Ray cluster: in order, exactly once, whoever is lost."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from shoal.bench.drill_cluster import DrillCluster
from shoal.core.errors import RunError, UserError
from shoal.core.group import Group
from shoal.data.order import Order
from shoal.data.ray_data import RayReaders, RayRows, RowReader, connected
from shoal.data.ray_data.blocks import Blocks, Span
from shoal.data.ray_data.travel import Failed, Where
from shoal.data.requests import step_requests

NUM_SAMPLES = 50


class Asked(NamedTuple):
    """A request that also says what is to happen."""

    epoch: int
    indices: np.ndarray
    num_samples: int
    manner: str = ""
    folder: Path | None = None


class Samples:
    """Samples that say who read them, in manners that were asked for."""

    def __init__(self) -> None:
        self.lock: Any = None

    def batch(self, request: Asked) -> dict[str, Any]:
        first = int(request.indices[0])
        if request.folder is not None:
            (request.folder / str(first)).touch()
        match request.manner:
            case "unevenly":
                time.sleep(0.15 if first % 4 == 0 else 0.0)
            case "user error":
                raise UserError("shard 7 is broken; mend it")
            case "key error":
                raise KeyError("eleven")
            case "no pickle":
                return {"lock": threading.Lock()}
            case "die once":
                assert request.folder is not None
                if not (request.folder / "died").exists():
                    (request.folder / "died").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
        return {
            "x": torch.from_numpy(np.stack([np.full((3, 4), i, np.float32) for i in request.indices])),
            "half": torch.from_numpy(request.indices).to(torch.bfloat16),
            "index": request.indices,
            "names": [str(i) for i in request.indices],
            "pid": os.getpid(),
        }


def read(dataset: Samples, request: Asked) -> Any:
    return dataset.batch(request)


def requests_of(*starts: int, size: int = 1, manner: str = "", folder: Path | None = None) -> Iterator[Asked]:
    return (Asked(0, np.arange(start, start + size), size, manner, folder) for start in starts)


@contextlib.contextmanager
def connected_to(cluster: DrillCluster) -> Iterator[Any]:
    """This process, connected as a worker is: `RAY_ADDRESS` is what the launcher sets for it."""
    values = cluster.environment | {"RAY_ADDRESS": cluster.address}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    if "ray" in sys.modules:  # which keeps the token of another cluster
        sys.modules["ray._raylet"].AuthenticationTokenLoader.instance().reset_cache()
    try:
        with connected() as found:
            import ray.data  # noqa: F401 - so that tests may write ray.data

            assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
            yield found
        assert not found.is_initialized()
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DrillCluster]:
    """One with a machine of two CPUs."""
    found = DrillCluster(num_nodes=1, cpus=2, log=tmp_path_factory.mktemp("ray") / "cluster.log")
    yield found
    found.close()


@pytest.fixture(scope="module")
def ray(cluster: DrillCluster) -> Iterator[Any]:
    """The cluster, which this process is connected to."""
    with connected_to(cluster) as found:
        yield found


def test_a_program_that_has_imported_ray_before_is_connected_too(cluster: DrillCluster):
    code = """
        import os, sys, ray
        os.environ |= {"RAY_AUTH_TOKEN": sys.argv[2]}
        from shoal.data.ray_data import connected
        with connected(sys.argv[1]) as found:
            assert found is ray and ray.cluster_resources()["CPU"] == 2
    """
    command = [sys.executable, "-c", textwrap.dedent(code), cluster.address, cluster.environment["RAY_AUTH_TOKEN"]]
    subprocess.run(command, check=True, timeout=60)


@pytest.fixture(scope="module")
def readers(ray: Any) -> Iterator[RayReaders]:
    """Two readers, for every test: starting them takes most of the time."""
    found = RayReaders(Samples(), read, count=2, cpus=0.5, ahead=5)
    yield found
    found.close()


def test_answers_come_in_the_order_of_the_requests_from_several_processes(readers: RayReaders):
    answers = list(readers.answers(requests_of(*range(20), size=2, manner="unevenly")))
    assert [answer["index"].tolist() for answer in answers] == [[i, i + 1] for i in range(20)]
    assert os.getpid() not in {answer["pid"] for answer in answers}
    third = answers[3]
    assert third["x"].shape == (2, 3, 4) and third["x"].dtype == torch.float32 and third["names"] == ["3", "4"]
    assert third["half"].dtype == torch.bfloat16 and third["half"].tolist() == [3.0, 4.0]
    third["x"] += 1  # its own memory, not the store's
    third["index"] += 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_number_of_workers_reads_the_same_samples_in_the_same_steps(readers: RayReaders, world_size: int):
    order = Order(NUM_SAMPLES, 8, seed=1)
    found: dict[int, list[int]] = {step: [] for step in range(3, 14)}
    for rank in range(world_size):
        steps = [[Asked(*request) for request in step] for step in step_requests(order, 3, 14, rank, world_size, 2)]
        answers = readers.answers(itertools.chain.from_iterable(steps))
        for step, requests in enumerate(steps, 3):
            for request in requests:
                index = next(answers)["index"].tolist()
                found[step] += index if request.num_samples else []
    for step, indices in found.items():
        first, last = order.bounds(step)
        assert indices == order.permutation(order.epoch_of(step))[first:last].tolist()


def test_no_more_is_read_ahead_than_was_said(readers: RayReaders, tmp_path: Path):
    endless = requests_of(*range(100_000), folder=tmp_path)
    answers = readers.answers(endless)
    for expected in range(3):
        assert next(answers)["index"].tolist() == [expected]
    time.sleep(1.0)
    read_so_far = len(list(tmp_path.iterdir()))
    # Those that were taken, two that lie ready, one that the thread wants to add to them, five on the way.
    assert 3 + 5 <= read_so_far <= 3 + 2 + 1 + 5
    for expected in range(3, 9):
        assert next(answers)["index"].tolist() == [expected]
    answers.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "ray data"]


def test_what_the_user_raised_arrives_as_itself(readers: RayReaders):
    asked = itertools.chain(requests_of(3, 4), requests_of(5, manner="user error"), requests_of(6))
    answers = readers.answers(asked)
    assert next(answers)["index"].tolist() == [3]
    assert next(answers)["index"].tolist() == [4]
    with pytest.raises(UserError, match=r"^shard 7 is broken; mend it$"):
        next(answers)
    with pytest.raises(KeyError, match="eleven") as raised:
        list(readers.answers(requests_of(11, manner="key error")))
    assert "dataset.batch(request)" in raised.value.__notes__[0], "where it was raised"
    with pytest.raises(UserError, match="cannot be sent to another process"):
        list(readers.answers(requests_of(12, manner="no pickle")))
    assert len(list(readers.answers(requests_of(12, 13)))) == 2, "and the readers are there for more"


def test_the_requests_of_a_reader_that_was_killed_go_to_another(readers: RayReaders, tmp_path: Path):
    asked = itertools.chain(
        requests_of(*range(3)), requests_of(3, manner="die once", folder=tmp_path), requests_of(*range(4, 30))
    )
    answers = list(readers.answers(asked))
    assert [answer["index"].tolist() for answer in answers] == [[i] for i in range(30)]
    assert (tmp_path / "died").exists()


@pytest.mark.slow
def test_samples_that_end_every_reader_end_the_run(ray: Any):
    asked = itertools.chain(requests_of(2), requests_of(3, manner="die"))
    with contextlib.closing(RayReaders(Samples(), read, count=1, cpus=0.0)) as readers:
        answers = readers.answers(asked)
        next(answers)
        with pytest.raises(RunError, match=r"4 processes have ended .* the same samples \(3\)"):
            next(answers)


def test_what_cannot_travel_is_refused_in_words(ray: Any):
    unpicklable = Samples()
    unpicklable.lock = threading.Lock()
    with pytest.raises(UserError, match="Samples cannot be pickled"):
        RayReaders(unpicklable, read)


def test_no_room_is_told(ray: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.data.ray_data.readers.ROOM_WITHIN_S", 0.5)
    with (
        pytest.raises(UserError, match=r"no room for a reader of 64 CPU: .* of 2 CPU are free"),
        contextlib.closing(RayReaders(Samples(), read, count=1, cpus=64)) as readers,
    ):
        next(readers.answers(requests_of(1)))


def test_without_a_cluster_the_user_is_told_how_to_get_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    import ray as package

    monkeypatch.setattr(package, "is_initialized", lambda: False)
    with pytest.raises(UserError, match=r"data\.loader: ray needs a Ray cluster: --launcher ray or --address"):
        RayReaders(Samples(), read)
    with pytest.raises(UserError, match=r"nobody answers at 127\.0\.0\.1:1"):
        RayReaders(Samples(), read, address="127.0.0.1:1")


# Pipelines of the user's own


def slowly(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02 if row["id"] % 8 == 0 else 0.0)
    return {"id": row["id"], "x": np.full((2, 2), row["id"], np.float32), "name": str(row["id"])}


def shifted(epoch: int) -> Any:
    import ray.data

    return ray.data.range(NUM_SAMPLES, override_num_blocks=7).map(lambda row: {"id": row["id"] + 1000 * epoch})


def fails(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 17:
        raise UserError("row 17: no such file; mend it")
    return row


def fails_otherwise(row: dict[str, Any]) -> dict[str, Any]:
    if row["id"] == 17:
        raise KeyError("seventeen")
    return row


def all_rows(rows: RayRows, order: Order, start: int, end: int, world_size: int, name: str) -> dict[int, list[int]]:
    """Every worker in a thread, as if in processes of their own."""
    found: dict[int, dict[int, list[int]]] = {}
    readers: dict[int, RowReader] = {}
    met = threading.Barrier(world_size)

    def work(rank: int) -> None:
        reader = readers[rank] = RowReader(
            rows,
            name=name,
            worker=rank,
            workers=world_size,
            step=order.global_batch,
            last_epoch=order.epoch_of(end - 1),
        )
        steps = list(step_requests(order, start, end, rank, world_size, 2))
        answers = reader.answers(itertools.chain.from_iterable(steps))
        mine: dict[int, list[int]] = {}
        for step, requests in enumerate(steps, start):
            for _ in requests:
                answer = next(answers)
                mine.setdefault(step, []).extend(answer.batch["id"][: answer.num_samples].tolist())
            if (rank + step) % 2:
                time.sleep(0.02)
        found[rank] = mine
        met.wait()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for reader in readers.values():
        reader.close()
    assert len(found) == world_size
    return {step: [i for rank in range(world_size) for i in found[rank][step]] for step in range(start, end)}


@pytest.mark.parametrize(
    ("world_size", "start"),
    [
        pytest.param(1, 0, marks=pytest.mark.slow),
        pytest.param(2, 3, marks=pytest.mark.slow),
        (3, 5),
        pytest.param(4, 9, marks=pytest.mark.slow),
    ],
)
def test_rows_come_exactly_once_in_their_order_for_any_number_of_workers(ray: Any, world_size: int, start: int):
    order = Order(NUM_SAMPLES, 8, seed=0, is_shuffled=False)
    rows = RayRows(shifted, num_rows=NUM_SAMPLES)
    found = all_rows(rows, order, start, 15, world_size, f"rows-{world_size}")
    for step, indices in found.items():
        epoch, (first, last) = order.epoch_of(step), order.bounds(step)
        assert indices == list(range(1000 * epoch + first, 1000 * epoch + last))


def test_a_batch_is_a_dict_of_tensors_or_the_columns_that_were_named(ray: Any):
    rows = RayRows(ray.data.range(10, override_num_blocks=4).map(slowly), num_rows=10)
    reader = RowReader(rows, name="columns", step=10)
    try:
        for _ in range(2):  # one evaluation after the other
            answer = next(reader.answers(requests_of(0, size=10)))
            assert set(answer.batch) == {"id", "x", "name"} and answer.num_samples == 10
            assert torch.equal(answer.batch["x"], torch.arange(10.0)[:, None, None].expand(10, 2, 2))
            assert answer.batch["id"].tolist() == list(range(10))
            assert answer.batch["name"].tolist() == [str(i) for i in range(10)]
    finally:
        reader.close()
    named = RayRows(None, columns=["b", "a"], transform=list)
    parts = [{"a": np.arange(2), "b": np.ones(2)}, {"a": np.arange(2, 3), "b": np.ones(1)}]
    b, a = named.batch_of(parts)
    assert a.tolist() == [0, 1, 2] and torch.equal(b, torch.ones(3, dtype=torch.float64))


def blocks_of(ray: Any, source: Any, num_rows: int, step: int = 10) -> Blocks:
    """Without an actor of their own, which takes seconds to start."""
    return Blocks(Where.here(), [ray.put(source)], num_rows, 1, step, 0)


def test_what_is_wrong_with_a_pipeline_is_told(ray: Any):
    pipeline = ray.data.range(40, override_num_blocks=4)

    def trouble(source: Any, num_rows: int) -> Any:
        blocks = blocks_of(ray, source, num_rows)
        found = [blocks.take(0, [Span((1, 0), begin, begin + 10)]) for begin in range(0, num_rows, 10)]
        assert isinstance(found[-1], Failed)
        return found[-1].error

    error = trouble(pipeline.map(fails), 20)
    assert type(error) is UserError and str(error) == "row 17: no such file; mend it"
    error = trouble(pipeline.map(fails_otherwise), 20)
    assert type(error) is RunError and "KeyError: 'seventeen'" in str(error)
    assert "fails_otherwise" in error.__notes__[0], "where it was raised"
    assert "gave 40 rows and there should be 50" in str(trouble(pipeline, 50))
    assert "gave more rows and there should be 30" in str(trouble(pipeline, 30))
    assert "takes a ray.data.Dataset, or a function that returns one, not 3" in str(trouble(lambda epoch: 3, 10))
    with pytest.raises(UserError, match="no column 'label', only id"):
        RayRows(pipeline, columns=["label"]).batch_of([{"id": np.arange(2)}])
    with pytest.raises(UserError, match="not 3"):
        RayRows(lambda epoch: 3).count_once(Group())
    assert RayRows(pipeline).count_once(Group()) == 40


def test_few_blocks_are_held_however_far_the_pipeline_goes(ray: Any):
    blocks = blocks_of(ray, ray.data.range(1000, override_num_blocks=20), num_rows=1000, step=50)
    for begin in range(0, 1000, 50):
        found = sum(piece.end - piece.start for piece in blocks.take(0, [Span((1, 0), begin, begin + 50)])[0])
        assert found == 50 and blocks.num_held() <= 3
