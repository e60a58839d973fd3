"""YAML as a person would write it."""

import yaml


class _Plain(yaml.SafeDumper):
    """Without marks for values that occur twice, and with long texts as blocks."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Plain.add_representer(str, _text)


def dump(*documents: object) -> str:
    """Without marks for values that occur twice, and with long texts as blocks."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, width=110)
