"""YAML as a person would write it."""

import re

import yaml


class _Plain(yaml.SafeDumper):
    """Without marks for values that occur twice, and with long texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_NUMBER = re.compile(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0o[0-7]+")
"""What YAML 1.2 takes for a number; to YAML 1.1 some of it is text."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _NUMBER.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _text)


def dump(*documents: object) -> str:
    """Without marks for values that occur twice, and with long texts as blocks."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=110)
