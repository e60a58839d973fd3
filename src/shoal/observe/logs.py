"""Where log messages go while a command runs: plain lines on stderr, or JSON lines beside the reports."""

import logging
import sys
from typing import TextIO

from shoal.core.storage import to_json_line


class _JsonFormatter(logging.Formatter):
    """A message as one JSON object, in the form of events."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        fields = {"time": record.created, "event": "log", "level": record.levelname.lower(), "logger": record.name}
        return to_json_line(fields | {"message": record.getMessage()})


def show_logs(as_json: bool, stream: TextIO | None = None) -> logging.Handler:
    """Show what Shoal itself logs (downloads, say) from now on; take it away with `hide_logs`."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter() if as_json else logging.Formatter("%(message)s"))
    logger = logging.getLogger("shoal")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    return handler


def hide_logs(handler: logging.Handler) -> None:
    """Undo `show_logs`."""
    logging.getLogger("shoal").removeHandler(handler)
