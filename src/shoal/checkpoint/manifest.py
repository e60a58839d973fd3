"""What a checkpoint says of itself: the last of its files to be written, and the first to be read.

Its first line holds the hash of all that follows, so that a manifest vouches for itself as for the other files.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from shoal.core.errors import UserError
from shoal.core.version import VERSION

FORMAT = 2
MANIFEST = "manifest.json"
_OPENING, _CLOSING = b'{"xxh3_128": "', b'",'
_HEX_DIGITS = 32
_FILE_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


class CorruptCheckpointError(Exception):
    """A checkpoint's files are not what its manifest says."""


@dataclass(frozen=True)
class FileFacts:
    """What a file must be."""

    num_bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint in a few lines."""

    step: int
    epoch: int
    metrics: Mapping[str, float]
    """Validation metrics, where this step was evaluated."""
    time: float
    """When it was committed, in unix seconds."""
    world_size: int
    strategy: str
    files: Mapping[str, FileFacts]
    """Every file of the checkpoint but the manifest."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """As it is written."""
        body = json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()[1:] + b"\n"
        return _OPENING + xxhash.xxh3_128_hexdigest(body).encode() + _CLOSING + body


def parse_manifest(content: bytes, origin: Path | str) -> Manifest:
    """What `to_bytes` gave; `CorruptCheckpointError` if a single bit of it has changed."""
    start, end = len(_OPENING), len(_OPENING) + _HEX_DIGITS
    body = content[end + len(_CLOSING) :]
    is_whole = (
        content.startswith(_OPENING)
        and content[end:].startswith(_CLOSING)
        and content[start:end] == xxhash.xxh3_128_hexdigest(body).encode()
    )
    if not is_whole:
        _refuse_first_format(content, origin)
        raise CorruptCheckpointError(f"{MANIFEST} is not what was written (its hash differs)")
    try:
        fields = json.loads(b"{" + body)
        if (version := int(fields["format"])) > FORMAT:
            raise UserError(
                f"{origin} was written by Shoal {fields['versions']['shoal']} in format {version}, and this is Shoal "
                f"{VERSION}, which reads up to {FORMAT}; use the newer one"
            )
        return _manifest_of(fields)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{MANIFEST} is not one: {type(error).__name__}: {error}") from error


def _manifest_of(fields: Mapping[str, Any]) -> Manifest:
    """What the fields say, each of its type: whoever makes up a manifest can make up its hash."""
    files = {
        str(name): FileFacts(int(facts["num_bytes"]), str(facts["xxh3_128"])) for name, facts in fields["files"].items()
    }
    for name in files:
        if not _FILE_NAME.fullmatch(name):
            raise CorruptCheckpointError(f"{MANIFEST} names {name!r}, which is not a file of the checkpoint")
    return Manifest(
        step=int(fields["step"]),
        epoch=int(fields["epoch"]),
        metrics={str(name): float(value) for name, value in fields["metrics"].items()},
        time=float(fields["time"]),
        world_size=int(fields["world_size"]),
        strategy=str(fields["strategy"]),
        files=files,
        versions={str(name): str(version) for name, version in fields["versions"].items()},
    )


def _refuse_first_format(content: bytes, origin: Path | str) -> None:
    """Shoal's first checkpoints had another form, and are no damage."""
    try:
        fields = json.loads(content)
        is_first_format = fields["format"] == 1 and "sha256" in next(iter(fields["files"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, StopIteration, RecursionError):
        return
    if is_first_format:
        raise UserError(
            f"{origin} is in format 1, which Shoal {VERSION} no longer reads; go on with the version that wrote it"
        )


@dataclass(frozen=True)
class CheckpointInfo:
    """A committed checkpoint, as its manifest tells."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """After how many steps it was taken."""
        return self.manifest.step

    @property
    def metrics(self) -> Mapping[str, float]:
        """Validation metrics, where this step was evaluated."""
        return self.manifest.metrics

    @property
    def num_bytes(self) -> int:
        """Of all files that the manifest vouches for."""
        return sum(facts.num_bytes for facts in self.manifest.files.values())

    def to_record(self) -> dict[str, Any]:
        """For people and programs that ask what there is."""
        manifest = self.manifest
        return {
            "step": self.step,
            "epoch": manifest.epoch,
            "path": str(self.path),
            "bytes": self.num_bytes,
            "files": len(manifest.files),
            "time": manifest.time,
            "metrics": dict(manifest.metrics),
            "world_size": manifest.world_size,
            "strategy": manifest.strategy,
        }
