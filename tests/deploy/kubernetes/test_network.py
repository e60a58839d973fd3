"""Who may talk to whom: the policies, computed as a network plugin does."""

import ipaddress
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

from tests.deploy.kubernetes.rendering import NAMESPACE, manifests, template

RAY = {"ray.io/is-ray-node": "yes"}
HEAD = {**RAY, "ray.io/node-type": "head"}
WORKER = {**RAY, "ray.io/node-type": "worker"}
SHOAL = {"app.kubernetes.io/name": "shoal", "app.kubernetes.io/instance": "shoal"}
SUBMITTER = {**SHOAL, "shoal/group": "submitter"}
REDIS, MLFLOW, POSTGRESQL = (
    {**SHOAL, "app.kubernetes.io/component": name} for name in ("redis", "mlflow", "postgresql")
)
OTHER = {"app": "other"}
Peer = tuple[str, Mapping[str, str]]
NODE: Peer = ("a node", {})
"""Where the API server may be. To Cilium no range of addresses holds a node's, not even that of all."""


def _selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    for rule in selector.get("matchExpressions", []):
        assert rule["operator"] == "In"
        if labels.get(rule["key"]) not in rule["values"]:
            return False
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def _matches(peer: Mapping[str, Any], other: Peer) -> bool:
    namespace, labels = other
    if "ipBlock" in peer:
        address = ipaddress.ip_address(namespace) if namespace[0].isdigit() else None
        network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return address is not None and address.version == network.version and address in network
    if "namespaceSelector" in peer:
        there = _selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
        return there and _selects(peer.get("podSelector", {}), labels)
    return namespace == NAMESPACE and _selects(peer["podSelector"], labels)


def _passes(direction: str, own: Peer, other: Peer, port: int, case: str) -> bool:
    """Whether the policies at one end let it through."""
    namespace, labels = own
    if namespace != NAMESPACE:
        return True
    policies = [
        found["spec"]
        for found in manifests(case)
        if found["kind"] == "NetworkPolicy" and found["metadata"]["namespace"] == NAMESPACE
    ]
    policies = [policy for policy in policies if _selects(policy["podSelector"], labels)]
    side = "from" if direction == "Ingress" else "to"
    assert any(direction in policy["policyTypes"] for policy in policies)  # so that what is not named is refused
    return any(
        any(_matches(peer, other) for peer in rule.get(side, [])) if side in rule else True
        for policy in policies
        if direction in policy["policyTypes"]
        for rule in policy.get(direction.lower()) or []
        if port in [item["port"] for item in rule.get("ports", [{"port": port}])]
    )


def may_call(source: Peer, target: Peer, port: int, case: str = "everything") -> bool:
    return _passes("Egress", source, target, port, case) and _passes("Ingress", target, source, port, case)


def _in(labels: Mapping[str, str]) -> Peer:
    return NAMESPACE, labels


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        (_in(WORKER), _in(HEAD), 6379),
        (_in(WORKER), _in(WORKER), 43210),
        (_in(HEAD), _in(WORKER), 43210),
        (_in(HEAD), _in(REDIS), 6379),
        (_in(WORKER), _in(MLFLOW), 5000),
        (_in(MLFLOW), _in(POSTGRESQL), 5432),
        (_in(SUBMITTER), _in(HEAD), 8265),
        (("kuberay-operator", OTHER), _in(HEAD), 8265),
        (("notebooks", OTHER), _in(HEAD), 8265),
        (("notebooks", OTHER), _in(HEAD), 10001),
        (("monitoring", OTHER), _in(WORKER), 8080),
        (_in(HEAD), ("203.0.113.9", {}), 6443),
        (_in(HEAD), NODE, 6443),
        (_in(WORKER), ("203.0.113.9", {}), 443),
        (_in(WORKER), ("kube-system", {"k8s-app": "kube-dns"}), 53),
        (_in(WORKER), ("169.254.20.10", {}), 53),
    ],
)
def test_what_ray_needs_passes(source: Peer, target: Peer, port: int):
    assert may_call(source, target, port)


@pytest.mark.parametrize(
    ("source", "target", "port"),
    [
        (_in(OTHER), _in(HEAD), 8265),
        (("default", OTHER), _in(HEAD), 8265),
        (("default", OTHER), _in(HEAD), 6379),
        (("default", OTHER), _in(HEAD), 10001),
        (("203.0.113.9", {}), _in(HEAD), 8265),
        (("kuberay-operator", OTHER), _in(HEAD), 6379),
        (("monitoring", OTHER), _in(HEAD), 8265),
        (("notebooks", OTHER), _in(WORKER), 8265),
        (_in(SUBMITTER), _in(WORKER), 43210),
        (_in(SUBMITTER), ("203.0.113.9", {}), 443),
        (_in(WORKER), _in(POSTGRESQL), 5432),
        (_in(OTHER), _in(REDIS), 6379),
        (_in(WORKER), ("203.0.113.9", {}), 6443),
        (_in(WORKER), NODE, 6443),
        (_in(WORKER), ("default", OTHER), 80),
        (_in(REDIS), ("203.0.113.9", {}), 443),
        (_in(WORKER), ("kube-system", {}), 443),
        (_in(WORKER), ("203.0.113.9", {}), 53),
        (_in(REDIS), ("169.254.20.10", {}), 443),
    ],
)
def test_nothing_else_does(source: Peer, target: Peer, port: int):
    assert not may_call(source, target, port)


def test_a_redis_of_ones_own_is_reached():
    """Its port is opened, wherever it is: with the chart's own Redis it is not."""
    redis = ("203.0.113.9", {})
    assert may_call(_in(HEAD), redis, 6400, case="elsewhere") and may_call(_in(HEAD), redis, 9000, case="elsewhere")
    assert not may_call(_in(HEAD), redis, 6379, case="elsewhere")
    assert not may_call(_in(HEAD), redis, 6400) and not may_call(_in(WORKER), redis, 6379)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("https://s3.example.com:9000", 9000), ("https://s3.example.com/", 443), ("http://10.0.0.9", 80)],
)
def test_the_port_of_a_store_of_ones_own_is_open(endpoint: str, port: int):
    settings = ["storage.runs.storageClass=x", "storage.s3.enabled=true", f"storage.s3.endpoint={endpoint}"]
    (policy,) = (
        found
        for found in yaml.safe_load_all(template(settings).stdout)
        if found and found["kind"] == "NetworkPolicy" and found["metadata"]["name"] == "shoal-ray"
    )
    assert {"ports": [{"protocol": "TCP", "port": port}]} in policy["spec"]["egress"]
