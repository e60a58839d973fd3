"""The files of `deploy/`: in a checkout they lie at its top, in an installed package inside of it."""

from pathlib import Path

_PACKAGED = Path(__file__).parent / "shipped"
_CHECKOUT = Path(__file__).parents[3] / "deploy"


def shipped(name: str) -> Path:
    """Where a file or folder of `deploy/` is: `helm/shoal`, `docker/Dockerfile`."""
    return (_PACKAGED if _PACKAGED.is_dir() else _CHECKOUT) / name
