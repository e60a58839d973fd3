"""Who reads the files in `shoal bench data --files`, by which interpreter, and how one of them is run."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.commands import run
from shoal.core.errors import UserError
from shoal.core.section import one_of

PEERS_VENV = Path(".venv-peers/bin/python")
"""What `make peers` makes: packages of some contenders do not go together with those of Shoal."""
INSTALL = "not installed; `make peers` installs it in an environment of its own, or say where it is by --peers PYTHON"
_PACKAGE = Path(__file__).parents[1]
_CHECKOUT = _PACKAGE.parents[1]
_LONGEST_PLACE = 25


@dataclass(frozen=True)
class Contender:
    """One row."""

    module: str
    """The script, below `shoal.bench`."""
    title: str
    needs: tuple[str, ...] = ()
    """Packages without which it is left out."""
    in_peers_venv: bool = False
    files: tuple[str, ...] = ("images", "tokens")
    shuffles: str = "all samples"
    """Over what it shuffles as it is built here, which is its default for training."""
    prepares: bool = False
    """Whether it has a format of its own, which its script writes."""
    in_line: bool = False
    """Reads in the process that trains, whatever the number of processes that the others have."""

    @property
    def is_shoal(self) -> bool:
        """Whether this is what the others are measured against."""
        return self.module == "data_shoal"


CONTENDERS = {
    "shoal_stream": Contender(
        *("data_shoal", "Shoal: tar shards"),
        files=("images",),
        shuffles="windows of many shards",
        prepares=True,
    ),
    "shoal_map": Contender("data_shoal", "Shoal: image folder, file of ids"),
    "dataloader": Contender("peers.data_dataloader", "torch DataLoader: image folder, mapped file of ids"),
    "dataloader_in_line": Contender(
        "peers.data_dataloader", "torch DataLoader without processes", files=("tokens",), in_line=True
    ),
    "ray_data": Contender(
        *("peers.data_ray", "Ray Data: Parquet", ("ray", "pyarrow", "pandas")),
        shuffles="the files",
        prepares=True,
    ),
    "streaming": Contender(
        *("peers.data_streaming", "MosaicML Streaming: MDS", ("streaming",)),
        in_peers_venv=True,
        shuffles="blocks of samples (its default, py1e)",
        prepares=True,
    ),
    "litdata": Contender(
        *("peers.data_litdata", "LitData: optimized chunks", ("litdata",)),
        in_peers_venv=True,
        shuffles="chunks, and the samples of each",
        prepares=True,
    ),
}


def find_peers_python(given: str | None) -> Path | None:
    """The interpreter of the contenders that have an environment of their own; None where there is none."""
    if given is not None:
        # Not resolved: the interpreter of an environment is a link, and knows its packages by where that lies.
        found = shutil.which(given)
        if found is None:
            raise UserError(f"--peers: {given} is no program; give the python of the environment with the peers")
        return Path(found).absolute()
    return next((place for root in (Path.cwd(), _CHECKOUT) if (place := root / PEERS_VENV).is_file()), None)


def why_not(contender: Contender, peers_python: Path | None) -> str | None:
    """Why a contender cannot be measured here; None if it can."""
    if contender.in_peers_venv:
        if peers_python is None or not _has(peers_python, contender.needs):
            return INSTALL
        return None
    missing = [name for name in contender.needs if importlib.util.find_spec(name) is None]
    return f"needs {', '.join(missing)}; pip install 'shoal[dev]'" if missing else None


def _has(python: Path, modules: Sequence[str]) -> bool:
    look = "import importlib.util, sys; sys.exit(not all(map(importlib.util.find_spec, sys.argv[1:])))"
    return subprocess.run([python, "-c", look, *modules], check=False, capture_output=True).returncode == 0  # noqa: S603


def choose_contenders(only: str | None, files: str) -> list[str]:
    """The contenders of `--only a,b` that read such files, in the order of the table."""
    allowed = [name for name, contender in CONTENDERS.items() if files in contender.files]
    asked = [name.strip() for name in only.split(",")] if only else allowed
    for name in asked:
        if name not in allowed:
            raise UserError(f"--only: {name!r} does not read {files} here; {one_of(name, allowed)}")
    return [name for name in allowed if name in asked]


@dataclass(frozen=True)
class Bench:
    """What all contenders are given alike."""

    files: str
    source: Path
    formats: Path
    """Below it lies each contender's own."""
    batch: int
    workers: int
    peers_python: Path | None


def prepare(bench: Bench, name: str) -> None:
    """Have a contender write the samples in its own format, unless it has."""
    own = bench.formats / name
    if own.exists():
        return
    # Under another name until it is whole: a folder that is there is used.
    unfinished = bench.formats / f"unfinished-{name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    _call(bench, name, unfinished, ["--prepare"])
    unfinished.rename(own)


def read_epoch(bench: Bench, name: str) -> dict[str, Any]:
    """What a contender measured in a fresh process."""
    return _call(bench, name, bench.formats / name, [])


def _call(bench: Bench, name: str, own: Path, arguments: Sequence[str]) -> dict[str, Any]:
    contender = CONTENDERS[name]
    python = bench.peers_python if contender.in_peers_venv else Path(sys.executable)
    assert python is not None
    # Whatever a contender leaves goes with this folder.
    with tempfile.TemporaryDirectory(prefix="shoal-", dir=short_place(), ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        out = folder / "result.json"
        command = [str(python), "-m", f"shoal.bench.{contender.module}", "--name", name, "--files", bench.files]
        command += ["--source", str(bench.source), "--own", str(own), "--out", str(out)]
        command += [
            "--batch",
            str(bench.batch),
            "--workers",
            str(0 if contender.in_line else bench.workers),
            "--parent",
            str(os.getpid()),
            *arguments,
        ]
        run(command, folder / "log", _environment(contender, folder))
        return json.loads(out.read_text()) if out.exists() else {}


def short_place() -> str:
    """Sockets of Ray and of worker processes lie in there, and their names are limited; processes would hang."""
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_PLACE else "/tmp"  # noqa: S108 - what is made in it has a name of its own


def _environment(contender: Contender, folder: Path) -> Mapping[str, str]:
    places = {"TMPDIR": str(folder), "LITDATA_CACHE_DIR": str(folder / "litdata")}
    if not contender.in_peers_venv:
        return places
    # That interpreter is to find Shoal's scripts and nothing else of Shoal's environment.
    (folder / "path").mkdir()
    (folder / "path" / "shoal").symlink_to(_PACKAGE)
    return {**places, "PYTHONPATH": str(folder / "path")}
