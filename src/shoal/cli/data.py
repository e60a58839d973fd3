"""`shoal data`: shards of data that does not fit in memory, whether they are whole, and tokenizers."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from shoal.cli.sizes import in_units, parse_size
from shoal.core.errors import UserError
from shoal.core.storage import expand_home, to_json_line

if TYPE_CHECKING:
    from shoal.data.shards.index import Shard, ShardIndex

_JSON = click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
_SOURCE = click.argument("source", metavar="SRC")
_FOLDER = click.argument("folder", metavar="DIR")
_COLUMN = click.option("--column", metavar="NAME", help="Where the text is in rows (text).")
_COLUMNS = click.option("--columns", metavar="A,B,...", help="The columns of CSV files that have no header line.")
_OVERWRITE = click.option("--overwrite", is_flag=True, help="Replace what is there.")
_TELL_EVERY_S = 5.0
_MOST_COLUMNS = 10


@click.group("data")
def command() -> None:
    """Prepare data that does not fit in memory: shards, tokenizers."""


@command.command("shard")
@_SOURCE
@click.argument("target", metavar="DST")
@click.option(
    "--format", "format_", type=click.Choice(["tar", "jsonl", "parquet", "tokens"]), help="Otherwise as the source is."
)
@click.option("--shard-size", default="64MiB", metavar="SIZE", help="Bytes of content in a file (64MiB).")
@click.option("--shuffle/--no-shuffle", default=True, help="Rows in a random order, or as they come (--shuffle).")
@click.option("--seed", type=click.IntRange(min=0), default=0, metavar="N", help="Fixes the random order (0).")
@click.option("--resize", type=click.IntRange(min=1), metavar="N", help="Scale images down: the shorter side to N.")
@click.option("--tokenizer", metavar="chars|bytes|FILE.json", help="Make tokens of text.")
@_COLUMN
@click.option("--label", metavar="NAME", help="Where the class is in rows, for the index (label, if there is one).")
@_COLUMNS
@click.option("--end-of-text", metavar="TOKEN", help="What ends a document, of a FILE.json (<|endoftext|>).")
@click.option("--val-fraction", type=float, metavar="F", help="Split this share off for validation.")
@_OVERWRITE
@_JSON
def shard_command(
    source: str,
    target: str,
    format_: str | None,
    shard_size: str,
    shuffle: bool,
    seed: int,
    resize: int | None,
    tokenizer: str | None,
    column: str | None,
    label: str | None,
    columns: str | None,
    end_of_text: str | None,
    val_fraction: float | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Make shards of SRC in DST, a folder or an address such as s3://bucket/folder.

    SRC: images in one folder per class, or .jsonl, .csv, .parquet or .txt files; in a folder with train and val, each
    becomes a dataset of its own. The index is written last: without it, DST is not whole.

    \b
    shoal data shard photos shards --resize 256
    shoal data shard stories.jsonl s3://bucket/stories --tokenizer tokenizer.json --val-fraction 0.01
    """
    from shoal.data.shards.make import Request, make_shards

    if val_fraction is not None and not 0 < val_fraction < 1:
        raise UserError(f"--val-fraction: {val_fraction:g} is not between 0 and 1")
    if end_of_text is not None and (tokenizer is None or tokenizer in ("chars", "bytes")):
        raise UserError("--end-of-text: is for a tokenizer from a file; leave it out")
    request = Request(
        source=expand_home(source),
        target=target,
        shard_bytes=parse_size(shard_size, "--shard-size"),
        format=format_,
        seed=seed if shuffle else None,
        resize=resize,
        tokenizer=tokenizer,
        column=column,
        label=label,
        columns=_names(columns),
        end_of_text=end_of_text,
        val_fraction=val_fraction,
        overwrite=overwrite,
    )
    started = time.monotonic()
    tell = _now_and_then()
    indexes = make_shards(request, lambda shard: tell(_shard_line(shard)), lambda line: click.echo(line, err=True))
    _account(indexes, target, time.monotonic() - started, as_json)
    return 0


@command.command("index")
@_FOLDER
@click.option("--dtype", type=click.Choice(["uint16", "uint32"]), help="How .bin files store an id.")
@click.option("--vocab-size", type=click.IntRange(min=2), metavar="N", help="Ids in .bin files are below this.")
@_OVERWRITE
@_JSON
def index_command(folder: str, dtype: str | None, vocab_size: int | None, overwrite: bool, as_json: bool) -> int:
    """Make an index for the .tar, .jsonl, .parquet or .bin files in DIR, which is read once.

    A folder with train and val, and no such files itself, gets one index in each.
    """
    from shoal.data.shards.check import make_indexes

    started = time.monotonic()
    indexes = make_indexes(folder, _now_and_then(), dtype=dtype, vocab_size=vocab_size, overwrite=overwrite)
    _account(indexes, folder, time.monotonic() - started, as_json)
    return 0


