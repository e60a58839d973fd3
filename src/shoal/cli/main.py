"""The `shoal` command. Subcommands are imported when they are called, so that `shoal --help` answers at once."""

import importlib
import os
import sys
import time
import traceback
from typing import Any

import click

from shoal.core.errors import RunError, UserError, WorkerError
from shoal.core.secrets import scrub
from shoal.core.version import VERSION

_COMMANDS = {
    "train": "Train a recipe.",
    "tune": "Search for the best settings of a recipe.",
    "plan": "What a recipe will need: memory, micro-batch, strategy.",
    "submit": "Train a recipe on a Ray cluster, as a job.",
    "deploy": "Files to start a cluster from: Kubernetes, Docker, AWS.",
    "doctor": "What is wrong with this machine or cluster, and what to do.",
    "runs": "What has run here: list, show, compare.",
    "report": "Write a run as one HTML page.",
    "monitor": "Watch a run in the terminal.",
    "track": "Send a run to MLflow, TensorBoard, Weights & Biases or OpenTelemetry.",
    "metrics": "Metrics for Prometheus and Grafana: files, and those of a run.",
    "checkpoints": "The checkpoints of a run.",
    "data": "Prepare data that does not fit in memory: shards, tokenizers.",
    "drill": "Break a real run on purpose; pass only if nothing was lost.",
    "bench": "Measure Shoal against hand-written code.",
    "completion": "Print a shell completion script.",
}
STARTED = time.time()
"""When the command began, in unix seconds: what time to first step counts from."""


class _LazyGroup(click.Group):
    """Knows its commands by name and one line; imports one when it is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"shoal.cli.{name}").command
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with the nearest name for one that does not exist."""
        name = arguments[0]
        if name not in _COMMANDS and not name.startswith("-"):
            from shoal.core.section import one_of

            raise UserError(f"shoal {name}: No such command; {one_of(name, _COMMANDS)}")
        return super().resolve_command(context, arguments)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(VERSION, prog_name="shoal")
def shoal() -> None:
    """Train PyTorch models from recipes, and lose nothing when a run is stopped."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command and exit: 0 done, 1 the run failed, 2 wrong input, 130 interrupted."""
    status = run(arguments)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # PyTorch aborts now and then when a process that used Gloo winds up, and torchrun would call that a failure.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def run(arguments: list[str] | None = None) -> int:  # noqa: PLR0911 - one return a kind of error
    """The command's exit status; every error becomes words on stderr."""
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115, PTH123 - closed by the caller (2>&-)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115, PTH123 - likewise (>&-)
    stdout, status = sys.stdout, 0
    try:
        result: Any = shoal.main(arguments, prog_name="shoal", standalone_mode=False)
        status = result if isinstance(result, int) else 0
        sys.stdout.flush()
        return status
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show(sys.stderr)
        return 2
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = context.command_path if context is not None else "shoal"
        _complain(UserError(f"{error.format_message().rstrip('.')}; see {where} --help"))
        return 2
    except UserError as error:
        _complain(error)
        return 2
    except RunError as error:
        if isinstance(error, WorkerError):
            sys.stderr.write(error.trace)
        _complain(error)
        return 1
    except SystemExit:
        # The reader has seen enough (`shoal runs list | head`): click exits with 1, having put a muted stdout in place.
        if sys.stdout is not stdout:
            return 0
        raise  # shell completion ends so, or the user's own code
    except BrokenPipeError:
        # The same, noticed by the flush above; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return status
    except (KeyboardInterrupt, click.Abort):
        print("interrupted before anything was written", file=sys.stderr)
        return 130
    except PermissionError as error:
        _complain(UserError(f"{error.filename}: {error.strerror}; check its owner and mode"))
        return 2
    except Exception as error:  # noqa: BLE001 - the last place where an error of the user's code can be told
        # Without what a recipe has from the environment, if it was known where the error passed.
        sys.stderr.write(error.__dict__.get("hide", scrub)(traceback.format_exc()))
        print("error: the above was raised by the code that was run", file=sys.stderr)
        return 1


def _complain(error: Exception) -> None:
    for line in [*str(error).splitlines(), *getattr(error, "__notes__", [])]:
        print(f"error: {line}", file=sys.stderr)


if __name__ == "__main__":
    main()
