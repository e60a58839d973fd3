"""Reading on a Ray cluster of which a machine is lost; in a file of its own, because it has a cluster of its own."""

import contextlib
from pathlib import Path

import pytest

from shoal.bench.drill_cluster import DrillCluster
from shoal.data.ray_data import RayReaders, RayRows, RowReader
from tests.data.test_ray_data import Samples, connected_to, read, requests_of, slowly


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_when_a_machine_goes(tmp_path: Path):
    cluster = DrillCluster(num_nodes=2, cpus=2, log=tmp_path / "cluster.log")
    try:
        with connected_to(cluster) as ray, contextlib.ExitStack() as stack:
            here = ray.get_runtime_context().get_node_id()
            readers = RayReaders(Samples(), read, count=3, cpus=0.5)
            stack.callback(readers.close)
            pipeline = ray.data.range(200, override_num_blocks=40).map(slowly)
            reader = RowReader(RayRows(pipeline, num_rows=200), name="lost", step=5)
            stack.callback(reader.close)
            answers = readers.answers(requests_of(*range(60), manner="unevenly"))
            row_answers = reader.answers(requests_of(*range(0, 200, 5), size=5))
            seen, ids = [], []
            for number in range(60):
                if number == 10:
                    cluster.kill(next(node for node in cluster.nodes() if node != here))
                seen += next(answers)["index"].tolist()
                if number < 40:
                    ids += next(row_answers).batch["id"].tolist()
            assert seen == list(range(60))
            assert ids == list(range(200))
    finally:
        cluster.close()
