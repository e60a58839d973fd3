"""What Kubernetes would say of pods before it lets them in: quotas, ranges and PodSecurity, computed as it does."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Manifest = Mapping[str, Any]
_UNITS = {"m": Fraction(1, 1000), "": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_SMALL = {"cpu": "200m", "memory": "256Mi"}
"""What KubeRay gives to the containers that it adds to wait for the head, or to clear Redis."""
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


@dataclass(frozen=True)
class Pods:
    """Pods of one kind."""

    name: str
    namespace: str
    number: int
    """At most."""
    spec: Mapping[str, Any]


def quantity(value: object) -> Fraction:
    text = str(value)
    digits = text.rstrip("kKMGTim")
    return Fraction(digits) * _UNITS[text[len(digits) :]]


def pods_of(manifests: Sequence[Manifest]) -> Iterator[Pods]:
    """All pods that come of these objects, as the controllers and KubeRay make them."""
    for manifest in manifests:
        kind, spec = manifest["kind"], manifest.get("spec", {})
        name, namespace = manifest["metadata"]["name"], manifest["metadata"].get("namespace", "")
        if kind in ("Deployment", "StatefulSet"):
            yield Pods(name, namespace, spec["replicas"], spec["template"]["spec"])
        elif kind == "DaemonSet":
            yield Pods(name, namespace, 1, spec["template"]["spec"])
        elif kind == "RayCluster":
            yield from _of_cluster(name, namespace, spec)
        elif kind == "RayJob":
            yield Pods(f"{name}-submitter", namespace, 1, spec["submitterPodTemplate"]["spec"])
            yield from _of_cluster(name, namespace, spec["rayClusterSpec"])


def _of_cluster(name: str, namespace: str, spec: Manifest) -> Iterator[Pods]:
    head = dict(spec["headGroupSpec"]["template"]["spec"])
    if spec.get("enableInTreeAutoscaling"):
        options = spec["autoscalerOptions"]
        image = {key: head["containers"][0][key] for key in ("image", "imagePullPolicy")}
        own = {key: options[key] for key in ("resources", "securityContext", "env", "volumeMounts")}
        autoscaler = {"name": "autoscaler", **image, **own}
        head["containers"] = [*head["containers"], autoscaler]
    yield Pods(f"{name}-head", namespace, 1, head)
    for group in spec["workerGroupSpecs"]:
        worker = dict(group["template"]["spec"])
        main = worker["containers"][0]
        copied = {key: main[key] for key in ("image", "imagePullPolicy", "securityContext", "env", "volumeMounts")}
        waits = {"name": "wait-gcs-ready", **copied, "resources": _both(_SMALL)}
        worker["initContainers"] = [*worker.get("initContainers", []), waits]
        yield Pods(f"{name}-{group['groupName']}", namespace, group["maxReplicas"] * group.get("numOfHosts", 1), worker)
    if "gcsFaultToleranceOptions" in spec:  # the job that clears Redis when the cluster is deleted
        cleanup = dict(spec["headGroupSpec"]["template"]["spec"])
        cleanup["containers"] = [{**cleanup["containers"][0], "resources": _both(_SMALL)}]
        yield Pods(f"{name}-redis-cleanup", namespace, 1, cleanup)


def _both(amounts: Mapping[str, str]) -> dict[str, Mapping[str, str]]:
    return {"requests": amounts, "limits": amounts}


def containers(pods: Pods) -> list[Manifest]:
    return [*pods.spec.get("initContainers", []), *pods.spec["containers"]]


def takes(pods: Pods) -> dict[str, Fraction]:
    """What one such pod counts for in a quota: the sum of its containers, or the largest that goes before them."""
    total: dict[str, Fraction] = {"pods": Fraction(1)}
    for what in ("requests", "limits"):
        for container in pods.spec["containers"]:
            for name, amount in container["resources"][what].items():
                key = f"{what}.{name}"
                total[key] = total.get(key, Fraction(0)) + quantity(amount)
        for container in pods.spec.get("initContainers", []):
            for name, amount in container["resources"][what].items():
                key = f"{what}.{name}"
                total[key] = max(total.get(key, Fraction(0)), quantity(amount))
    return total


def over_quota(quota: Manifest, pods: Sequence[Pods]) -> list[str]:
    """What of a quota all pods together would exceed."""
    used: dict[str, Fraction] = {}
    for kind in pods:
        for name, amount in takes(kind).items():
            used[name] = used.get(name, Fraction(0)) + kind.number * amount
    hard = {name: quantity(value) for name, value in quota["spec"]["hard"].items()}
    over = [name for name in used if name in hard and used[name] > hard[name]]
    return [f"{name}: {float(used[name])} of {float(hard[name])}" for name in over]


def outside_range(limit_range: Manifest, pods: Pods) -> list[str]:
    """Containers that a LimitRange refuses."""
    largest = {name: quantity(value) for name, value in limit_range["spec"]["limits"][0]["max"].items()}
    return [
        f"{pods.name}/{container['name']}: {name} {container['resources']['limits'].get(name)}"
        for container in containers(pods)
        for name in largest
        if quantity(container["resources"]["limits"].get(name, "999Ti")) > largest[name]
    ]


def not_restricted(pods: Pods) -> Iterator[str]:
    """What PodSecurity "restricted" refuses: the standard's controls, one by one."""
    spec, of_pod = pods.spec, pods.spec.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{pods.name}: {name}"
    for volume in spec.get("volumes", []):
        if kinds := set(volume) - {"name"} - _VOLUMES:
            yield f"{pods.name}: volume {volume['name']} is {kinds}"
    for container in containers(pods):
        own, where = container.get("securityContext", {}), f"{pods.name}/{container['name']}"
        if own.get("privileged"):
            yield f"{where}: privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield f"{where}: allowPrivilegeEscalation"
        if own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"):
            yield f"{where}: capabilities"
        if not own.get("runAsNonRoot", of_pod.get("runAsNonRoot")):
            yield f"{where}: runAsNonRoot"
        if own.get("runAsUser", of_pod.get("runAsUser", 1)) == 0:
            yield f"{where}: runAsUser 0"
        seccomp = own.get("seccompProfile", of_pod.get("seccompProfile", {}))
        if seccomp.get("type") not in ("RuntimeDefault", "Localhost"):
            yield f"{where}: seccompProfile"
        if any("hostPort" in port for port in container.get("ports", [])):
            yield f"{where}: hostPort"