@command.command("verify")
@_FOLDER
@_JSON
def verify_command(folder: str, as_json: bool) -> int:
    """Read every byte of the shards in DIR again, and change nothing. Status 1 if something is wrong."""
    from shoal.data.shards.check import verify

    started = time.monotonic()
    found = verify(folder, _now_and_then())
    problems = [problem for part in found for problem in part.problems]
    for problem in problems:
        click.echo(f"{problem.file}: {problem.problem}", err=as_json)
    for part in found:
        size = in_units(part.num_bytes)
        state = f"{len(part.problems)} not whole" if part.problems else "whole"
        click.echo(f"{part.folder}: {part.shards:,} shards, {part.rows:,} rows, {size}: {state}", err=as_json)
    if as_json:
        sums: dict[str, Any] = {
            "rows": sum(part.rows for part in found),
            "shards": sum(part.shards for part in found),
            "bytes": sum(part.num_bytes for part in found),
            "seconds": round(time.monotonic() - started, 3),
        }
        click.echo(to_json_line({"whole": not problems, **sums, "parts": [part.to_record() for part in found]}))
    return int(bool(problems))


@command.command("tokenizer")
@_SOURCE
@click.option("-o", "output", required=True, metavar="FILE.json", help="Where it goes.")
@click.option("--vocab-size", type=int, default=8192, metavar="N", help="Most ids it has (8192).")
@_COLUMN
@_COLUMNS
@_OVERWRITE
@_JSON
def tokenizer_command(
    source: str,
    output: str,
    vocab_size: int,
    column: str | None,
    columns: str | None,
    overwrite: bool,
    as_json: bool,
) -> int:
    """Train a byte-level BPE on SRC: .txt files, or a column of .jsonl, .csv or .parquet files."""
    from shoal.data.shards.make import train_tokenizer

    path = expand_home(output)
    if path.exists() and not overwrite:
        raise UserError(f"-o: {path} is already there; --overwrite replaces it")
    if not path.parent.is_dir():
        raise UserError(f"-o: there is no folder {path.parent}; make it first")
    started = time.monotonic()
    size = train_tokenizer(expand_home(source), path, vocab_size, column, _names(columns))
    click.echo(f"{path}: {size:,} tokens", err=as_json)
    if as_json:
        seconds = round(time.monotonic() - started, 3)
        click.echo(to_json_line({"path": str(path), "vocab_size": size, "seconds": seconds}))
    return 0


def _names(columns: str | None) -> tuple[str, ...] | None:
    if columns is None:
        return None
    names = tuple(name.strip() for name in columns.split(","))
    if len(set(names)) < len(names) or not all(names):
        raise UserError(f"--columns: {columns!r} should be names with commas between them, each once")
    return names


def _shard_line(shard: "Shard") -> str:
    return f"{shard.file}: {shard.rows:,} rows, {in_units(shard.bytes)}"


def _now_and_then() -> Callable[[str], None]:
    """Says a line on stderr if none was said for some seconds."""
    said = time.monotonic()

    def tell(line: str) -> None:
        nonlocal said
        if time.monotonic() - said >= _TELL_EVERY_S:
            said = time.monotonic()
            click.echo(line, err=True)

    return tell


def _account(indexes: "dict[str, ShardIndex]", folder: str, seconds: float, as_json: bool) -> None:
    parts = {}
    for part, index in indexes.items():
        where = f"{folder.rstrip('/')}/{part}".rstrip("/")
        unit = "tokens" if index.format == "tokens" else "rows"
        size = in_units(index.num_bytes)
        files = f"{len(index.shards):,} {index.format} files"
        click.echo(f"{where}: {index.num_rows:,} {unit} in {files}, {size}{_about(index)}", err=as_json)
        parts[part or "."] = {"rows": index.num_rows, "shards": len(index.shards), "bytes": index.num_bytes}
    if as_json:
        sums = {name: sum(counts[name] for counts in parts.values()) for name in ("rows", "shards", "bytes")}
        format_ = next(iter(indexes.values())).format
        facts = {"folder": folder, "format": format_, **sums, "seconds": round(seconds, 3), "parts": parts}
        click.echo(to_json_line(facts))


def _about(index: "ShardIndex") -> str:
    """What was taken for the columns, so that a row in the place of a header is seen, and for the classes."""
    columns, classes = index.about.get("columns") or [], index.about.get("classes") or []
    listed = f"; columns: {', '.join(columns[:_MOST_COLUMNS])}{', ...' * (len(columns) > _MOST_COLUMNS)}"
    listed = listed.encode(errors="backslashreplace").decode()  # JSON can spell names that UTF-8 cannot
    return (listed if columns else "") + (f"; {len(classes):,} classes" if classes else "")
