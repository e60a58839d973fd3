"""Batches that are read on the CPUs of a Ray cluster, also of machines that do not train. The one place here with Ray.

Two ways, and both give every worker its batches in the order of its requests, each exactly once, whoever reads them:

- `RayReaders` reads a dataset that has items. A worker has so many readers, actors anywhere on the cluster, which hold
  the dataset, and a bounded number of requests on their way to them. A request whose reader is lost goes to another.
  These are plain actors rather than a pipeline of Ray Data over requests: that one costs ten times as much a batch, in
  the process that trains, and its processes come and go with every part of the pipeline.
- `RowReader` reads a pipeline of the user's own, a `ray.data.Dataset`, whose rows have an order and no numbers. It is
  carried out once for all workers, by an actor that keeps count of the rows and hands out references to Ray's blocks;
  the blocks themselves go straight from where they were made to the workers that need them.

Ray is imported in functions alone: importing it fixes its settings.
"""

from shoal.data.ray_data.connect import connected
from shoal.data.ray_data.readers import RayReaders
from shoal.data.ray_data.row_reader import RowReader
from shoal.data.ray_data.rows import RayRows

__all__ = ["RayReaders", "RayRows", "RowReader", "connected"]
