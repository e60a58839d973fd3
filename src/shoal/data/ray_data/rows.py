"""A pipeline of Ray Data as a dataset."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shoal.core.errors import RunError, UserError
from shoal.core.group import Group
from shoal.data.ray_data.connect import await_room, connected
from shoal.data.ray_data.travel import Failed, Where, last_line


class RayRows:
    """A `ray.data.Dataset` to train or evaluate on, or a function from the number of an epoch, from 0, to one.

    Step k of an epoch takes its rows [k*G, (k+1)*G), G being the global batch, in the order of the pipeline. So this
    order must be the same whenever the pipeline is carried out: shuffle with a seed (by the epoch, in a function), and
    let nothing depend on the time or on chance. `preserve_order` is set here. Resuming in the middle of an epoch
    carries out its pipeline from the start and drops the rows before, which takes as long as they took; earlier epochs
    are not carried out again.

    A batch is a dict of tensors, one a column, and arrays for columns that torch has no type for; with `columns`, a
    tuple of these columns. Last of all goes `transform`, a function of the batch, which runs in the training process:
    what takes time belongs in the pipeline.
    """

    def __init__(
        self,
        source: Any,
        *,
        columns: Sequence[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
        num_rows: int | None = None,
    ) -> None:
        """`num_rows`: of an epoch, where known; else Ray counts them, which may mean to carry out the pipeline."""
        self.source = source
        self.columns = None if columns is None else tuple(columns)
        self.transform = transform
        self._num_rows = num_rows

    def __len__(self) -> int:
        if self._num_rows is None:
            with connected() as ray:
                await_room(ray)
                # Elsewhere: Ray Data would write to the terminal, and take turns with what goes on in this process.
                count = ray.remote(_count_rows).options(num_cpus=0)
                counted = ray.get(count.remote(Where.here(), [ray.put(self.source)]))
                if isinstance(counted, Failed):
                    raise counted.error
                self._num_rows = int(counted)
        return self._num_rows

    def count_once(self, group: Group) -> int:
        """The length, counted by the first worker alone. Every worker must call this."""
        counted: Any = None
        if group.rank == 0:
            try:
                counted = len(self)
            except Exception as error:  # every worker must know, or they would wait for ever
                group.from_first(f"data: the rows of the pipeline could not be counted: {last_line(error)}")
                raise
        counted = group.from_first(counted)
        if isinstance(counted, str):
            raise UserError(counted)
        self._num_rows = int(counted)
        return self._num_rows

    def batch_of(self, parts: Sequence[dict[str, np.ndarray]]) -> Any:
        """A batch, in memory of its own, from the columns of one block after the other."""
        names = self.columns or tuple(parts[0])
        for name in names:
            if name not in parts[0]:
                raise UserError(f"data: the pipeline has no column {name!r}, only {', '.join(parts[0])}")
        batch: Any = {name: _joined([part[name] for part in parts]) for name in names}
        if self.columns is not None:
            batch = tuple(batch[name] for name in self.columns)
        return batch if self.transform is None else self.transform(batch)


def _count_rows(where: Where, what: list[Any]) -> Any:
    import ray

    try:
        where.take_over()
        return pipeline_of(ray.get(what[0]), 0).count()
    except Exception as error:  # noqa: BLE001 - goes to the process that asked
        return Failed.of(of_pipeline(error))


def of_pipeline(error: Exception) -> Exception:
    """What the user's own function raised, out of what Ray Data has wrapped it in, which keeps the text alone."""
    from ray.exceptions import RayTaskError

    if not isinstance(error, RayTaskError):
        return error
    trace = re.sub(r"\x1b\[\d+m", "", str(error))
    raised = trace.split("\nThe above exception was the direct cause")[0].rstrip()
    found = re.search(r"^([A-Za-z_][\w.]*): (.*)\Z", raised, re.MULTILINE | re.DOTALL)
    kind, message = found.groups() if found else ("", last_line(error))
    if kind == f"{UserError.__module__}.{UserError.__name__}":
        return UserError(message)
    own = RunError(f"data: the pipeline of Ray Data failed: {kind and kind + ': '}{message}")
    own.add_note(trace)
    return own


def _joined(parts: list[np.ndarray]) -> Any:
    values = np.concatenate(parts) if len(parts) > 1 else parts[0].copy()
    return torch.from_numpy(values) if values.dtype.kind in "biufc" else values


def pipeline_of(source: Any, epoch: int) -> Any:
    """The `ray.data.Dataset` of an epoch, which keeps its order and prints nothing."""
    try:
        from ray.data import Dataset
    except ImportError as error:
        raise UserError(f"data.loader: Ray Data is not installed: pip install 'shoal[ray]' ({error})") from error

    found = source if isinstance(source, Dataset) else source(epoch)
    if not isinstance(found, Dataset):
        raise UserError(f"data: RayRows takes a ray.data.Dataset, or a function that returns one, not {found!r}")
    found.context.execution_options.preserve_order = True
    found.context.enable_progress_bars = False
    found.context.print_on_execution_start = False
    return found
