"""The base of every section of a recipe, and the words for a value that is one of several names."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a recipe: unknown keys are errors, types are not guessed, values do not change after loading."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )


CUSTOM = "module:name"
"""The tag of a section whose `name` points into the user's own code."""


def name_tag(value: Any) -> str | None:
    """Which of the sections told apart by `name` a value is meant for: a known name, or the user's `module:name`."""
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    if not isinstance(name, str):
        return None
    return CUSTOM if ":" in name else name


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that `name` was probably meant to be, if one is close."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return matches[0] if matches else None


def one_of(name: str, allowed: Iterable[str]) -> str:
    """`allowed: a, b, c; did you mean b?` for an error message."""
    names = sorted(allowed)
    guess = nearest(name, names)
    return f"allowed: {', '.join(names)}" + (f"; did you mean {guess}?" if guess else "")
