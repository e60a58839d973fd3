"""What a terminal can show: its characters, and the colours and letters of phases."""

import os
from dataclasses import dataclass

from rich.console import Console

from shoal.observe.event_words import one_line
from shoal.observe.phases import PHASES

COLOURS = {
    "data": "#E69F00",
    "h2d": "#F0E442",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "forward_backward": "#0072B2",
    "optimizer": "#009E73",
    "comm": "#D55E00",
    "compile": "#BBBBBB",
    "checkpoint": "#CC79A7",
    "evaluate": "#999999",
    "report": "#666666",
    "start": "#BBBBBB",
    "end": "#BBBBBB",
}
"""Okabe and Ito's, which people who see few colours tell apart, and greys."""
LETTERS = dict(zip(PHASES, "sdhfbxocmkern", strict=True))
"""What stands for a phase where there are no colours."""
_DARK = ("backward", "forward_backward", "report", "comm")


@dataclass(frozen=True)
class Look:
    """How to draw."""

    is_plain: bool = False
    """ASCII alone."""
    has_colours: bool = True
    """Enough of them to tell phases apart."""

    def __call__(self, character: str) -> str:
        """One of our own characters, or what stands for it in ASCII."""
        return _PLAIN.get(character, character) if self.is_plain else character

    def text(self, words: str) -> str:
        """Words that somebody else chose."""
        return self.same_length(one_line(words))

    def same_length(self, words: str) -> str:
        """Words in which every character keeps its place."""
        return words.encode("ascii", "replace").decode("ascii") if self.is_plain else words

    def phase_style(self, phase: str) -> str:
        """For a stretch of a bar, with words in it."""
        if not self.has_colours:
            return ""
        return f"{'white' if phase in _DARK else 'black'} on {COLOURS.get(phase, '#BBBBBB')}"

    def phase_fill(self, phase: str) -> str:
        """What a stretch of a bar is filled with."""
        return " " if self.has_colours else LETTERS.get(phase, "?")

    def thin(self, phase: str) -> tuple[str, str]:
        """What a bar is filled with that has others above and below it, and its style."""
        if self.has_colours and not self.is_plain:
            return "▇", COLOURS.get(phase, "#BBBBBB")
        return self.phase_fill(phase), self.phase_style(phase)


_PLAIN = {"─": "-", "│": "|", "┤": "+", "└": "+", "━": "#", "╸": "#", "·": "-", "…": "~", "◀": "<", "●": "*"}


def look_of(console: Console) -> Look:
    """As the terminal, the locale and NO_COLOR say."""
    locale = next((os.environ[name] for name in ("LC_ALL", "LC_CTYPE", "LANG") if os.environ.get(name)), "")
    has_unicode = console.encoding.lower().startswith("utf") and locale.upper() not in ("C", "POSIX")
    # The console of Linux itself has no braille, from which curves are drawn.
    is_plain = not has_unicode or os.environ.get("TERM") in ("linux", "dumb")
    has_colours = not console.no_color and console.color_system in ("256", "truecolor", "windows")
    return Look(is_plain, has_colours)
