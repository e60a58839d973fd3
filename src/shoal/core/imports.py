"""Finding what a user names as `module:attribute`."""

import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from shoal.core.errors import UserError
from shoal.core.section import nearest


def load_object(reference: str, field: str) -> Any:
    """The object that `module:attribute` names; the working directory is searched first, as `python -m` does."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{field}: {reference!r} should look like module:name, for example my_task:Regression")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A module that exists but imports something missing is another mistake than a wrong name.
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise UserError(
                f"{field}: no module named {module_name!r}; it is looked for in {here} and on PYTHONPATH"
            ) from error
        raise UserError(f"{field}: importing {module_name!r} needs {error.name!r}, which is not installed") from error
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        what = f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        raise UserError(f"{field}: importing {module_name!r} failed: {what}") from error
    target: Any = module
    for part in attribute.split("."):
        if not hasattr(target, part):
            guess = nearest(part, dir(target))
            hint = f"; did you mean {guess}?" if guess else ""
            raise UserError(f"{field}: module {module_name!r} has no {attribute!r}{hint}")
        target = getattr(target, part)
    return target


def call_object(reference: str, section: str, args: dict[str, Any]) -> Any:
    """What the class or function that `section`.name points to gives for `section`.args."""
    function = load_object(reference, f"{section}.name")
    if not callable(function):
        raise UserError(f"{section}.name: {reference} is a {type(function).__name__}, not a class or function")
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C, without a signature: calling it will tell
        return function(**args)
    try:
        signature.bind(**args)
    except TypeError as error:
        raise UserError(f"{section}.args: {reference}{signature} does not take them: {error}") from None
    return function(**args)


def require(module_name: str, field: str, extra: str) -> Any:
    """An optional module, or an error that says which extra brings it."""
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        package = {"PIL": "Pillow"}.get(module_name, module_name.partition(".")[0])
        raise UserError(f"{field}: needs {package}: pip install 'shoal[{extra}]' ({error})") from error
