"""What the doctor has found, for people: a line a check, with what to do below it."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shoal.deploy.doctor.finding import Finding, Level, in_list

_SYMBOLS: dict[Level, tuple[str, str, str]] = {
    "pass": ("✓", "+", "green"),
    "warn": ("!", "!", "yellow"),
    "fail": ("✗", "x", "red"),
    "skip": ("-", "-", "dim"),
}
_NAME_WIDTH = 18
_TITLES = {"machine": "this machine", "nodes": "machines of the cluster", "cluster": "cluster"}


def rows_of(finding: Finding, encoding: str = "utf-8") -> RenderableType:
    """One finding: symbol, word, name, what was found, and the advice under it."""
    symbol, plain, style = _SYMBOLS[finding.level]
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(width=4)
    table.add_column(width=_NAME_WIDTH)
    table.add_column(overflow="fold")
    found = f"{finding.node}: {finding.found}" if finding.node else finding.found
    mark = symbol if encoding.lower().startswith("utf") else plain
    table.add_row(Text(mark, style), Text(finding.level, style), finding.check, Text(found))
    if finding.advice:
        table.add_row("", "", "", Text(f"> {finding.advice}"))
    return Padding(table, (0, 0, 0, 2), expand=False)


def lines_of(finding: Finding) -> list[str]:
    """The same for a pipe: rows that stay whole, for grep."""
    symbol = _SYMBOLS[finding.level][1]
    found = f"{finding.node}: {finding.found}" if finding.node else finding.found
    lines = [f"  {symbol} {finding.level} {finding.check:{_NAME_WIDTH}} {found}"]
    return [*lines, f"{'':{_NAME_WIDTH + 10}}> {finding.advice}"] if finding.advice else lines


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Of several machines: what is the same on some of them in one line, and all that is well in one line."""
    lines: list[Finding] = []
    for check in dict.fromkeys(finding.check for finding in findings):
        of_check = [finding for finding in findings if finding.check == check]
        groups: dict[tuple[Level, str, str], list[Finding]] = {}
        for finding in of_check:
            groups.setdefault((finding.level, finding.found, finding.advice), []).append(finding)
        is_well = {level for level, _, _ in groups} == {"pass"}
        if is_well and len(groups) > 1:
            first = min(of_check, key=lambda finding: finding.node)
            words = f"well on all {len(of_check)}; {first.node}: {first.found}"
            lines.append(Finding(check, "pass", words, group="nodes"))
            continue
        for (level, found, advice), same in groups.items():
            on = f"all {len(same)}" if len(same) == len(of_check) > 1 else in_list(one.node for one in same)
            lines.append(Finding(check, level, found, advice, group="nodes", node=on))
    return lines


class View:
    """Prints findings as they come; those of the cluster's machines when all are there."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._group = ""
        self._waiting: list[Finding] = []

    def show(self, findings: Iterable[Finding]) -> Iterator[Finding]:
        """The same findings, each shown on its way."""
        for finding in findings:
            if finding.group == "nodes":
                self._waiting.append(finding)
            else:
                self.flush()
                self._print(finding)
            yield finding
        self.flush()

    def flush(self) -> None:
        """Print what waits for the findings of other machines."""
        waiting, self._waiting = self._waiting, []
        for finding in merged(waiting):
            self._print(finding)

    def _print(self, finding: Finding) -> None:
        if finding.group != self._group:
            self._console.print(_TITLES[finding.group], style="bold")
            self._group = finding.group
        if self._console.is_terminal:
            self._console.print(rows_of(finding, self._console.encoding))
        else:
            for line in lines_of(finding):
                self._console.print(line, soft_wrap=True)


def summary(findings: Sequence[Finding]) -> str:
    """`21 passed, 2 warnings, 1 failed, 6 skipped`"""
    counts = {level: sum(finding.level == level for finding in findings) for level in _SYMBOLS}
    warnings = f"{counts['warn']} warning{'s' * (counts['warn'] != 1)}"
    return f"{counts['pass']} passed, {warnings}, {counts['fail']} failed, {counts['skip']} skipped"
