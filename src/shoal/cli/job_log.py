"""The log of a job that is followed from here."""

from typing import Any

import click


class LogView:
    """Shows the lines of a job's log, but for Ray's own and the summary, which is told in words."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.num_lines = 0
        self.summary: dict[str, Any] | None = None

    def __call__(self, line: str) -> None:
        """Show a line, or keep the summary that it is."""
        from shoal.launch.submit import is_chatter, summary_in

        if (summary := summary_in(line)) is not None:
            self.summary = summary
        elif not is_chatter(line):
            self.num_lines += 1
            click.echo(line, err=self.as_json)
