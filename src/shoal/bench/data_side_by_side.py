"""How fast batches come from files: everybody reads the same samples by its own format and loader, in turns."""

import contextlib
import signal
import statistics
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.bench.commands import Tell, in_turns
from shoal.bench.data_files import make_files, read_through
from shoal.bench.data_peers import (
    CONTENDERS,
    Bench,
    choose_contenders,
    find_peers_python,
    prepare,
    read_epoch,
    why_not,
)
from shoal.bench.peers.data_samples import CONTEXT
from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores


@dataclass(frozen=True)
class FileSettings:
    """What is asked for by `--files` and the options beside it."""

    files: str
    """`images` or `tokens`."""
    only: str | None = None
    rounds: int = 5
    workers: int | None = None
    """Loader processes of every contender; None is one a core."""
    samples: int | None = None
    """Images, or windows of tokens."""
    folder: Path | None = None
    """Where the files stay; None is nowhere."""
    peers: str | None = None
    """The interpreter of contenders that are not in this environment."""


DEFAULT_SAMPLES = {"images": 2_000, "tokens": 50_000}
_BATCH, _SMALL_BATCH = 256, 64
_LARGE = 20 * _BATCH
"""With fewer images than so many batches, smaller batches tell more."""


def measure_files(settings: FileSettings, tell: Tell = lambda line: None) -> dict[str, Any]:
    """Samples, or tokens, a second of everybody who can be measured here, over the first epoch of a fresh process."""
    peers_python = find_peers_python(settings.peers)
    asked = choose_contenders(settings.only, settings.files)
    reasons = {name: why_not(CONTENDERS[name], peers_python) for name in asked}
    not_measured = {name: reason for name, reason in reasons.items() if reason is not None}
    names = [name for name in asked if name not in not_measured]
    samples = settings.samples or DEFAULT_SAMPLES[settings.files]
    workers = settings.workers or usable_cores()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    with _ended_in_order(), _place(settings.folder) as root:
        folder = root / f"{settings.files}-{samples}"
        batch = _SMALL_BATCH if settings.files == "images" and samples < _LARGE else _BATCH
        bench = Bench(settings.files, folder / "source", folder, batch, workers, peers_python)
        _prepare_all(bench, samples, names, tell)
        num_bytes = read_through(bench.source)
        for number in range(settings.rounds):
            for name in in_turns(names, number):
                found[name].append(read_epoch(bench, name))
                rate = _rate(settings.files, found[name][-1])
                tell(f"round {number + 1} of {settings.rounds}, {name}: {rate:,.0f} {UNITS[settings.files]}")
    _same_samples(found, samples)
    about = {
        "files": settings.files,
        "samples": samples,
        "source_bytes": num_bytes,
        "batch": batch,
        "workers": workers,
        "rounds": settings.rounds,
        "page_cache": "warm",
    }
    return about | summed_up(settings.files, found) | {"not_measured": not_measured}


UNITS = {"images": "samples/s", "tokens": "tokens/s"}


def _prepare_all(bench: Bench, samples: int, names: Sequence[str], tell: Tell) -> None:
    """Make what is not there, and bring all of it into the page cache."""
    if not bench.source.exists():
        tell(f"making {samples:,} {'images' if bench.files == 'images' else f'windows of {CONTEXT} tokens'}")
        unfinished = bench.source.with_name("unfinished-source")
        make_files(bench.files, unfinished, samples)
        unfinished.rename(bench.source)
    for name in names:
        if CONTENDERS[name].prepares:
            tell(f"preparing {CONTENDERS[name].title}")
            prepare(bench, name)
            read_through(bench.formats / name)


def _same_samples(found: Mapping[str, Sequence[Mapping[str, Any]]], samples: int) -> None:
    """Rates are comparable only of those who read every sample once."""
    seen = {(name, each["num_samples"], each["fingerprint"]) for name, rounds in found.items() for each in rounds}
    if any(count != samples for _, count, _ in seen) or len({mark for _, _, mark in seen}) > 1:
        told = ", ".join(f"{name}: {count} ({mark})" for name, count, mark in sorted(seen))
        raise RunError(f"not everybody read each of the {samples} samples once; samples and their sum: {told}")


def _rate(files: str, epoch: Mapping[str, Any]) -> float:
    units = epoch["num_samples"] * (CONTEXT if files == "tokens" else 1)
    return float(units / epoch["epoch_s"])


def summed_up(files: str, found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Medians over the rounds; ratios are taken within a round, of every row of Shoal to every peer and to the best."""
    rates = {name: [_rate(files, epoch) for epoch in rounds] for name, rounds in found.items()}
    rows = {
        name: {
            "title": CONTENDERS[name].title,
            "shuffles": CONTENDERS[name].shuffles,
            "rate": statistics.median(rates[name]),
            "first_batch_s": statistics.median(epoch["first_batch_s"] for epoch in rounds),
            "rates": rates[name],
        }
        for name, rounds in found.items()
    }
    peers = [name for name in rates if not CONTENDERS[name].is_shoal]
    ratios: dict[str, Any] = {}
    for ours in (name for name in rates if CONTENDERS[name].is_shoal):
        to_each = {name: _ratio(rates[ours], rates[name]) for name in peers}
        best = [max(each) for each in zip(*(rates[name] for name in peers), strict=True)]
        ratios[ours] = {"to_each": to_each}
        if peers:
            each = [ours_now / best_now for ours_now, best_now in zip(rates[ours], best, strict=True)]
            best_peer = max(peers, key=lambda name: statistics.median(rates[name]))
            ratios[ours] |= {"to_best": statistics.median(each), "to_best_by_round": each, "best_peer": best_peer}
    return {"unit": UNITS[files], "contenders": rows, "ratios": ratios}


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def file_table(result: Mapping[str, Any]) -> list[list[str]]:
    """Contenders as rows of text, headed; a column for what each row of Shoal is to them."""
    ratios = result["ratios"]
    lines = [["contender", result["unit"], *(f"{name} to it" for name in ratios), "first batch, s"]]
    for name, row in result["contenders"].items():
        cells = [f"{each['to_each'][name]:.2f}" if name in each["to_each"] else "" for each in ratios.values()]
        lines.append([name, f"{row['rate']:,.0f}", *cells, f"{row['first_batch_s']:.2f}"])
    return lines


def file_notes(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What must be said beside the table."""
    notes = [("not measured", f"{name}: {why}") for name, why in result["not_measured"].items()]
    for name, ratio in result["ratios"].items():
        if "to_best" in ratio:
            rounds = ", ".join(f"{each:.2f}" for each in ratio["to_best_by_round"])
            said = f"{name} is {ratio['to_best']:.2f} times as fast as the best peer of a round"
            notes.append(("ratio", f"{said} (rounds: {rounds}); the best over all is {ratio['best_peer']}"))
    size = f"{result['samples']:,} samples of {result['files']}, {result['source_bytes'] / 1e6:,.0f} MB"
    notes.append(
        (
            "measured",
            f"first epoch of a fresh process, {size} on the local disk and in the page cache for everybody; "
            f"batches of {result['batch']}, {result['workers']} loader processes each, their start included",
        )
    )
    shuffles = "; ".join(f"{name}: {row['shuffles']}" for name, row in result["contenders"].items())
    return [*notes, ("shuffled", shuffles)]


@contextlib.contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--dir: {folder} cannot be written: {error.strerror}") from error
    yield folder.absolute()


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Have a SIGTERM end the measurement as a Ctrl-C does, so that contenders and files go with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
