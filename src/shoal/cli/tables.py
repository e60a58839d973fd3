"""Tables of plain text."""

import click


def print_table(rows: list[list[str]], to_stderr: bool) -> None:
    """Columns as wide as they must be: names to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    for row in rows:
        first, *others = row
        cells = [f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)]
        click.echo("  ".join([f"{first:{widths[0]}}", *cells]).rstrip(), err=to_stderr)
