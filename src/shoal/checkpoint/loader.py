"""The few lines that lie beside exported weights and load them where there is no Shoal."""

from collections.abc import Sequence

_LINES = '''"""Weights of {origin}. Needs torch and safetensors, and nothing else.

    {how}
    load_into(model)
"""

from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parent
FILES = {files}


def weights():
    """Every tensor, by name."""
    return {{name: tensor for file in FILES for name, tensor in load_file(FOLDER / file).items()}}


def load_into(model):
    """Fill a model, one file after the other; a KeyError, and nothing changed, if the weights are not all its own."""
    given = set()
    for file in FILES:
        with safe_open(FOLDER / file, framework="pt") as opened:
            given.update(opened.keys())
    # Tied weights are here once, by their first name: a name that shares its tensor with one of `given` is not missing.
    own = model.state_dict(keep_vars=True)
    filled = {{id(tensor) for name, tensor in own.items() if name in given}}
    missing = [name for name, tensor in own.items() if id(tensor) not in filled]
    unexpected = sorted(given - own.keys())
    if missing or unexpected:
        raise KeyError(f"not the weights of this model: missing {{missing}}, unexpected {{unexpected}}")
    for file in FILES:
        model.load_state_dict(load_file(FOLDER / file), strict=False)
    return model


if __name__ == "__main__":
    for name, tensor in weights().items():
        print(name, tuple(tensor.shape), tensor.dtype)
'''


def loader_text(origin: str, files: Sequence[str], name: str) -> str:
    """Python code that loads `files`, which lie beside it.

    Args:
        origin: Run and step, in words.
        files: In the order in which they are read.
        name: Of the file that the code goes into.
    """
    can_be_imported = name.removesuffix(".py").isidentifier()
    how = "from load import load_into"
    if not can_be_imported:
        how = f'load_into = runpy.run_path("{_in_text(name)}")["load_into"]  # after: import runpy'
    return _LINES.format(origin=_in_text(origin), files=[str(file) for file in files], how=how)


def _in_text(text: str) -> str:
    """As it may stand in a quoted string: a folder's name can hold anything."""
    return text.encode("unicode_escape").decode().replace('"', r"\"")
