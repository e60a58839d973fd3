"""Lines of a frame and what they are made of: cut to size, with a word before them, side by side, bars."""

from collections.abc import Mapping, Sequence

from rich.text import Text

from shoal.observe.monitor.look import Look
from shoal.observe.phases import PHASES

LABEL = 11
"""Columns of the word before a line."""


def order(phase: str) -> int:
    """Where a phase stands among the others."""
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def stretches(shares: Mapping[str, float], width: int) -> dict[str, int]:
    """Columns of each, which add up to `width` times their sum, each rounded so that the bar's end is right."""
    found, total, used = {}, 0.0, 0
    for name, value in shares.items():
        total += value
        end = round(total * width)
        found[name], used = max(end - used, 0), max(end, used)
    return found


def beside(blocks: Sequence[list[Text]], widths: Sequence[int], look: Look, gap: int = 2) -> list[Text]:
    """Blocks of lines next to each other."""
    lines = []
    for row in range(max((len(block) for block in blocks), default=0)):
        line = Text("", no_wrap=True)
        for number, (block, width) in enumerate(zip(blocks, widths, strict=True)):
            cell = fit(block[row].copy(), width, look) if row < len(block) else Text("")
            if number < len(blocks) - 1:
                cell.pad_right(width - cell.cell_len + gap)
            line.append_text(cell)
        lines.append(line)
    return lines


def title(words: str, width: int, look: Look) -> Text:
    """Words on a line of their own."""
    line = Text.assemble((look.text(words), "bold"), " ", no_wrap=True)
    line.append(look("─") * max(width - line.cell_len, 0), "dim")
    return fit(line, width, look)


def labelled(label: str, text: Text, width: int, height: int, look: Look) -> list[Text]:
    """A word, and what there is to say, broken into so many lines at most."""
    rest = text.copy()
    rest.plain = look.same_length(text.plain)
    lines: list[Text] = []
    while rest.plain and len(lines) < height:
        cut = _break_at(rest.plain, max(width - LABEL, 1)) if len(lines) < height - 1 else len(rest.plain)
        line = Text.assemble((f"{'' if lines else label:<{LABEL}}", "bold"), no_wrap=True)
        line.append_text(rest[:cut])
        lines.append(fit(line, width, look))
        rest = rest[cut + len(rest.plain[cut:]) - len(rest.plain[cut:].lstrip(" ")) :]
    return lines


def _break_at(words: str, width: int) -> int:
    if len(words) <= width:
        return len(words)
    space = words.rfind(" ", 0, width + 1)
    return space if space > width // 2 else width


def fit(line: Text, width: int, look: Look) -> Text:
    """Cut with a mark where it is too long."""
    if line.cell_len > width:
        line.truncate(max(width - 1, 0))
        line.append(look("…"))
    line.no_wrap = True
    return line
