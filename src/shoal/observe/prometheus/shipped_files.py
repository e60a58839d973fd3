"""The files that ship, as they lie in the package."""

from collections.abc import Mapping
from pathlib import Path

SHIPPED = Path(__file__).parent / "shipped"
_NAMES = (
    "prometheus.yml",
    "alerts.yml",
    "alerts.test.yml",
    "dashboard.json",
    "dcgm-exporter.yaml",
    "dcgm-counters.csv",
)


def shipped_files() -> Mapping[str, Path]:
    """name -> where it is."""
    return {name: SHIPPED / name for name in _NAMES}
