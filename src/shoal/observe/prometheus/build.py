"""Writes the files that ship: `python -m shoal.observe.prometheus.build`, after a change of what they are made from."""

from collections.abc import Mapping
from pathlib import Path

from shoal.core.plain_yaml import dump
from shoal.observe.prometheus.dashboard import dashboard_json
from shoal.observe.prometheus.dcgm import counters_csv, manifests
from shoal.observe.prometheus.rule_tests import rule_tests
from shoal.observe.prometheus.rules import rules
from shoal.observe.prometheus.scrape import scrape_config
from shoal.observe.prometheus.shipped_files import SHIPPED

_WORDS = {
    "prometheus.yml": "What Prometheus reads: prometheus --config.file=prometheus.yml. More machines: targets/.",
    "alerts.yml": "Alerts on training runs; what to do about each is in docs/prometheus.md.",
    "alerts.test.yml": "Each alert fires and clears: promtool test rules alerts.test.yml.",
    "dcgm-exporter.yaml": "What GPUs do, on every machine that has some: kubectl apply -f dcgm-exporter.yaml.",
}


def _yaml(name: str, *documents: object) -> str:
    return f"# {_WORDS[name]}\n{dump(*documents)}"


def files() -> Mapping[str, str]:
    """name -> content."""
    return {
        "prometheus.yml": _yaml("prometheus.yml", scrape_config()),
        "alerts.yml": _yaml("alerts.yml", rules()),
        "alerts.test.yml": _yaml("alerts.test.yml", rule_tests()),
        "dashboard.json": dashboard_json(),
        "dcgm-exporter.yaml": _yaml("dcgm-exporter.yaml", *manifests()),
        "dcgm-counters.csv": counters_csv(),
    }


def write(folder: Path) -> None:
    """All of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(SHIPPED)
