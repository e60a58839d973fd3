"""Python and packages."""

from importlib import metadata

import pytest

from shoal.deploy.doctor.software import (
    Package,
    check_software,
    judge_packages,
    judge_python,
    look_at_packages,
    version_of,
    wanted_python,
)


@pytest.mark.parametrize(
    ("version", "level"), [("3.11.7", "pass"), ("3.12.1", "pass"), ("3.13.0rc1", "pass"), ("3.10.14", "fail")]
)
def test_python(version: str, level: str) -> None:
    finding = judge_python(version, ">=3.11", "/bin/python")
    assert finding.level == level and "/bin/python" in finding.found and bool(finding.advice) == (level == "fail")


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.13.0+cpu", True), ("2.11.0", True), ("2.13.0.dev20260101+cu130", True), ("2.14.0", False), (None, False)],
)
def test_a_version_in_or_out_of_the_range(version: str | None, fits: bool) -> None:
    assert Package("torch", version, "<2.14,>=2.11").fits == fits


def test_what_is_missing_or_wrong_is_named_with_the_command() -> None:
    found = judge_packages(
        [
            Package("torch", "2.9.0", "<2.14,>=2.11"),
            Package("ray", None, "<2.61,>=2.60"),
            Package("rich", "13.0", "<16,>=14"),
            Package("numpy", "2.1", "<3,>=2"),
        ]
    )
    torch, ray, others = found
    assert [finding.level for finding in found] == ["fail", "fail", "fail"]
    assert torch.found == "2.9.0; Shoal needs <2.14,>=2.11" and torch.advice == "pip install 'torch<2.14,>=2.11'"
    assert ray.found.startswith("not installed") and "'ray[default]<2.61,>=2.60'" in ray.advice
    assert others.found == "rich 13.0 (needed: <16,>=14)"


def test_a_shoal_that_is_not_installed_is_no_fault() -> None:
    assert look_at_packages("shoal-that-is-not-there") == []
    assert {finding.level for finding in judge_packages([])} == {"skip"}
    assert wanted_python("shoal-that-is-not-there") == ">=3.11"


def test_this_environment_is_right() -> None:
    needed = {package.name for package in look_at_packages()}
    assert {"torch", "ray", "click"} <= needed and "pytest" not in needed  # not those of the extras
    assert version_of("torch") == metadata.version("torch") and version_of("no-such-package") is None
    findings = check_software()
    assert {finding.level for finding in findings} == {"pass"}, findings
    assert [finding.check for finding in findings][:2] == ["python", "shoal"]
