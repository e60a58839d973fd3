"""Writes what is made from something else in `deploy/`: `python -m shoal.deploy.build`, after a change of that."""

import json
from collections.abc import Mapping
from pathlib import Path

from shoal.deploy import aws
from shoal.deploy.files import shipped
from shoal.deploy.kubernetes.chart import CHART, preset_file, presets, render
from shoal.observe.prometheus.shipped_files import shipped_files

NAMESPACE = "shoal"
PLACEHOLDERS = {
    "gpu": ["storage.runs.storageClass=replace-with-a-readwritemany-class"],
    "spot": ["storage.runs.storageClass=replace-with-a-readwritemany-class"],
    "eks": ["aws.efs.fileSystemId=fs-00000000000000000"],
}
"""What only the user knows, by preset."""


def chart_files() -> Mapping[str, str]:
    """What the chart has of Prometheus and Grafana."""
    files = {name: path.read_text(encoding="utf-8") for name, path in shipped_files().items()}
    dashboard = json.dumps(json.loads(files["dashboard.json"]), separators=(",", ":"))
    return {name: files[name] for name in ("alerts.yml", "dcgm-exporter.yaml")} | {"dashboard.json": dashboard + "\n"}


def manifests() -> Mapping[str, str]:
    """The chart rendered for every preset, for those without Helm."""
    found = {}
    for name, words in presets().items():
        placeholders = PLACEHOLDERS.get(name, [])
        lines = [
            f"# {words}",
            f"# Made from the chart by `make charts`: shoal deploy kubernetes --preset {name}",
            *(f"# Replace before you apply it: {setting.partition('=')[2]}" for setting in placeholders),
        ]
        text = render("shoal", NAMESPACE, {"namespace": {"create": True}}, [preset_file(name)], placeholders)
        found[f"{name}.yaml"] = "\n".join(lines) + "\n" + text
    return found


def write(folder: Path) -> None:
    """All of them, below `deploy/`."""
    for name, text in chart_files().items():
        (folder / CHART / "files" / name).write_text(text, encoding="utf-8")
    (folder / "kubernetes").mkdir(exist_ok=True)
    for name, text in manifests().items():
        (folder / "kubernetes" / name).write_text(text, encoding="utf-8")
    aws.write_files(folder / "aws")


if __name__ == "__main__":
    write(shipped("."))
