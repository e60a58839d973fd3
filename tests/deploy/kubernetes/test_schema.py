"""What Helm says of wrong values, as sentences."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from shoal.core.errors import UserError
from shoal.deploy.kubernetes import chart
from shoal.deploy.kubernetes.chart import render
from shoal.deploy.kubernetes.schema import in_a_sentence
from tests.deploy.kubernetes.rendering import CHART_FOLDER, NAMED

SENTENCES = {
    "workers.cpu.gpus=-1": "workers.cpu.gpus: -1 should be a whole number, 0 or more",
    "workers.cpu.memory=16GB": "workers.cpu.memory: '16GB' should be a size with its unit, as in 512Mi, 16Gi or 1Ti",
    "workers.cpu.cpu=0": "workers.cpu.cpu: 0 should be a number of cores above 0, as in 4, 0.5 or 500m",
    "workers.cpu.maxReplicas=two": "workers.cpu.maxReplicas: should be a whole number, 0 or more (got string",
    "workers.cpu=3": "workers.cpu: should be a group of machines that train, or null for none (got number",
    "workers.cpu.memroy=1Gi": "workers.cpu.memroy: there is no such value; allowed: annotations, ",
    "dcgm.enable=true": "dcgm.enable: there is no such value; allowed: enabled, namespace; did you mean enabled?",
    "imgae.tag=1": "did you mean image?",
    "workers.Big.cpu=2": "workers.Big: 'Big' is no such name; these are groups, named in small letters, digits",
    "environment.A B=1": "environment.A B: 'A B' is no such name; these are variables, named in letters",
    "workers.x.cpu=1": "workers.x.maxReplicas: is missing",
    "workers.cpu.spread[0].maxSkew=0": "workers.cpu.spread.0.maxSkew: 0 should be a whole number, 1 or more",
    "workers.cpu.spread[0].labelSelector.a=b": "workers.cpu.spread.0.labelSelector: is not the user's to say",
    "workers.cpu.resources.a\\.b/c[0]=1": "workers.cpu.resources.a.b/c: should be an amount, as in 64",
    "storage.s3.endpoint=s3.example.com": "storage.s3.endpoint: 's3.example.com' should be an address, as in https://",
    "placement.nodeSelector=a": "placement.nodeSelector: should be texts by their names (got string",
    "storage.runs.accessMode=RWX": "storage.runs.accessMode: value must be one of 'ReadWriteMany', 'ReadWriteOnce'",
    "networkPolicy.dns.ports={70000}": "networkPolicy.dns.ports.0: 70000 should be a port, from 1 to 65535",
    "networkPolicy.dns.ports=null": "networkPolicy.dns.ports: is missing",
    "workers=null": "workers: is missing",
    "quota.hard.pods=100K": "quota.hard.pods: '100K' should be an amount, as in 64, 500m or 512Gi",
    "networkPolicy.dns.cidrs={1.2.3/99}": "'1.2.3/99' should be a range of addresses, as in 10.0.0.0/8 or fd00::/8",
}


@pytest.mark.parametrize("setting", SENTENCES)
def test_a_wrong_value_is_told_with_what_it_should_be(setting: str) -> None:
    with pytest.raises(UserError) as refused:
        render("shoal", "ml", {}, settings=[*NAMED, setting])
    lines = str(refused.value).splitlines()
    assert any(SENTENCES[setting] in line for line in lines), lines
    assert not any("validation failed" in line for line in lines)


def test_words_of_helm_that_are_not_known_are_told_as_they_are() -> None:
    assert in_a_sentence("/job", "is not as it was") == "job: is not as it was"
    assert in_a_sentence("", "got string, want object") == "values: got string, want object"
    assert in_a_sentence("/no/such", "got string, want object") == "no.such: got string, want object"


OLD_HELM = """Error: values don't meet the specifications of the schema(s) in the following chart(s):
shoal:
- (root): Additional property imgae is not allowed
- workers.cpu: Additional property memroy is not allowed
- workers.cpu.gpus: Must be greater than or equal to 0
- workers.cpu.memory: Does not match pattern '^[1-9][0-9]*(Mi|Gi|Ti)$'
- workers.x: maxReplicas is required
"""


def test_words_of_helm_before_3_18_become_sentences_too() -> None:
    told = str(chart._in_words(OLD_HELM)).splitlines()
    assert told[0].startswith("imgae: there is no such value") and told[0].endswith("did you mean image?")
    assert told[1].startswith("workers.cpu.memroy: there is no such value; allowed: annotations, ")
    assert told[2].startswith("workers.cpu.gpus: should be a whole number, 0 or more (Must be")
    assert told[3].startswith("workers.cpu.memory: should be a size with its unit, as in 512Mi, 16Gi or 1Ti (Does")
    assert told[4:] == ["workers.x.maxReplicas: is missing"]


def _rules(node: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, dict):
        if {"pattern", "minimum", "exclusiveMinimum", "maximum"} & node.keys() and "type" in node:
            yield where, node
        for name, below in node.items():
            yield from _rules(below, f"{where}/{name}")


def test_whatever_can_be_wrong_has_words_and_stands_in_the_schema_once() -> None:
    schema = json.loads((CHART_FOLDER / "values.schema.json").read_text())
    rules = dict(_rules(schema))
    assert len(rules) > 15
    assert [where for where, rule in rules.items() if not rule.get("description")] == []
    texts = [json.dumps(rule, sort_keys=True) for rule in rules.values()]
    assert len(set(texts)) == len(texts)
