"""The chart rendered: by Helm, from values laid over those of a preset."""

import json
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shoal.core.errors import RunError, UserError
from shoal.core.section import one_of
from shoal.deploy.files import shipped
from shoal.deploy.kubernetes.schema import in_a_sentence, in_a_sentence_of_old
from shoal.deploy.programs import run

CHART = "helm/shoal"
_PROBE = {"job": {"enabled": True, "name": "probe"}}
"""A job uses the storage that is there, so that its class need not be said."""
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


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
class Group:
    """A group of machines, as it is installed: the largest that a pod of its kind can be taken to fit on."""

    gpus: int
    cpu: float
    memory: int
    """Bytes."""
    most: int = 1
    """Pods."""
    leads: bool = False
    has_selector: bool = False
    """Whether it says on which nodes its pods run."""


@dataclass(frozen=True)
class Installed:
    """What of the chart's values a job goes by."""

    runs_at: str | None
    """Where the folders of runs are in the pods; None: no storage for them."""
    groups: Mapping[str, Group]
    """The groups of workers that there are."""
    volumes: Sequence[str] = ()
    """Where what all pods share is in them."""


def installed(release: str, namespace: str, files: Sequence[Path], settings: Sequence[str]) -> Installed:
    """What files and settings come to, looked up in what they render to."""
    cluster = the_job(render(release, namespace, _PROBE, files, settings))["RayJob"]["spec"]["rayClusterSpec"]
    mounts = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    groups = {group["groupName"]: _group(group) for group in cluster["workerGroupSpecs"]}
    shared = {mount["name"]: mount["mountPath"] for mount in mounts if mount["name"] in ("runs", "datasets")}
    return Installed(shared.get("runs"), groups, list(shared.values()))


def the_job(text: str) -> dict[str, dict[str, Any]]:
    """The objects of a job, by their kind, in what was rendered of one."""
    found = {document["kind"]: document for document in yaml.safe_load_all(text) if document}
    if "RayJob" not in found:
        raise UserError("job.enabled: is not the user's to say; leave out what is below job")
    return found


def _group(group: Mapping[str, Any]) -> Group:
    pod = group["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    return Group(
        gpus=int(limits.get("nvidia.com/gpu", 0)),
        cpu=_cores(limits["cpu"]),
        memory=int(limits["memory"][:-2]) * _UNITS[limits["memory"][-2:]],
        most=group["maxReplicas"],
        leads="drivers" in group.get("resources", {}),
        has_selector="nodeSelector" in pod,
    )


def _cores(text: str) -> float:
    cores = int(text[:-1]) / 1000 if text.endswith("m") else float(text)
    return int(cores) if cores.is_integer() else cores


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
        computed.write_text(_as_helm_reads({"managedBy": "shoal", **values}), encoding="utf-8")
        words = ["template", release, str(shipped(CHART)), "--namespace", namespace]
        for file in [*files, computed]:
            words += ["--values", str(file)]
        for setting in settings:
            words += ["--set", setting]
        result = run("helm", words)
    if result.returncode:
        raise _in_words(result.stderr)
    return result.stdout


def check(
    release: str, namespace: str, values: Mapping[str, Any], files: Sequence[Path], settings: Sequence[str]
) -> None:
    """Refuse values that cannot work. A storage class may be missing: it can be said when the chart is installed."""
    render(release, namespace, _PROBE | dict(values), files, settings)


def with_nulls(text: str) -> str:
    """Values as the chart's ConfigMap tells them, with null for what the chart has by default and was taken away: Helm
    leaves that out, and would put it back. So it is with groups of workers and variables, which users name."""
    values = yaml.safe_load(text)
    defaults = yaml.safe_load(shipped(f"{CHART}/values.yaml").read_text(encoding="utf-8"))
    for default, there in (
        (defaults["workers"], values.setdefault("workers", {})),
        (defaults["nccl"]["environment"], values.setdefault("nccl", {}).setdefault("environment", {})),
    ):
        there.update({name: None for name in default if name not in there})
    return _as_helm_reads(values)


def _as_helm_reads(values: Mapping[str, Any]) -> str:
    """Values for a file. In JSON a text is one to every reader; Helm takes `y` and `1e3` of YAML for something else."""
    return json.dumps(values)


def laid_over(files: Sequence[Path], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some files and these, the later over the earlier, as Helm would read them."""
    merged: dict[str, Any] = {}
    for layer in [*(yaml.safe_load(file.read_text(encoding="utf-8")) or {} for file in files), values]:
        merged = _merged(merged, layer)
    return merged


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    both = {name: _merged(below[name], value) for name, value in above.items() if _are_maps(below.get(name), value)}
    return {**below, **above, **both}


def _are_maps(*values: Any) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def install_command(release: str, namespace: str, file: str, settings: Sequence[str]) -> str:
    """What installs the chart with the values of a file."""
    words = ["helm", "install", release, str(shipped(CHART)), "--namespace", namespace, "--values", file]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)


def _in_words(said: str) -> Exception:
    """What Helm complains about, as lines that name the value."""
    if found := re.search(r"execution error at \(.*?\): (.*)", said):
        return UserError(found[1])
    if refused := re.findall(r"^\s*- at '(.*?)': (.*)$", said, re.MULTILINE):
        told = [in_a_sentence(path, words) for path, words in refused if words != "validation failed"]
        return UserError("\n".join(told))
    if refused := re.findall(r"^- (\S+): (.*)$", said, re.MULTILINE):  # Helm before 3.18
        return UserError("\n".join(in_a_sentence_of_old(path, words) for path, words in refused))
    lines = [line for line in said.strip().splitlines() if line and "--debug" not in line]
    message = "\n".join(line.removeprefix("Error: ") for line in lines) or "without a word"
    if "failed parsing --set" in said or "error converting YAML" in said or "no such file" in said:
        return UserError(message)
    return RunError(f"helm template: {message}")
