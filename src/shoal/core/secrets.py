"""Texts without what must not be seen: passwords in addresses, tokens, keys."""

import re
from collections.abc import Mapping
from typing import Any

_WORDS = (
    r"(?:password|passwd|passphrase|pwd|_pass|secret|tokens?|(?:api|access|private|account|secret)[_-]?key"
    r"|credentials?|signature)"
)
_IN_ADDRESS = re.compile(
    r"(?P<scheme>\b[a-zA-Z][a-zA-Z0-9+.-]*://)[^\s/@:'\"]*(?::(?!\d{1,5}(?:/|\b(?!@)))[^\s'\"]*)?@"
)
_NAMED = re.compile(
    rf"(?<![\w-])(?P<name>(?:[\w-]*{_WORDS}|sig|pass|auth)[\"']?[ \t]*[=:][ \t]*)"
    r"(?P<value>\"[^\"\n]*\"|'[^'\n]*'|\$\{env:\w+\}|[^\s&\"';}]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"(?P<name>\b(?:(?:bearer|basic)\s+|token\s+(?=\S*\d)))[A-Za-z0-9._~+/=-]{8,}",
    re.IGNORECASE,
)
_KNOWN = re.compile(
    r"\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{20,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|glpat-[\w-]{20,}"
    r"|xox[abpr]-[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*)"
)
_NOT_ONE = re.compile(r"(?:null|none|true|false|\$\{env:\w+\}|\*\*\*)", re.IGNORECASE)
"""What stands where a secret would, and is none: the reference to one, above all."""
_COUNT = re.compile(r"\d{1,12}(?:\.\d+)?")
_SECRET_NAME = re.compile(rf"(?:[\w-]*{_WORDS}|sig|pass|auth)", re.IGNORECASE)
_OF_TOKENS = re.compile(r"[\w-]*tokens?[\"']?\s*[=:]?\s*", re.IGNORECASE)
_HIDDEN = "***"


def scrub(text: str) -> str:
    """The text with `***` in place of whatever looks like a secret."""
    text = _IN_ADDRESS.sub(rf"\g<scheme>{_HIDDEN}@", text)
    text = _NAMED.sub(_without_value, text)
    text = _BEARER.sub(rf"\g<name>{_HIDDEN}", text)
    return _KNOWN.sub(_HIDDEN, text)


def scrubbed(value: Any, name: str = "") -> Any:
    """The value with every text in it, however deep, as `scrub` leaves it; and nothing of what has a secret's name."""
    if name and _SECRET_NAME.fullmatch(name) and not _is_harmless(name, value):
        return _HIDDEN
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, Mapping):
        return {key: scrubbed(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [scrubbed(item) for item in value]
    return value


def _is_harmless(name: str, value: Any) -> bool:
    if value is None or isinstance(value, bool):
        return True
    if isinstance(value, int | float):  # so many tokens, not a token
        return _OF_TOKENS.fullmatch(name) is not None
    return isinstance(value, str) and (not value or _NOT_ONE.fullmatch(value) is not None)


def _without_value(match: re.Match[str]) -> str:
    value = match["value"]
    quote = value[0] if value[0] in "\"'" else ""
    inside = value.strip(quote) if quote else value
    is_count = _OF_TOKENS.fullmatch(match["name"]) and _COUNT.fullmatch(inside)
    if not inside or is_count or _NOT_ONE.fullmatch(inside):
        return match[0]
    return f"{match['name']}{quote}{_HIDDEN}{quote}"
