"""Prints what Shoal and some of its extras need: python requirements.py pyproject.toml EXTRA,EXTRA.

So that an image has Shoal's dependencies in a layer of their own, which a change of Shoal's code leaves as it is.
"""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:
    """Those of the project, then those of the extras."""
    optional = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in optional]:
        raise SystemExit(f"EXTRAS: there is no {', '.join(unknown)}; there are {', '.join(sorted(optional))}")
    return [*project["dependencies"], *(one for extra in extras for one in optional[extra])]


if __name__ == "__main__":
    table = tomllib.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["project"]
    print(*requirements(table, [extra for extra in sys.argv[2].split(",") if extra]), sep="\n")
