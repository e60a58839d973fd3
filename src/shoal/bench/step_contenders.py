"""Who trains in `shoal bench step --peers`, what each needs, and where that is found."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import UserError
from shoal.core.section import one_of

TRAINING_PACKAGES = Path(".peers-training")
"""What `make peers` fills: packages of contenders that Shoal itself must stay free of."""
INSTALL = "not installed; `make peers` installs it in a folder of its own"
_CHECKOUT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Contender:
    """One row."""

    kind: str
    """Who trains: `plain`, `lightning`, `accelerate` or `shoal`."""
    title: str
    compiles: bool = False
    needs: tuple[str, ...] = ()
    """Packages of which one must be there."""

    @property
    def is_shoal(self) -> bool:
        """Whether this is measured against the others."""
        return self.kind == "shoal"


CONTENDERS = {
    "plain": Contender("plain", "a loop by hand, eager"),
    "plain_compiled": Contender("plain", "a loop by hand, model and loss compiled", compiles=True),
    "lightning": Contender("lightning", "Lightning, eager", needs=("pytorch_lightning", "lightning")),
    "lightning_compiled": Contender(
        "lightning", "Lightning, model and loss compiled", compiles=True, needs=("pytorch_lightning", "lightning")
    ),
    "accelerate": Contender("accelerate", "Accelerate, eager", needs=("accelerate",)),
    "accelerate_compiled": Contender(
        "accelerate", "Accelerate, model and loss compiled", compiles=True, needs=("accelerate",)
    ),
    "shoal": Contender("shoal", "Shoal, the recipe as it is"),
    "shoal_fast": Contender("shoal", "Shoal, with --fast"),
    "shoal_ray": Contender("shoal", "Shoal, the recipe as it is, in a worker on Ray", needs=("ray",)),
}
"""In the order of the table."""
_BY_OPTION = {"shoal_fast": "--fast KEY=VALUE", "shoal_ray": "--launcher ray"}


def find_packages() -> Path | None:
    """The folder with the peers' packages; None where there is none."""
    return next((place for root in (Path.cwd(), _CHECKOUT) if (place := root / TRAINING_PACKAGES).is_dir()), None)


def why_not(contender: Contender, packages: Path | None) -> str | None:
    """Why a contender cannot be measured here; None if it can."""
    if not contender.needs or any(_is_there(name, packages) for name in contender.needs):
        return None
    return "needs Ray: pip install 'ray[default]'" if contender.is_shoal else INSTALL


def _is_there(name: str, packages: Path | None) -> bool:
    return importlib.util.find_spec(name) is not None or (packages is not None and (packages / name).is_dir())


def choose_contenders(only: str | None, has_fast: bool, has_ray: bool) -> list[str]:
    """The contenders that are asked for, by `--only a,b` or all that the other options allow, in the table's order."""
    possible = {"shoal_fast": has_fast, "shoal_ray": has_ray}
    allowed = [name for name in CONTENDERS if possible.get(name, True)]
    asked = [name.strip() for name in only.split(",")] if only is not None else allowed
    for name in asked:
        if name in CONTENDERS and name not in allowed:
            raise UserError(f"--only: {name} is measured with {_BY_OPTION[name]}; add that")
        if name not in allowed:
            raise UserError(f"--only: {name!r} is not measured here; {one_of(name, allowed)}")
    for name, is_asked in possible.items():
        if is_asked and name not in asked:
            raise UserError(f"--only: leaves out {name}, which {_BY_OPTION[name]} asks for; add it, or leave that out")
    return [name for name in CONTENDERS if name in asked]


def parted(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of Shoal, and their peers."""
    ours = [name for name in names if CONTENDERS[name].is_shoal]
    return ours, [name for name in names if name not in ours]
