"""The files that ship are made from the code of today, are accepted by Prometheus's own tools, and hold together."""

import importlib.util
import itertools
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.observe.prometheus.dcgm import COUNTERS
from shoal.observe.prometheus.names import TABLE
from shoal.observe.prometheus.rules import ALERTS
from shoal.observe.prometheus.shipped_files import SHIPPED, shipped_files
from tests.observe.prometheus.servers import binary

PAGE = Path(__file__).parents[3] / "docs" / "prometheus.md"
DASHBOARD: dict[str, Any] = json.loads((SHIPPED / "dashboard.json").read_text())
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def tool(*arguments: str) -> str:
    found = subprocess.run(
        [binary("promtool"), *arguments], cwd=SHIPPED, capture_output=True, text=True, timeout=300, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_they_are_up_to_date() -> None:
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        pytest.skip("grafana-foundation-sdk is not installed: pip install 'shoal[grafana]'")
    from shoal.observe.prometheus.build import files

    made = files()
    assert set(made) == set(shipped_files())
    stale = [name for name, text in made.items() if (SHIPPED / name).read_text() != text]
    assert not stale, f"python -m shoal.observe.prometheus.build makes {stale} anew"


def test_the_configuration_is_valid() -> None:
    assert "SUCCESS" in tool("check", "config", "prometheus.yml")


def test_the_rules_are_valid() -> None:
    assert f"SUCCESS: {len(ALERTS)} rules found" in tool("check", "rules", "alerts.yml")


def test_each_alert_fires_and_clears() -> None:
    assert "SUCCESS" in tool("test", "rules", "alerts.test.yml")


def test_each_alert_is_tested() -> None:
    text = (SHIPPED / "alerts.test.yml").read_text()
    assert {alert.name for alert in ALERTS} == set(re.findall(r'ALERTS\{alertname="(\w+)"', text))


def test_each_alert_says_what_to_do() -> None:
    headings = {heading.lower() for heading in re.findall(r"^#+ (\w+)$", PAGE.read_text(), re.MULTILINE)}
    for rule in yaml.safe_load((SHIPPED / "alerts.yml").read_text())["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert {"summary", "description", "runbook"} == set(rule["annotations"])
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/prometheus.md" and anchor in headings, rule["alert"]


def test_the_docs_list_every_metric() -> None:
    listed = set(re.findall(r"`(shoal_\w+)`", PAGE.read_text()))
    assert listed == set(TABLE)


def test_panels_have_ids_of_their_own_and_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) and all(isinstance(number, int) for number in ids)
    for one, other in itertools.combinations(DASHBOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (one["title"], other["title"])
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in DASHBOARD["panels"])


def test_panels_ask_something_say_what_they_show_and_in_which_unit() -> None:
    for panel in PANELS:
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["targets"] and all(target["expr"] and target["refId"] for target in panel["targets"])
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert panel["datasource"] == {"type": "prometheus", "uid": "$datasource"}
        assert panel["type"] == "state-timeline" or panel["fieldConfig"]["defaults"]["unit"]


def test_rows_and_variables() -> None:
    assert [row["title"] for row in ROWS] == ["Cluster", "GPU", "Training", "Communication", "Checkpoints", "System"]
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "run", "rank"]
    for name in ("run", "rank"):
        assert variables[name]["multi"] and variables[name]["includeAll"] and variables[name]["allValue"] == ".*"


def test_no_question_is_about_a_metric_that_nobody_tells() -> None:
    known = {*TABLE, *(name for name, _, _ in COUNTERS), "up", "ALERTS"}
    known |= {"ray_node_cpu_utilization", "ray_node_mem_used", "ray_node_mem_total"}
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]] + [alert.expr for alert in ALERTS]
    for expr in asked:
        names = set(re.findall(r"\b(?:shoal_\w+|DCGM_\w+|ray_\w+|up|ALERTS)\b", expr))
        assert names and names <= known, (expr, names - known)


def test_the_exporter_of_gpus_has_no_more_rights_than_it_needs() -> None:
    counters, daemons, service = yaml.safe_load_all((SHIPPED / "dcgm-exporter.yaml").read_text())
    assert counters["data"]["dcgm-counters.csv"] == (SHIPPED / "dcgm-counters.csv").read_text()
    assert [counters["kind"], daemons["kind"], service["kind"]] == ["ConfigMap", "DaemonSet", "Service"]
    pod = daemons["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    rights = container["securityContext"]
    assert not rights["privileged"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]} and not pod["automountServiceAccountToken"]
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    assert service["spec"]["selector"] == daemons["spec"]["selector"]["matchLabels"]
    environment = {variable["name"]: variable["value"] for variable in container["env"]}
    assert environment["DCGM_EXPORTER_COLLECTORS"].startswith(container["volumeMounts"][0]["mountPath"])


def test_counters_that_need_privileges_are_left_out() -> None:
    lines = [line for line in (SHIPPED / "dcgm-counters.csv").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(COUNTERS)
    for line in lines:
        name, kind, words = line.split(", ", 2)
        assert name.startswith("DCGM_FI_DEV_") and kind in ("gauge", "counter") and words
        assert "," not in words, "the exporter splits lines there"
