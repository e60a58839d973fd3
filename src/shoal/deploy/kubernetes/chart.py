"""The chart rendered: by Helm, from values laid over those of a preset."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from shoal.core.errors import RunError, UserError
from shoal.core.section import one_of
from shoal.deploy.files import shipped
from shoal.deploy.programs import run

CHART = "helm/shoal"


def presets() -> dict[str, str]:
    """name -> what it is for."""
    files = sorted(shipped(f"{CHART}/presets").glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for file in files}


def preset_file(name: str) -> Path:
    """Where a preset's values are."""
    if name not in (known := presets()):
        raise UserError(f"--preset: {name!r} is none; {one_of(name, known)}")
    return shipped(f"{CHART}/presets/{name}.yaml")


def setting(files: Sequence[Path], path: str) -> Any:
    """What the chart's default values, and then `files`, say at a dotted path."""
    found: Any = None
    for file in [shipped(f"{CHART}/values.yaml"), *files]:
        value: Any = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        found = value if value is not None else found
    return found


def groups(files: Sequence[Path]) -> dict[str, Any]:
    """The groups of workers that those files come to; one that a file sets to null is gone."""
    merged: dict[str, Any] = {}
    for file in [shipped(f"{CHART}/values.yaml"), *files]:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        for name, group in (values.get("workers") or {}).items():
            merged[name] = None if group is None else {**(merged.get(name) or {}), **group}
    return {name: group for name, group in merged.items() if group is not None}


def installed_values(release: str, namespace: str, context: str | None) -> str:
    """The values with which the chart was installed, as YAML."""
    words = ["get", "values", release, "--namespace", namespace, "--all", "--output", "yaml"]
    result = run("helm", [*words, *(["--kube-context", context] if context else [])])
    if result.returncode:
        said = result.stderr.strip().splitlines()[-1].removeprefix("Error: ") if result.stderr.strip() else ""
        raise UserError(
            f"--release: the values of {release!r} in the namespace {namespace!r} cannot be read ({said}); install the "
            "chart (docs/kubernetes.md), or say how pods look here: --preset NAME or --values FILE"
        )
    return result.stdout


def render(
    release: str,
    namespace: str,
    values: Mapping[str, Any],
    files: Sequence[Path] = (),
    settings: Sequence[str] = (),
) -> str:
    """What Helm makes of the chart: `files` over its defaults, then `values`, then `settings` (KEY=VALUE)."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        computed = Path(folder) / "computed.yaml"
        computed.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
        words = ["template", release, str(shipped(CHART)), "--namespace", namespace]
        for file in [*files, computed]:
            words += ["--values", str(file)]
        for setting in settings:
            words += ["--set", setting]
        result = run("helm", words)
    if result.returncode:
        raise _in_words(result.stderr)
    return _without_helm(result.stdout)


def _in_words(said: str) -> Exception:
    """What Helm complains about, as lines that name the value."""
    if found := re.search(r"execution error at \(.*?\): (.*)", said):
        return UserError(found[1])
    refused = re.findall(r"^\s*- at '/?(.*?)': (.*)$", said, re.MULTILINE)
    if refused:
        return UserError("\n".join(f"{path.replace('/', '.') or 'values'}: {words}" for path, words in refused))
    lines = [line for line in said.strip().splitlines() if line and "--debug" not in line]
    message = "\n".join(line.removeprefix("Error: ") for line in lines) or "without a word"
    if "failed parsing --set" in said or "error converting YAML" in said or "no such file" in said:
        return UserError(message)
    return RunError(f"helm template: {message}")


def _without_helm(text: str) -> str:
    """Without the label by which Helm knows its own, where nothing is installed by it."""
    return text.replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: shoal")
