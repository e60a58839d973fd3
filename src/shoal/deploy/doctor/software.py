"""Python, Shoal, and the packages that Shoal needs."""

import platform
import sys
from dataclasses import dataclass
from importlib import metadata

from shoal.core.version import VERSION
from shoal.deploy.doctor.finding import Finding, in_list, passed, skipped

NAMED = ("torch", "ray")
"""Packages with a line of their own."""
_INSTALL = "install Shoal anew, which brings them: pip install -c constraints.txt -e ."


@dataclass(frozen=True)
class Package:
    """A package that Shoal needs."""

    name: str
    version: str | None
    """What is installed, or None."""
    wanted: str
    """As `pyproject.toml` says it: `<2.14,>=2.11`."""

    @property
    def fits(self) -> bool:
        """Whether the right one is there."""
        from packaging.specifiers import SpecifierSet

        return self.version is not None and SpecifierSet(self.wanted).contains(self.version, prereleases=True)


def look_at_packages(distribution: str = "shoal") -> list[Package]:
    """What the installed Shoal says that it needs, without its extras; nothing where it is not installed."""
    from packaging.requirements import Requirement

    try:
        required = [Requirement(line) for line in metadata.requires(distribution) or []]
    except metadata.PackageNotFoundError:
        return []
    needed = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [Package(one.name, version_of(one.name), str(one.specifier)) for one in needed]


def version_of(package: str) -> str | None:
    """What is installed of it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def wanted_python(distribution: str = "shoal") -> str:
    """Which Python Shoal needs."""
    try:
        return str(metadata.metadata(distribution)["Requires-Python"])
    except (metadata.PackageNotFoundError, KeyError):
        return ">=3.11"


def judge_python(version: str, wanted: str, executable: str = sys.executable) -> Finding:
    """Whether this Python runs Shoal."""
    from packaging.specifiers import SpecifierSet

    found = f"{version}, {executable}"
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return passed("python", found)
    return Finding("python", "fail", f"{found}; Shoal needs {wanted}", f"make an environment with Python {wanted}")


def judge_packages(packages: list[Package]) -> list[Finding]:
    """torch and Ray by name, the others in one line."""
    if not packages:
        why = "Shoal runs from its files and is not installed, so what it needs is not known"
        return [skipped(name, why) for name in (*NAMED, "packages")]
    findings = [_judge_package(one) for one in packages if one.name in NAMED]
    others = [one for one in packages if one.name not in NAMED]
    wrong = [f"{one.name} {one.version or 'is missing'} (needed: {one.wanted})" for one in others if not one.fits]
    if wrong:
        return [*findings, Finding("packages", "fail", in_list(wrong), _INSTALL)]
    return [*findings, passed("packages", f"{len(others)} others, all in the versions that Shoal needs")]


def _judge_package(package: Package) -> Finding:
    needed = f"Shoal needs {package.wanted}"
    install = f"pip install '{package.name}{'[default]' if package.name == 'ray' else ''}{package.wanted}'"
    if package.version is None:
        return Finding(package.name, "fail", f"not installed; {needed}", install)
    if not package.fits:
        return Finding(package.name, "fail", f"{package.version}; {needed}", install)
    return passed(package.name, f"{package.version} ({package.wanted})")


def check_software() -> list[Finding]:
    """All of these."""
    return [
        judge_python(platform.python_version(), wanted_python()),
        passed("shoal", VERSION),
        *judge_packages(look_at_packages()),
    ]
