"""The chart rendered: by Helm, from values laid over those of a preset."""

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.core.errors import RunError, UserError
from shoal.core.section import one_of
from shoal.deploy.files import shipped
from shoal.deploy.kubernetes.schema import in_a_sentence
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


@dataclass(frozen=True)
class Installed:
    """What of the chart's values a job goes by."""

    runs_at: str | None
    """Where the folders of runs are in the pods; None: no storage for them."""
    groups: Mapping[str, Any]
    """The groups of workers that there are."""


def installed(release: str, namespace: str, files: Sequence[Path], settings: Sequence[str]) -> Installed:
    """What files and settings come to, looked up in what they render to."""
    probe = {"job": {"enabled": True, "name": "probe"}}
    text = render(release, namespace, probe, files, settings)
    (job,) = (found for found in yaml.safe_load_all(text) if found and found["kind"] == "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    mounts = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    groups = {}
    for group in cluster["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        gpus = int(pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", 0))
        groups[group["groupName"]] = {"gpus": gpus, "leads": "drivers" in group.get("resources", {})} | (
            {"nodeSelector": pod["nodeSelector"]} if "nodeSelector" in pod else {}
        )
    return Installed(next((mount["mountPath"] for mount in mounts if mount["name"] == "runs"), None), groups)


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
        computed.write_text(yaml.safe_dump({"managedBy": "shoal", **values}), encoding="utf-8")
        words = ["template", release, str(shipped(CHART)), "--namespace", namespace]
        for file in [*files, computed]:
            words += ["--values", str(file)]
        for setting in settings:
            words += ["--set", setting]
        result = run("helm", words)
    if result.returncode:
        raise _in_words(result.stderr)
    return result.stdout


def _in_words(said: str) -> Exception:
    """What Helm complains about, as lines that name the value."""
    if found := re.search(r"execution error at \(.*?\): (.*)", said):
        return UserError(found[1])
    if refused := re.findall(r"^\s*- at '(.*?)': (.*)$", said, re.MULTILINE):
        told = [in_a_sentence(path, words) for path, words in refused if words != "validation failed"]
        return UserError("\n".join(told))
    lines = [line for line in said.strip().splitlines() if line and "--debug" not in line]
    message = "\n".join(line.removeprefix("Error: ") for line in lines) or "without a word"
    if "failed parsing --set" in said or "error converting YAML" in said or "no such file" in said:
        return UserError(message)
    return RunError(f"helm template: {message}")
