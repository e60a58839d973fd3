import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.errors import UserError
from shoal.core.imports import load_object, require

SOURCES = {
    "good": "class Outer:\n    class Inner:\n        value = 7\ndef build(): return 'built'\n",
    "needs_more": "import surely_not_installed\n",
    "raises": "raise ZeroDivisionError('by nought')\n",
    "bad_syntax": "def f(:\n",
    "package/__init__": "",
    "package/inner": "thing = 'deep'\n",
}


@pytest.fixture
def modules(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules in the working directory, which is not on the path, as for the installed command."""
    for name, source in SOURCES.items():
        file = here / f"importable_{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield here
    for name in [name for name in sys.modules if name.startswith("importable_")]:
        del sys.modules[name]


def test_a_module_of_the_working_directory_is_found(modules: Path) -> None:
    assert load_object("importable_good:build", "task.name")() == "built"
    assert load_object("importable_good:Outer.Inner.value", "task.name") == 7
    assert load_object("importable_package.inner:thing", "task.name") == "deep"


def test_an_installed_module_is_found(modules: Path) -> None:
    assert load_object("collections.abc:Mapping", "model.name").__name__ == "Mapping"


def test_the_working_directory_goes_before_what_is_installed(modules: Path) -> None:
    (modules / "elsewhere").mkdir()
    (modules / "elsewhere" / "importable_twice.py").write_text("where = 'elsewhere'")
    (modules / "importable_twice.py").write_text("where = 'here'")
    sys.path.insert(0, str(modules / "elsewhere"))
    assert load_object("importable_twice:where", "task.name") == "here"


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("importable_good", ("should look like module:name",)),
        (":build", ("should look like module:name",)),
        ("importable_good:", ("should look like module:name",)),
        ("importable_gone:x", ("no module named 'importable_gone'", "PYTHONPATH")),
        ("importable_package.gone:x", ("no module named 'importable_package.gone'",)),
        ("importable_good.gone:x", ("no module named 'importable_good.gone'",)),
        ("importable_needs_more:x", ("'importable_needs_more' needs 'surely_not_installed'", "not installed")),
        ("importable_raises:x", ("importing 'importable_raises' failed", "ZeroDivisionError: by nought")),
        ("importable_bad_syntax:x", ("importing 'importable_bad_syntax' failed", "SyntaxError")),
        ("importable_good:biuld", ("has no 'biuld'", "did you mean build?")),
        ("importable_good:Outer.Iner", ("has no 'Outer.Iner'", "did you mean Inner?")),
        ("..relative:x", ("importing '..relative' failed",)),
    ],
)
def test_a_wrong_reference_is_told_with_its_field(modules: Path, reference: str, says: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        load_object(reference, "task.name")
    message = str(caught.value)
    assert message.startswith("task.name: ")
    assert all(words in message for words in says), message


def test_an_optional_module_is_imported_or_its_extra_named() -> None:
    assert require("json", "data.name", "images").dumps({}) == "{}"
    with pytest.raises(UserError, match=r"data.name: needs no_such_module: pip install 'shoal\[images\]'"):
        require("no_such_module", "data.name", "images")
