"""A run as files that TensorBoard shows."""

from pathlib import Path
from typing import Any

from shoal.core.storage import expand_home
from shoal.observe.track.facts import Facts
from shoal.observe.track.points import Point
from shoal.observe.track.section import TensorBoardSection


def tensorboard_dir(section: TensorBoardSection, run_dir: Path) -> Path:
    """Where the files are."""
    if section.dir is None:
        return run_dir.absolute() / "tensorboard"
    return expand_home(section.dir).absolute() / run_dir.absolute().name  # a folder is a run to TensorBoard


class TensorBoardSink:
    """A file for every time that the run is followed; TensorBoard shows those of a folder as one."""

    keeps_at_once = True

    def __init__(self, section: TensorBoardSection, run_dir: Path) -> None:
        self._dir = tensorboard_dir(section, run_dir)
        self._writer: Any = None
        self._told: dict[str, str] = {}

    def tell(self, facts: Facts) -> None:
        """The recipe and the tags, as text; a new one when they have changed."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        step = max((event["step"] for event in facts.events if isinstance(event.get("step"), int)), default=0)
        texts = {"shoal/recipe": _table(facts.params), "shoal/run": _table(facts.tags)}
        for name, text in texts.items():
            if self._told.get(name) != text:
                self._add(facts.ended or facts.started, step, text_pb(name, text))
                self._told[name] = text
        self._flush()

    def log(self, points: list[Point]) -> None:
        """Scalars, with the time that they have in the run's folder."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            value = Summary.Value(tag=point.name, simple_value=point.value)
            self._add(point.time, point.step, Summary(value=[value]))
        self._flush()

    def end(self, facts: Facts) -> None:
        """Nothing is left to do."""

    def close(self) -> None:
        """Let go of the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, wall_time: float, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            self._writer = _Writer(self._dir)
        self._writer.add(Event(wall_time=wall_time, step=step, summary=summary))

    def _flush(self) -> None:
        """Raises where the disk does not take it: then the file ends there, and another one begins."""
        if self._writer is None:
            return
        try:
            self._writer.flush()
        except OSError:
            self._told.clear()
            self.close()
            raise


class _Writer:
    """Events at the end of a file of its own. (TensorBoard's writer has a thread, and does not tell of a full disk.)"""

    def __init__(self, folder: Path) -> None:
        import os
        import socket
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}.shoal"
        self._file = (folder / name).open("wb", buffering=0)
        self._waiting: list[bytes] = []
        self.add(Event(wall_time=now, file_version="brain.Event:2"))

    def add(self, event: Any) -> None:
        self._waiting.append(_record(event.SerializeToString()))

    def flush(self) -> None:
        content = b"".join(self._waiting)
        self._waiting.clear()
        written = self._file.write(content)
        if written != len(content):
            raise OSError(f"the disk took {written} of {len(content)} bytes")

    def close(self) -> None:
        self._file.close()


def _record(content: bytes) -> bytes:
    """As TensorBoard's files hold it: length, its checksum, content, its checksum."""
    import struct

    from tensorboard.summary.writer.record_writer import masked_crc32c

    length = struct.pack("<Q", len(content))
    return length + struct.pack("<I", masked_crc32c(length)) + content + struct.pack("<I", masked_crc32c(content))


def _table(rows: dict[str, str]) -> str:
    """As Markdown, which TensorBoard shows as a table."""
    cells = [(name, text.replace("|", "\\|").replace("\n", " ")) for name, text in rows.items()]
    return "\n".join(["| field | value |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in cells)])
