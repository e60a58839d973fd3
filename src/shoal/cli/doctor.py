"""`shoal doctor`: what is wrong with this machine or cluster, and what to do."""

import contextlib
import signal
import stat
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from shoal.cli.words import ADDRESS
from shoal.core.errors import UserError
from shoal.core.storage import expand_home, to_json_line

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.deploy.doctor.finding import Finding


@click.command("doctor")
@ADDRESS
@click.option("--storage", metavar="DIR", help="A folder for runs: on a cluster, one that all its machines share.")
@click.option("--json", "as_json", is_flag=True, help="End with one JSON object on stdout.")
def command(address: str | None, storage: str | None, as_json: bool) -> int:
    """Look at this machine, or with --address at a cluster and each of its machines, and say of every check: pass,
    warn, fail or skip, what was found, and what to do. Nothing is changed, and nothing stays. It needs no free
    cores or GPUs, so it may run beside a training.

    \b
    shoal doctor
    shoal doctor --storage /shared/runs
    shoal doctor --address auto --storage /shared/runs

    Status: 0 nothing failed, 1 something failed, 2 wrong input, 130 interrupted.
    """
    from shoal.deploy.doctor.finding import worst
    from shoal.deploy.doctor.view import View, summary

    folder = _storage(storage, is_here=address is None)
    if address is not None:
        from shoal.launch.on_ray import check_address

        check_address(address)
    console = _console(to_stderr=as_json)
    with (
        _ended_by_sigterm(),
        contextlib.redirect_stdout(sys.stderr),  # Ray prints there now and then, also where it was told not to
        contextlib.closing(_checks(address, folder, _progress())) as checks,
    ):
        findings = list(View(console).show(checks))
    console.print(summary(findings))
    status = worst(findings)
    if as_json:
        click.echo(to_json_line({"status": status, "checks": [finding.to_record() for finding in findings]}))
    return int(status == "fail")


def _checks(address: str | None, folder: Path | None, tell: Callable[[str], None]) -> "Generator[Finding, None, None]":
    if address is None:
        from shoal.deploy.doctor.machine import check_machine

        tell("looking at this machine")
        yield from check_machine(folder)
    else:
        from shoal.deploy.doctor.apart import check_apart

        yield from check_apart(address, None if folder is None else str(folder), tell)


def _storage(given: str | None, *, is_here: bool) -> Path | None:
    """The folder, with its full path: other machines know nothing of this one's working directory.

    `is_here`: it is one of this machine, where it can be looked at.
    """
    if given is None:
        return None
    if not given or "://" in given:
        raise UserError(
            f"--storage: {given!r} should be a folder; what is in a store is reached by checkpoint.upload_to"
        )
    folder = expand_home(given).absolute()
    if is_here and _is_in_the_way(folder):
        raise UserError(f"--storage: {given!r} should be a folder, and is a file or lies in one")
    return folder


def _is_in_the_way(folder: Path) -> bool:
    """Whether something else than a folder has this path, or a part of it."""
    try:
        return not stat.S_ISDIR(folder.stat().st_mode)
    except NotADirectoryError:
        return True
    except OSError:  # not there, perhaps not mounted: that is for the checks to say
        return False


def _progress() -> Callable[[str], None]:
    """Says what goes on where somebody watches: on a terminal."""
    if not sys.stderr.isatty():
        return lambda words: None
    return lambda words: click.echo(f"... {words}", err=True)


def _console(to_stderr: bool) -> "Console":
    from rich.console import Console

    return Console(file=sys.stderr if to_stderr else sys.stdout, highlight=False, markup=False)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """A SIGTERM ends it as Ctrl-C does: what was started on the cluster is ended first."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
