"""What `shoal deploy docker` writes: a folder in which `docker compose up` starts a cluster on one machine."""

from collections.abc import Mapping
from pathlib import Path

from shoal.deploy.files import shipped
from shoal.observe.prometheus.shipped_files import shipped_files

_OURS = ("compose.yaml", "prometheus.yml", "grafana/datasource.yml", "grafana/dashboards.yml")
_OF_METRICS = ("alerts.yml", "dashboard.json")
SECRETS = "secrets"
"""The folder beside compose.yaml that holds the cluster's token and Grafana's password; its user makes them."""


def files() -> Mapping[str, str]:
    """name -> content. None of them is secret, and git leaves out those that are."""
    sources = {name: shipped("docker") / name for name in _OURS}
    sources |= {name: path for name, path in shipped_files().items() if name in _OF_METRICS}
    contents = {name: path.read_text(encoding="utf-8") for name, path in sources.items()}
    return contents | {".gitignore": f"{SECRETS}/\n.env\n"}


def is_ours(compose: Path) -> bool:
    """Whether a compose.yaml is Shoal's, of this version or another: its first line tells."""
    first, *_ = files()["compose.yaml"].splitlines()
    return compose.read_text(encoding="utf-8", errors="replace").partition("\n")[0] == first
