"""Texts without what must not be seen: passwords in addresses, tokens, keys."""

import re
from collections.abc import Mapping
from typing import Any

_IN_ADDRESS = re.compile(r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@'\"]+@")
_NAMED = re.compile(
    r"(?<![\w-])(?P<name>(?:[\w-]*(?:password|passwd|secret|token|api[_-]?key|access[_-]?key|credentials?|signature)|sig)"
    r"[\"']?\s*[=:]\s*[\"']?)(?P<value>\$\{env:\w+\}|[^\s&\"',;}]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?P<name>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_KNOWN = re.compile(
    r"\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|glpat-[\w-]{20,})"
)
_SHOWN_ANYWAY = re.compile(r"(?:null|none|true|false|\d{1,12}(?:\.\d+)?|\$\{env:\w+\}|\*\*\*)", re.IGNORECASE)
"""What follows such a name and is no secret: `num_tokens=512`, or the reference that stands for one."""


def scrub(text: str) -> str:
    """The text with `***` in place of whatever looks like a secret."""
    text = _IN_ADDRESS.sub(r"\g<scheme>***@", text)
    text = _NAMED.sub(_without_value, text)
    text = _BEARER.sub(r"\g<name>***", text)
    return _KNOWN.sub("***", text)


def scrubbed(value: Any) -> Any:
    """The value with every text in it, however deep, as `scrub` leaves it."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {name: scrubbed(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(item) for item in value]
    return value


def _without_value(match: re.Match[str]) -> str:
    if _SHOWN_ANYWAY.fullmatch(match["value"]):
        return match[0]
    return f"{match['name']}***"
