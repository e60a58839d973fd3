"""YAML as a person would write it."""

import re

import yaml


class _Plain(yaml.SafeDumper):
    """Without marks for values that occur twice, and with long texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_NO_TEXT = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0o[0-7]+|[yYnN]")
"""What others take for a number or a flag: YAML 1.2, and Go's readers of 1.1."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _NO_TEXT.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _text)


def dump(*documents: object) -> str:
    """Without marks for values that occur twice, and with long texts as blocks."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=110)
