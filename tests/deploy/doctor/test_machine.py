"""Every check of this machine."""

import os
import re
from pathlib import Path

import pytest

from shoal.deploy.doctor import limits
from shoal.deploy.doctor.devices import Devices
from shoal.deploy.doctor.finding import Finding
from shoal.deploy.doctor.machine import check_here, check_machine


def test_the_machine_that_runs_the_tests_fails_nothing(here: Path) -> None:
    findings = list(check_machine())
    assert not [finding for finding in findings if finding.level == "fail"], findings
    names = [finding.check for finding in findings]
    assert len(names) == len(set(names))
    assert {"python", "torch", "ray", "imports", "shm", "run folder", "ports", "clock", "open files"} <= set(names)
    assert all(finding.found and finding.group == "machine" for finding in findings)
    assert all(finding.advice for finding in findings if finding.level in ("warn", "fail"))
    assert list(here.iterdir()) == []


def test_storage_that_is_not_there_fails(here: Path) -> None:
    findings = {finding.check: finding for finding in check_machine(here / "not-mounted")}
    assert findings["storage"].level == "fail" and "run folder" not in findings


def test_what_cannot_be_looked_at_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/proc/meminfo")

    monkeypatch.setattr(limits, "check_limits", refuse)
    findings = {finding.check: finding for finding in check_here(Devices(), os.environ)}
    assert findings["memory"].level == "skip" and "/proc/meminfo" in findings["memory"].found
    assert "shm" in findings


def _documented() -> set[str]:
    text = (Path(__file__).parents[3] / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def _in_code() -> set[str]:
    """The names of checks, as they stand in the code."""
    source = Path(limits.__file__).parent
    text = "\n".join(file.read_text(encoding="utf-8") for file in source.glob("*.py"))
    found = set(re.findall(r"\b(?:Finding|passed|skipped)\(\s*\"([^\"]+)\"", text))
    found |= set(re.findall(r"_judge_room\(\"([^\"]+)\"", text))
    return found | set(re.findall(r"_all_reduce\(visit, \"([^\"]+)\"", text)) | {"torch", "ray"}


def test_every_check_is_in_the_documents() -> None:
    assert _in_code() == _documented()


def test_troubleshooting_names_checks_that_there_are() -> None:
    text = (Path(__file__).parents[3] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    named = [cell for line in text.splitlines() if line.startswith("| ") for cell in line.split("|")[2:4]]
    found = {name for cell in named for name in re.findall(r"`([a-z -]+)`", cell)} & _documented()
    assert {"connections", "shm", "gpu health", "bandwidth", "ray folder", "storage"} <= found
